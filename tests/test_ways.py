"""Models whose Python code decides by values of tensors: planned for one way, and for others when these come."""

import copy
import functools
import inspect
import random
import warnings
from linecache import getline
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from planner import PlanWarning, applied_plan, plan
from planner.capture.trace.constant_propagation import ConstantPropagation
from planner.capture.trace.data_dependent import Answers
from planner.compat.fake import FakeTensorMode
from planner.compat.tensors import storage_key

from .measure import beside_the_loop, peak_of
from .plans import for_budget
from .variants import keeping, more

pytestmark = pytest.mark.usefixtures("short_searches", "always_compiled")


class Block(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.up, self.norm, self.down = (
            nn.Linear(width, 4 * width),
            nn.BatchNorm1d(4 * width),
            nn.Linear(4 * width, width),
        )

    def forward(self, x):
        return x + self.down(nn.functional.dropout(torch.tanh(self.norm(self.up(x))), 0.1))


def test_an_answer_is_that_of_the_line_above_where_the_one_that_asks_has_none():
    """An `if` in code that torch.compile writes may have the number of a later line."""
    answers, line = Answers(), inspect.currentframe().f_lineno
    answers._given |= {(__file__, line): [3, 4], (__file__, line - 10_000): [5]}
    assert (answers.answer(), answers.answer(), answers.answer()) == (3, 4, 4)
    assert answers.lines() == (f"{__file__}:{line}: {getline(__file__, line).strip()}",)


class Branching(nn.Module):
    """Statistics are updated and random numbers drawn before the question and after it."""

    def __init__(self, ask):
        super().__init__()
        self.ask = ask
        self.first, self.second, self.last = Block(), Block(), Block()

    def forward(self, x):
        x = self.first(x)
        if self.ask(x):
            x = self.second(torch.nn.functional.gelu(x))
        return self.last(x).square().mean()


class Dropping(nn.Module):
    """A stack of layers, each of which is left out now and then."""

    def __init__(self, draw):
        super().__init__()
        self.draw = draw
        self.blocks = nn.ModuleList([Block() for _ in range(4)])
        self.last = nn.Linear(32, 4)

    def forward(self, x):
        for block in self.blocks:
            if self.draw() < 0.3:
                continue
            x = block(x)
        return self.last(x).square().mean()


def drawn():
    return torch.tensor([random.random(), np.random.rand()], dtype=torch.float64)


def step(model, x, seed):
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    loss = model(x)
    loss.backward()
    grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    return [loss.detach(), *grads, *(b.clone() for b in model.buffers()), torch.rand(2), *drawn()]


def compare(model, batches, tmp_path, mode="aten"):
    """Steps without a plan and with one, from the same state; the peaks of the latter. Returns the plan."""
    state = {k: v.clone() for k, v in model.state_dict().items()}
    expected = [step(model, x, seed) for seed, x in enumerate(batches)]
    model.load_state_dict(state)
    del state  # a copy of the weights counts
    torch.manual_seed(0)
    everything = plan(model, batches[0], budget_gb=1, progress=False, mode=mode)
    p = for_budget(everything, 0.75 * everything.baseline_peak_bytes / 2**30)
    p.apply()
    for seed, (x, right) in enumerate(zip(batches, expected, strict=True)):
        found = step(model, x, seed)
        with beside_the_loop():
            for ours, theirs in zip(found, right, strict=True):
                assert (ours is None) == (theirs is None)
                if ours is not None:
                    torch.testing.assert_close(ours, theirs, equal_nan=True)
    for seed, x in enumerate(batches):
        torch.manual_seed(seed)
        assert p.resident_bytes + peak_of(lambda x=x: model(x).backward(), tmp_path) <= p.budget_bytes
        model.zero_grad(set_to_none=True)
    assert applied_plan(model) is not None
    return p


@pytest.mark.parametrize(
    "ask",
    [*more(lambda x: x.sum().item() > 0), lambda x: (x.mean() > 0).all(), *more(lambda x: bool(x.max() > -x.min()))],
    ids=["item", "all", "bool"],
)
def test_a_step_that_goes_another_way_is_taken_back_and_planned(ask, tmp_path):
    torch.manual_seed(0)
    model = Branching(ask)
    batches = [torch.randn(256, 32, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
    with torch.no_grad():
        ways = {bool(ask(model.first(x))) for x in batches}
    assert ways == {True, False}
    for b in model.buffers():
        b.zero_()
    p = compare(model, batches, tmp_path)
    assert "test_ways.py" in p.note  # the line that asks


def test_layers_that_are_dropped_at_random_are_planned_as_kept(tmp_path):
    torch.manual_seed(0)
    model = Dropping(lambda: torch.rand([]))
    p = compare(model, [torch.randn(256, 32)] * 6, tmp_path)
    found = {d.module for d in p.decisions}  # each layer is a graph of its own, and its modules have their paths
    assert {f"blocks.{i}.up" for i in range(4)} < found
    assert found <= {name for name, _ in model.named_modules()}


class Rebinding(Branching):
    """A buffer that is bound anew, and a counter, before the question."""

    def __init__(self, ask):
        super().__init__(ask)
        self.register_buffer("seen", torch.zeros(1))
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        self.seen = 0.9 * self.seen + x.detach().mean()
        return super().forward(x) + self.seen.sum()


@pytest.mark.thorough
def test_what_a_step_that_is_taken_back_has_bound_and_counted(tmp_path):
    torch.manual_seed(0)
    model = Rebinding(lambda x: x.sum().item() > 0)
    batches = [torch.randn(256, 32, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
    compare(model, batches, tmp_path)
    assert model.calls == 3 * 4  # without the plan, with it, measured


@pytest.mark.parametrize(
    "made",
    [lambda: Branching(lambda x: x.sum().item() > 0), lambda: Dropping(lambda: torch.rand([]))],
    ids=["branching", "dropping"],
)
def test_without_a_compiler(made, tmp_path):
    torch.manual_seed(0)  # before the weights are drawn: by these every step goes the way that was planned
    p = compare(made(), [torch.randn(256, 32)] * 4, tmp_path, mode="eager")
    assert "test_ways.py" in p.note  # the line that asks


class Drawing(Dropping):
    """Drops nine layers of ten by a generator of its own, often all of them."""

    def __init__(self, generator):
        super().__init__(generator.random)
        self.generator, self.last = generator, nn.Identity()

    def forward(self, x):
        for block in self.blocks:
            if self.generator.random() < 0.9:
                continue
            x = block(x)
        return self.last(x).square().mean()


DRAWS = {"random": lambda: random.random(), "numpy": lambda: np.random.uniform()}


@pytest.mark.parametrize("early", [True, False], ids=["planned before", "at the first step"])
@pytest.mark.parametrize("draws", keeping("random", of=DRAWS))
def test_every_way_trains_the_first_one_without_any_layer(draws, early):
    model, x = Dropping(DRAWS[draws]), torch.randn(32, 32)
    empty = next(seed for seed in range(10_000) if not ran(model, x, seed))
    check(model, x, [empty, *range(5)], early)


def ran(model, x, seed):
    """The layers that a step runs."""
    return [g for g in step(model, x, seed)[1 : 1 + 6 * len(model.blocks)] if g is not None]


def test_nine_layers_of_ten_are_dropped_by_a_generator_of_the_model():
    model = Drawing(random.Random(1))
    x = torch.randn(32, 32, requires_grad=True)
    check(model, x, range(6), True)


def check(model, x, seeds, early):
    """Each step under a plan is as without one: loss, gradients, statistics, random state."""
    twin = copy.deepcopy(model)
    plan(model, x if early else None, budget_gb=1, progress=False).apply()
    for seed in seeds:
        for ours, theirs in zip(step(model, x, seed), step(twin, x, seed), strict=True):
            assert (ours is None) == (theirs is None)
            assert ours is None or torch.equal(ours, theirs)


def test_a_single_random_number_draws_as_without_a_plan(tmp_path):
    torch.manual_seed(0)
    model = Dropping(lambda: torch.rand(1).item())
    compare(model, [torch.randn(256, 32)] * 6, tmp_path)


@pytest.mark.thorough
def test_a_model_that_never_takes_the_same_way_says_so():
    class Scaled(Branching):
        def forward(self, x):
            return self.last(self.first(x) * x.std().item()).square().mean()

    model = Scaled(None)
    plan(model, torch.randn(64, 32), budget_gb=1, progress=False).apply()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", PlanWarning)
        for _ in range(3):
            model(torch.randn(64, 32)).backward()
        assert not said
        for _ in range(3):
            model(torch.randn(64, 32)).backward()
    assert sum("ways through its code" in str(w.message) for w in said) == 1


def test_what_a_cache_kept_of_planning_is_forgotten():
    import functools

    @functools.lru_cache
    def positions(n):
        return torch.arange(n, dtype=torch.float32)

    class Cached(Branching):
        def forward(self, x):
            return super().forward(x + positions(32))

    model = Cached(lambda x: False)
    plan(model, torch.randn(64, 32), budget_gb=1, progress=False)
    assert torch.equal(positions(32), torch.arange(32.0))


def test_values_of_a_batch_are_known_without_a_copy_until_a_model_writes_into_them():
    batch = torch.arange(6.0).reshape(2, 3)
    propagation = ConstantPropagation(FakeTensorMode(), Answers(), {})
    (whole, again, row), _ = propagation.fake((batch, batch, batch[1]), {})
    assert whole is again
    assert all(storage_key(t.constant) == storage_key(batch) for t in (whole, row))
    with propagation.mode:
        row.mul_(2)
        assert whole.sum().item() == 3 + 24
    assert batch.sum() == 15


class Warped(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3, padding=1)

    def forward(self, x, grid):
        return nn.functional.grid_sample(self.conv(x), grid, align_corners=False)


def test_planning_computes_no_weights_of_an_interpolation_at_places_that_the_batch_gives(tmp_path):
    """The op is taken apart into many: each would make as much as the output, by values that are known."""
    model, batch = Warped(), (torch.randn(4, 3, 32, 32), torch.rand(4, 32, 32, 2) * 2 - 1)
    run = functools.partial(plan, model, batch, budget_gb=1, loss_fn=lambda output: output.square().mean())
    assert peak_of(run, tmp_path) < model(*batch).nbytes / 2


class Routed(nn.Module):
    """Each row goes through the expert that it chooses: how many an expert gets depends on values."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(16, 3)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(3))

    def forward(self, x):
        weights, chosen = self.gate(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for at, expert in enumerate(self.experts):
            (rows,) = torch.where(chosen == at)
            out = out.index_add(0, rows, expert(x[rows]) * weights[rows, None])
        return out


class AroundRouting(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.routed, self.last = wide(), Routed(), wide()

    def forward(self, x):
        return self.last(self.routed(self.first(x))).square().mean()


class RoutedByName(Routed):
    """Converts its gate as it runs, and names its experts by tensors, as sparse layers of transformers do."""

    def __init__(self):
        super().__init__()
        self.by_name = nn.ModuleDict({f"expert_{at}": expert for at, expert in enumerate(self.experts)})

    def forward(self, x):
        self.gate = self.gate.to(torch.float32)
        weights, chosen = self.gate(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for at in nn.functional.one_hot(chosen, 3).sum(0).greater(0).nonzero():
            (rows,) = torch.where(chosen == at)
            out = out.index_add(0, rows, self.by_name[f"expert_{at[0]}"](x[rows]) * weights[rows, None])
        return out


class AroundRoutingByName(AroundRouting):
    def __init__(self):
        super().__init__()
        self.routed = RoutedByName()


class RoutedInALoop(nn.Module):
    """Calls layers and routing in a loop of its own, of which torch.compile leaves the whole function alone."""

    def __init__(self):
        super().__init__()
        self.layers, self.routed = nn.ModuleList(wide() for _ in range(3)), nn.ModuleList(Routed() for _ in range(3))

    def forward(self, x):
        for layer, routed in zip(self.layers, self.routed, strict=True):
            x = x + routed(layer(x))
        return x.square().mean()


class MaskedHere(nn.Module):
    """Its own forward() takes some rows of its batch, after a part that takes all."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Sequential(wide(), wide()), nn.Linear(16, 4)

    def forward(self, x):
        h = self.body(x)
        return self.head(h[x[:, 0] > 0]).square().mean() + h.square().mean()


class Looking(nn.Module):
    """The gradient of its table is sparse."""

    def __init__(self):
        super().__init__()
        self.table, self.body = nn.Embedding(50, 16, sparse=True), nn.Sequential(wide(), wide())

    def forward(self, x):
        at = (x[:, 0].abs() * 9).long()
        return self.body(self.table(at) + self.table(at + 1)).square().mean()  # two sparse gradients are added


def wide():
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16), nn.Tanh())


@pytest.mark.parametrize("kind", [AroundRouting, *more(AroundRoutingByName, RoutedInALoop), MaskedHere, Looking])
def test_what_depends_on_values_is_kept_and_the_rest_is_planned(kind, tmp_path):
    model, x = kind(), torch.randn(64, 16)
    plain = copy.deepcopy(model)
    p = plan(model, x, budget_gb=1)
    least = for_budget(p, 0.9 * p.baseline_peak_bytes / 2**30)
    least.apply()
    assert least.peak_bytes < p.baseline_peak_bytes
    for batch in (x, torch.randn(64, 16, generator=torch.Generator().manual_seed(1))):  # other rows, the same graphs
        compiled = dict(torch._dynamo.utils.counters["stats"])
        for m in (model, plain):
            m.zero_grad()
            m(batch).backward()
        assert batch is x or torch._dynamo.utils.counters["stats"] == compiled
        for own, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert (own.grad is None) == (other.grad is None)
            assert own.grad is None or torch.equal(own.grad.to_dense(), other.grad.to_dense())
    state = sum(t.numel() * t.element_size() for t in (*model.parameters(), x))
    model.zero_grad()
    assert state + peak_of(lambda: model(x).backward(), tmp_path) <= least.budget_bytes


def taken_by(p, model, x, tmp_path):
    """What the second step by a plan takes, with parameters and batch."""
    p.apply()
    model(x).backward()
    model.zero_grad()
    state = sum(t.nbytes for t in (*model.parameters(), x))
    return state + peak_of(lambda: model(x).backward(), tmp_path)


class Masked(nn.Module):
    """Layers with residual connections for the rows of a mask, which a mask that is made anew puts back."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)
        self.layers = nn.ModuleList(wide() for _ in range(4))

    def forward(self, x):
        h = self.first(x)
        rows = h[x[:, 0] > 0]
        for layer in self.layers:
            rows = rows + layer(rows)
        h = h.clone()
        h[~(x[:, 0] <= 0)] = rows
        return self.last(h).square().mean()


@pytest.mark.parametrize("mode", ["aten", "eager"])
def test_what_is_computed_for_the_rows_of_a_mask_is_counted_as_it_is_held(mode, tmp_path):
    model, x = Masked(), torch.randn(256, 16)
    p = plan(model, x, budget_gb=1, mode=mode)
    assert taken_by(p, model, x, tmp_path) == pytest.approx(p.peak_bytes, rel=0.005)


class Naming(nn.Module):
    """A variable names a mask to the end of the call, long after the last op that reads it."""

    def __init__(self, named=lambda t: t):
        super().__init__()
        self.named = named
        self.body, self.head = nn.Sequential(wide(), wide()), nn.Linear(16, 64)

    def forward(self, x):
        h = self.head(self.body(x))
        mask = (x > 0).float().repeat(1, 32)
        rows = mask.sum(1).nonzero().squeeze(1)
        mask = self.named(mask)
        return h[rows].square().mean() + h.detach().repeat(1, 16).exp().mean()


class Messages(NamedTuple):
    mask: torch.Tensor


@pytest.mark.parametrize("named", [lambda t: t, lambda t: {"mask": t}, Messages], ids=["itself", "dict", "named tuple"])
def test_what_a_variable_names_counts_until_its_function_returns(named, tmp_path):
    model, x = Naming(named), torch.randn(64, 16)
    p = plan(model, x, budget_gb=1, progress=False)
    assert taken_by(p, model, x, tmp_path) == pytest.approx(p.peak_bytes, rel=0.005)


class Overwriting(nn.Module):
    """Writes, where a mask says, what it makes of what is there, as a loss of boxes does where they meet."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Sequential(wide(), wide()), nn.Linear(16, 64)

    def forward(self, x):
        h = self.head(self.body(x))
        mask = h > 0.1
        out = torch.zeros_like(h)
        out[mask] = h[mask].exp() * h[mask]
        return out.mean()


def test_what_is_written_by_a_mask_has_the_gradients_of_eager_mode(tmp_path):
    model, x = Overwriting(), torch.randn(64, 16)
    model(x).backward()
    eager = [p.grad for p in model.parameters()]
    model.zero_grad()
    p = plan(model, x, budget_gb=1, progress=False)
    p.apply()
    model(x).backward()
    assert all(torch.equal(own.grad, other) for own, other in zip(model.parameters(), eager, strict=True))
    del eager
    model.zero_grad()
    state = sum(t.nbytes for t in (*model.parameters(), x))
    measured = state + peak_of(lambda: model(x).backward(), tmp_path)
    assert measured <= p.peak_bytes <= 1.1 * measured  # eager mode writes in place in the backward pass, fakes do not


def test_a_forward_that_is_put_on_a_module_that_runs_apart_is_what_runs():
    model, x = AroundRouting(), torch.randn(64, 16)
    plan(model, x, budget_gb=1, progress=False).apply()
    model(x).backward()
    routed = model.routed
    routed.forward = lambda h: 3 * Routed.forward(routed, h)
    loss = model(x)
    del routed.forward
    assert loss == model.last(3 * model.routed(model.first(x))).square().mean()


class Picks(nn.Module):
    """Returns as many rows as values say, which the layers after it take."""

    def forward(self, x):
        return x[torch.rand(len(x)) > 0.5]


class LastOf(nn.Module):
    """As many tokens as values say go in, of which the last comes out, with strides by their number."""

    def forward(self, x):
        return x[None].repeat(2, 1, 1)[:, -1]


@pytest.mark.parametrize("around", [nn.Identity, LastOf])
def test_what_is_computed_from_rows_that_values_count_runs_apart_with_what_made_them(around):
    """Else its graphs are others at each step, and training ended at the third."""
    torch.manual_seed(0)
    model = nn.Sequential(wide(), Picks(), wide(), around(), wide())
    plain = copy.deepcopy(model)
    plan(model, budget_gb=1, progress=False).apply()
    for seed in range(5):
        x = torch.randn(64, 16)
        for m in (model, plain):
            torch.manual_seed(seed)
            m.zero_grad()
            m(x).square().mean().backward()
        assert all(torch.equal(own.grad, p.grad) for own, p in zip(model.parameters(), plain.parameters(), strict=True))


class Queue(nn.Module):
    """An encoder, and another that is the average of it over the steps and fills a queue, as for momentum contrast."""

    def __init__(self):
        super().__init__()
        self.encoder, self.average = nn.Linear(32, 16), nn.Linear(32, 16).requires_grad_(False)
        self.register_buffer("queue", torch.randn(16, 64))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    def forward(self, x):
        queries = self.encoder(x)
        with torch.no_grad():
            for own, other in zip(self.average.parameters(), self.encoder.parameters(), strict=True):
                own.mul_(0.5).add_(other, alpha=0.5)
            keys = self.average(x)
        loss = nn.functional.cross_entropy(queries @ self.queue.clone(), torch.zeros(len(x), dtype=torch.long))
        at = int(self.place)  # other graphs come after it, once the first has been written into
        self.queue[:, at : at + len(x)] = keys.T
        self.place[0] = (at + len(x)) % self.queue.shape[1]
        return loss


def test_parameters_that_the_forward_pass_writes_into_are_as_in_eager_mode():
    eager = Queue()
    models = [eager, copy.deepcopy(eager)]
    for step in range(4):
        x = torch.randn(16, 32)
        for each in models:
            each(x).backward()
        if step == 0:
            plan(models[1], budget_gb=1).apply()
        states = [
            [*each.parameters(), *each.buffers(), *(p.grad for p in each.encoder.parameters())] for each in models
        ]
        for a, b in zip(*states, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_verify_leaves_parameters_as_they_are_that_the_forward_pass_writes_into():
    model, x = Queue(), torch.randn(16, 32)
    before = copy.deepcopy(model.state_dict())
    assert plan(model, x, budget_gb=1).verify().gradients_agree
    torch.testing.assert_close(dict(model.state_dict()), dict(before), rtol=0, atol=0)


CHANCE, NUMPYS, TORCHS = random.Random(0), np.random.default_rng(0), torch.Generator()
IN_A_LIST = [{"rng": CHANCE}]


class Settings:
    rng = CHANCE

    def __init__(self):
        self.numpys = NUMPYS


SETTINGS = Settings()


@pytest.mark.parametrize(
    "draw",
    [
        lambda: CHANCE.random(),
        lambda: NUMPYS.random(),
        lambda: torch.rand((), generator=TORCHS).item(),
        lambda: IN_A_LIST[0]["rng"].random(),
        lambda: Settings.rng.random(),
        lambda: SETTINGS.numpys.random(),
        CHANCE.random,
        functools.partial(CHANCE.uniform, 0, 1),
    ],
    ids=["random", "numpy", "torch", "list", "class", "object", "method", "partial"],
)
def test_planning_draws_nothing_of_generators_that_the_models_code_names(draw):
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([Block() for _ in range(4)])

        def forward(self, x):
            for block in self.blocks:
                x = block(x) if draw() < 0.5 else x
            return x.square().mean()

    model, losses = Named(), []
    for planned in (False, True):
        CHANCE.seed(0)
        NUMPYS.bit_generator.state = np.random.default_rng(0).bit_generator.state
        TORCHS.manual_seed(0)
        torch.manual_seed(0)
        net = copy.deepcopy(model)
        net = plan(net, budget_gb=1).apply() if planned else net
        losses.append([net(torch.ones(8, 32)).item() for _ in range(3)])
    assert losses[0] == losses[1]


class Selected(torch.nn.Module):
    """The batch says by its values how many rows its only layer sees."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 2)

    def forward(self, x):
        return self.layer(x[x[:, 0] > 0])


def test_a_model_that_selects_rows_of_its_batch_is_planned_for_each_number_of_them_and_says_so():
    model = Selected()
    plain = copy.deepcopy(model)
    plan(model, budget_gb=1).apply()
    told = []
    for rows in (4, 6, 4, 7, 5):
        x = torch.cat([torch.ones(rows, 8), -torch.ones(9 - rows, 8)])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for m in (model, plain):
                m.zero_grad()
                m(x).square().sum().backward()
        told += [str(w.message) for w in caught if issubclass(w.category, PlanWarning)]
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True))
    assert "took 3 ways through its code, by values" in told[0]
    assert "decides by values" in applied_plan(model).note


class OnlyDropped(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            if np.random.rand() < 0.5:
                x = x + layer(x).tanh()
        return x


def test_steps_in_which_every_layer_is_dropped_are_trained():
    """The batch alone gets a gradient then."""
    model = OnlyDropped()
    plain = copy.deepcopy(model)
    plan(model, budget_gb=1).apply()
    for seed in range(6):
        found = []
        for m in (model, plain):
            np.random.seed(seed)
            m.zero_grad()
            x = torch.ones(4, 8, requires_grad=True)
            m(x).square().mean().backward()
            found.append([x.grad, *(p.grad for p in m.parameters())])
        for ours, theirs in zip(*found, strict=True):
            assert (ours is None) == (theirs is None)
            assert ours is None or torch.equal(ours, theirs)


class InAnyOrder(torch.nn.Module):
    """In forward(), layers of torch's own run one by one, in a random order or up to a random number."""

    def __init__(self, pick):
        super().__init__()
        self.first, self.pick = torch.nn.Linear(8, 8), pick
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        x = self.first(x)
        for i in self.pick():
            x = self.layers[int(i)](x).tanh()
        return x


@pytest.mark.parametrize("mode", ["aten", "eager"])
@pytest.mark.parametrize(
    ("pick", "warned"),
    [
        (lambda: np.random.permutation(4), True),
        (lambda: np.random.permutation(4)[: np.random.randint(1, 3)], True),
        (lambda: [i for i in range(4) if np.random.uniform() < 0.9], False),
    ],
)
def test_a_plan_for_one_of_many_orders_of_layers_says_so(mode, pick, warned):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plan(InAnyOrder(pick), torch.randn(4, 8), budget_gb=1, mode=mode)
    told = [str(w.message) for w in caught if issubclass(w.category, PlanWarning)]
    assert [("decides by random numbers which ops its modules run" in each) for each in told] == [True] * warned
