"""Models that torch.compile breaks into several graphs: one plan for all of them, and for what runs between."""

import gc
import weakref
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from planner import plan
from planner.capture.trace.step import capture
from planner.codegen.emit import keep_everything
from planner.planning.pipeline import lower
from planner.requests.check import check
from solvers import InfeasibleError, Problem, Schedule, every_op_once, simulate, solve

from .measure import held_before, results, step_peak
from .plans import for_budget
from .real_models import gpt2
from .test_capture import Base, Block, make, trains_as_before
from .variants import keeping, more

pytestmark = pytest.mark.usefixtures("short_searches", "always_compiled")


class TwoRegions(Base):
    def middle(self, x):
        torch._dynamo.graph_break()
        return x


class Shared(nn.Module):
    """What the first region makes is read by the second and the third, and so gets two gradients."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = Block(), Block(), Block()

    def forward(self, x):
        first = self.a(x)
        torch._dynamo.graph_break()
        second = self.b(first)
        torch._dynamo.graph_break()
        return (self.c(second) * first).square().mean()


class Penalty(Base):
    """The second graph has one scalar among its results, which is not its loss, and nothing of the first is in it."""

    def forward(self, x):
        x = self.a(x)
        torch._dynamo.graph_break()
        penalty = sum(p.square().sum() for p in self.b.parameters())
        x = self.b(x)
        torch._dynamo.graph_break()
        return self.c(x).square().mean() + penalty


class SharedWeights(nn.Module):
    """A parameter that two regions use gets its gradients added up."""

    def __init__(self):
        super().__init__()
        self.a, self.b = Block(), Block()

    def forward(self, x):
        x = self.b(self.a(x))
        torch._dynamo.graph_break()
        return self.a(x).square().mean()


class NormAcross(nn.Module):
    """Two regions update one module's running statistics."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.norm = Block(), Block(), nn.BatchNorm1d(64)

    def forward(self, x):
        x = F.dropout(self.norm(self.a(x)), 0.2)
        torch._dynamo.graph_break()
        return self.norm(self.b(x)).square().mean()


class Broken(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Block()

    def forward(self, x):
        torch._dynamo.graph_break()
        return F.dropout(self.block(x), 0.1)


class Repeated(nn.Module):
    """One compiled graph serves every layer; the loop around them, and the loss, run outside every graph."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Broken() for _ in range(4)])

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


class Disabled(Base):
    @torch.compiler.disable
    def middle(self, x):
        return torch.sin(x) * torch.sigmoid(x) + x.exp().log1p()


class OverwrittenLater(Base):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(64))

    def middle(self, x):
        y = torch.tanh(x + self.seen)
        torch._dynamo.graph_break()
        with torch.no_grad():
            self.seen.add_(y.mean(0))
        return y


class Hooked(Base):
    def __init__(self):
        super().__init__()
        self.b.register_full_backward_hook(lambda module, gradients_in, gradients_out: None)


class OnlyViews(Base):
    """A graph of views alone runs between the others, and a gradient comes to it in another layout than its own."""

    def middle(self, x):
        torch._dynamo.graph_break()
        x = x.view(-1, 4, 16).transpose(0, 1)
        torch._dynamo.graph_break()
        return torch.tanh(x.contiguous()).reshape(-1, 64)


KINDS = [
    OnlyViews,
    TwoRegions,
    Shared,
    Penalty,
    SharedWeights,
    NormAcross,
    Repeated,
    Disabled,
    OverwrittenLater,
    Hooked,
]


@pytest.mark.compat
@pytest.mark.parametrize(
    "kind",
    keeping(*(k for k in KINDS if k not in (OnlyViews, SharedWeights, Repeated, NormAcross, Hooked)), of=KINDS),
    ids=lambda k: k.__name__,
)
def test_several_regions_are_one_plan(kind, tmp_path):
    p, measured = trains_as_before(make(kind), tmp_path)
    assert len(p.graph_modules) >= 2
    assert p.overhead > 0
    assert measured == pytest.approx(p.peak_bytes, rel=0.02)
    phases = [m.phase for m in p.timeline]
    assert phases == sorted(phases, key=["forward", "loss", "backward"].index)


class Composite(nn.Module):
    """Ops of torch's own that hold what they make until they return, outside every graph: the peak is in one."""

    def __init__(self, body, *, trained=False):
        super().__init__()
        self.body, self.last = body.requires_grad_(trained), nn.Linear(64, 8)

    @torch.compiler.disable
    def middle(self, x):
        if isinstance(self.body, nn.Linear):  # one expression: no variable names what its parts are
            y = self.body(x)
            return F.triplet_margin_loss(y, x, x.flip(0)) * F.normalize(y) + F.gumbel_softmax(y, tau=2.0)
        made = self.body(x.view(8, -1, 64) if isinstance(self.body, nn.TransformerEncoderLayer) else x)
        return (made[0] if isinstance(made, tuple) else made).reshape(-1, 64)

    def forward(self, x):
        return self.last(self.middle(x)).square().mean()


@pytest.mark.compat
@pytest.mark.parametrize(
    ("body", "trained"),
    [
        (partial(nn.GRUCell, 64, 64), True),
        *more((partial(nn.GRUCell, 64, 64), False)),
        *more((partial(nn.GRU, 64, 64), False)),
        *more((partial(nn.TransformerEncoderLayer, 64, 4, 128, 0.0), False), (partial(nn.Linear, 64, 64), False)),
    ],
)
def test_what_a_composite_op_holds_until_it_returns_counts(body, trained, tmp_path):
    case = make(partial(Composite, body(), trained=trained))
    p = plan(case.model, case.batch, budget_gb=1)
    p.apply()
    results(case)
    assert 0.99 * p.peak_bytes <= held_before(case) + step_peak(case, tmp_path) <= p.peak_bytes


class WrittenLater(nn.Module):
    """What the first graph returns is written into by the next one, and so has another place in autograd's graph."""

    def __init__(self):
        super().__init__()
        self.a, self.b = Block(), Block()

    def forward(self, x):
        x = self.a(x)
        if torch.isnan(x).any():
            raise FloatingPointError
        x.relu_()
        return self.b(x).square().mean()


@pytest.mark.compat
def test_a_gradient_comes_to_what_a_later_graph_has_written_into(tmp_path):
    p, measured = trains_as_before(make(WrittenLater), tmp_path)
    assert len(p.graph_modules) == 2
    assert measured <= p.peak_bytes


def test_what_runs_outside_every_graph_is_listed():
    case = make(Disabled)
    p = plan(case.model, case.batch, budget_gb=1)
    outside = [d for d in p.decisions if "outside every compiled graph" in d.reason]
    assert len(outside) >= 3
    assert all("test_regions.py" in d.source for d in outside)


def test_planning_is_quiet_about_graph_breaks(caplog):
    class Asks(Base):
        def middle(self, x):
            return x * 2 if x.shape[0] == int(torch.tensor(512).item()) else x

    case = make(Asks)
    plan(case.model, case.batch, budget_gb=1)
    assert not [r for r in caplog.records if r.levelname in ("WARNING", "ERROR")]


def test_a_region_without_backward_ops_where_gradients_are_held(monkeypatch):
    for name in ("pipeline", "outside"):
        monkeypatch.setattr(f"planner.planning.{name}.TANGENTS_FREED", False)  # as with torch 2.11 and 2.12
    case = make(Repeated)
    held = plan(case.model, case.batch, budget_gb=1)
    monkeypatch.undo()
    assert held.peak_bytes >= plan(case.model, case.batch, budget_gb=1).peak_bytes


@pytest.mark.compat
def test_calls_of_one_graph_get_schedules_of_their_own():
    case = make(Repeated)
    full = plan(case.model, case.batch, budget_gb=1)
    p = for_budget(full, 0.75 * full.baseline_peak_bytes / 2**30)
    forwards = {str(g.forward.graph) for g in p.graph_modules}
    assert len(forwards) > 1


@pytest.mark.thorough
def test_a_plan_across_regions_beats_every_split_of_the_budget_between_them():
    """Each region planned for itself at four budgets; of all combinations that fit together, the cheapest."""
    case = gpt2(layers=2)
    for block in case.model.transformer.h:
        block.register_forward_pre_hook(lambda module, args: torch._dynamo.graph_break())
    graph = capture(case.model, (), case.batch, keep_everything)
    problem = lower(check(case.model, case.batch, None, budget_gb=1), graph).problem
    everything = simulate(problem, every_op_once(problem))
    planned = [r for r, region in enumerate(graph.regions) if region.fingerprint]
    assert len(planned) >= 3
    combined = [
        simulate(problem, _combined(problem, dict(zip(planned, choice, strict=True))))
        for choice in product(*(_alone(problem, r, everything.peak) for r in planned))
    ]
    won, whole = 0, plan(case.model, case.batch, budget_gb=1)
    for share in (0.8, 0.7):
        budget = round(share * everything.peak)
        costs = [timeline.cost for timeline in combined if timeline.peak <= budget]
        p = for_budget(whole, budget / 2**30)
        assert p.peak_bytes <= budget
        if costs:
            best = min(costs) / everything.cost - 1
            assert p.overhead <= best + 1e-9
            won += p.overhead < 0.95 * best
    assert won >= 1


def _alone(problem: Problem, region: int, highest: int) -> set[tuple[int, ...]]:
    """Schedules in which only one region recomputes."""
    ops = tuple(op if op.region == region else replace(op, recomputable=False) for op in problem.ops)
    found = {every_op_once(problem).steps}
    for share in (0.7, 0.8, 0.87, 0.93):
        try:
            solution = solve(replace(problem, ops=ops, budget=round(share * highest)), "auto", progress=False)
        except InfeasibleError as e:
            solution = solve(replace(problem, ops=ops, budget=e.minimum), "auto", progress=False)
        found.add(solution.schedule.steps)
    return found


def _combined(problem: Problem, choice: dict[int, tuple[int, ...]]) -> Schedule:
    """The schedule in which each region runs as it does in its own one."""
    steps: list[int] = []
    done: set[tuple[int, bool]] = set()
    for i, op in enumerate(problem.ops):
        half = (op.region, i < problem.boundary)
        if op.region not in choice:
            steps.append(i)
        elif half not in done:
            done.add(half)
            own = choice[op.region]
            loss = own.index(problem.boundary)
            steps += [s for s in (own[:loss] if half[1] else own[loss:]) if problem.ops[s].region == op.region]
    return Schedule(tuple(steps))


class Remembers(Base):
    def __init__(self):
        super().__init__()
        self.seen = []

    @torch.compiler.disable
    def middle(self, x):
        self.seen.append(weakref.ref(x))
        return x


def test_what_passed_between_regions_is_freed_and_so_is_the_model():
    model, x = Remembers().train(), torch.randn(512, 64)
    p = plan(model, {"x": x}, budget_gb=1)
    p.apply()
    model.seen.clear()
    model(x).backward()
    gc.collect()
    assert len(model.seen) == 1
    assert model.seen[0]() is None
    p.remove()
    held = weakref.ref(model), weakref.ref(x)
    del model, x, p
    gc.collect()
    assert [ref() for ref in held] == [None, None]
