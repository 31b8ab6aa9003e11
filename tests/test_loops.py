"""A plan holds in training loops as people write them, the planner told nothing: `tests/loops.py` has them."""

from functools import partial

import pytest
import torch

from planner import PlannerError, PlanWarning, plan

from .loop_harness import Loop, differences, judged
from .loops import LOOPS, first_batch_kept, retained_gradient
from .variants import keeping

pytestmark = [pytest.mark.usefixtures("short_searches"), pytest.mark.filterwarnings("ignore")]


TRAINED = {name: loop for name, loop in LOOPS.items() if loop.refused is None}


@pytest.mark.parametrize("name", keeping(*(n for n, loop in TRAINED.items() if not loop.thorough), of=TRAINED))
def test_each_step_from_the_second_stays_within_the_budget_as_predicted(name):
    loop = LOOPS[name]
    unplanned, seen = judged(loop)
    assert differences(seen, unplanned, loop.tolerance) == []
    assert seen.peak <= seen.budget, f"of {seen.budget / seen.peak:.1%}, step by step: {seen.measured}"
    assert 1 - loop.off <= seen.peak / max(seen.predicted) <= 1.01
    assert 1 <= seen.plans <= loop.plans


@pytest.mark.parametrize("name", [name for name, loop in LOOPS.items() if loop.refused is not None])
def test_what_a_plan_cannot_train_is_refused_in_words(name):
    with pytest.raises(PlannerError, match=LOOPS[name].refused):
        judged(LOOPS[name])


def test_the_gradient_of_an_intermediate_keeps_nothing_from_step_to_step():
    """What computing it takes is in no plan (docs/limits.md)."""
    unplanned, seen = judged(Loop(retained_gradient))
    assert differences(seen, unplanned) == []
    assert len(set(seen.measured)) == 1


def test_a_batch_that_stays_counts_once_the_loop_is_known_to_make_its_batches():
    """Until then it may be part of the loop's data."""
    unplanned, seen = judged(Loop(first_batch_kept))
    assert differences(seen, unplanned) == []
    assert max(seen.measured[1:]) == seen.predicted[-1] <= seen.budget


class Nearest(torch.nn.Module):
    """Its forward pass takes most before anything is kept."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.randn(2048, 64))
        self.body = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 512))

    def forward(self, x):
        return self.body(self.table[torch.cdist(x, self.table).argmin(1)])


def test_the_least_budget_that_is_named_holds_gradients_that_are_cleared_after_the_forward_pass():
    def loop(put, ended):
        model = put(Nearest())
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        for _ in range(6):
            loss = model(torch.randn(256, 64)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ended(loss)

    unplanned, seen = judged(Loop(loop, share=0.05))
    assert differences(seen, unplanned) == []
    assert seen.peak <= seen.budget
    assert len(seen.infeasible) == 2  # 5 %, and what is known before the first batch


class Residual(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(100, 64), torch.nn.Linear(64, 100)
        self.ins, self.outs = (torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(6)) for _ in range(2))

    def forward(self, tokens):
        x = self.embedding(tokens)
        for into, out in zip(self.ins, self.outs, strict=True):
            x = x + out(torch.nn.functional.gelu(into(x)))
        return self.head(x)


@pytest.mark.compat
def test_an_output_without_a_name_is_there_as_long_as_a_view_of_it():
    """Planned graphs return views of their own tensors by torch 2.15."""

    def loop(put, ended):
        model = put(Residual())
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(6):
            tokens = torch.randint(100, (8, 48))
            loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ended(loss)

    unplanned, seen = judged(Loop(loop, share=0.85))
    assert differences(seen, unplanned) == []
    assert 0.99 <= seen.peak / max(seen.predicted) <= 1.01
    assert seen.peak <= seen.budget


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 64))

    def forward(self, x):
        return x + self.layers(x)


def test_hooks_that_log_norms_of_gradients_see_those_of_the_loop_without_a_plan():
    """A plan is made from shapes, in which a norm has no value; one of the hooks comes while the loop runs."""

    def loop(put, ended):
        model = put(torch.nn.Sequential(*(Block() for _ in range(4))))
        optimizer = torch.optim.AdamW(model.parameters())
        norms = []

        def log(module, given, came):
            norms.append(came[0].norm().item())

        model[2].register_full_backward_hook(log)
        for at in range(6):
            if at == 2:
                model[1].register_full_backward_hook(log)
            optimizer.zero_grad()
            loss = model(torch.randn(512, 64)).square().mean()
            loss.backward()
            optimizer.step()
            ended([loss, *norms])
            norms.clear()

    unplanned, seen = judged(Loop(loop, share=0.8))
    assert len(seen.losses) == 16
    assert differences(seen, unplanned) == []
    assert seen.peak <= seen.budget


def test_a_compiled_step_of_an_optimizer_is_all_that_is_compiled_of_it_and_counted():
    """The hooks by which a plan sees optimizers step are left out."""
    graphs = []

    def noting(graph, _):
        graphs.append(graph)
        return graph.forward

    def loop(put, ended):
        graphs.clear()
        model = put(torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64)))
        optimizer = torch.optim.AdamW(model.parameters())
        step = torch.compile(optimizer.step, backend=noting)
        for _ in range(6):
            optimizer.zero_grad()
            loss = model(torch.randn(256, 64)).square().mean()
            loss.backward()
            step()
            ended(loss)

    unplanned, seen = judged(Loop(loop))
    assert differences(seen, unplanned) == []
    assert seen.peak <= seen.budget
    assert len(graphs) == 1


@pytest.mark.filterwarnings("default")
def test_a_loop_that_trains_past_the_plan_is_told_so():
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(plan(model, budget_gb=1).apply().parameters())
    model.forward(torch.randn(8, 64)).sum().backward()
    with pytest.warns(PlanWarning, match="trains without its plan"):
        optimizer.step()


class ForwardForward(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(2))
        self.optimizer = torch.optim.SGD(self.parameters(), 0.1)

    def learn(self, x):
        for layer in self.layers:
            descend(self.optimizer, layer.forward(x).square().mean())
            x = layer.forward(x).detach()


def descend(optimizer, loss):
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.filterwarnings("default")
def test_a_loop_inside_a_method_is_told_that_it_trains_past_the_plan():
    model = plan(ForwardForward(), budget_gb=1).apply()
    with pytest.warns(PlanWarning, match="trains without its plan"):
        model.learn(torch.randn(8, 64))


class Halves(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = torch.nn.Linear(64, 64), torch.nn.Linear(64, 8)

    def features(self, x):
        return self.body(x).tanh()

    def forward(self, x):
        return self.head(self.features(x))


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("later", [Halves.features, Halves.forward, lambda m, x: m.head(m.body(x))])
def test_a_loop_that_goes_past_the_plan_from_some_step_on_is_told_so_once(later):
    model = Halves()
    optimizer = torch.optim.AdamW(plan(model, budget_gb=1).apply().parameters())

    def train(call, steps):
        for _ in range(steps):
            optimizer.zero_grad()
            call(torch.randn(8, 64)).square().mean().backward()
            optimizer.step()

    train(model, 2)
    with pytest.warns(PlanWarning, match="trains without its plan") as told:
        train(partial(later, model), 4)
    assert len(told) == 1


@pytest.mark.filterwarnings("error::planner.PlanWarning")
def test_two_optimizers_for_one_backward_pass_go_past_no_plan():
    model = plan(Halves(), budget_gb=1).apply()
    optimizers = [torch.optim.AdamW(part.parameters()) for part in (model.body, model.head)]
    for _ in range(4):
        model(torch.randn(8, 64)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
