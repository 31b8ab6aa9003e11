"""The main promise on real models: within the budget as torch measures it, with the same gradients."""

import functools
import re
from dataclasses import dataclass
from functools import partial

import pytest
import torch

from planner import InfeasibleBudgetError, Plan, plan

from .measure import held_before, results, step_peak
from .plans import for_budget
from .real_models import SMALL, gpt2, llama
from .variants import keeping, more

pytestmark = pytest.mark.usefixtures("short_searches", "always_compiled")
ROOM_TO_SPARE, LEAST = float("inf"), 0.01  # as fractions of the peak
# tests of one model follow one another and share its plans
CASES = {**SMALL, "gpt2": partial(gpt2, layers=1), "llama": partial(llama, layers=1)}  # with dropout: of two layers
every_model = pytest.mark.parametrize("name", keeping("gpt2", "resnet50", of=CASES), scope="module")
two_models = pytest.mark.parametrize("name", ["gpt2_dropout", *more("unet")], scope="module")


@dataclass(frozen=True)
class Trained:
    """What steps by a plan take at their peak, in bytes, and loss, outputs, gradients and buffers of one."""

    plan: Plan
    measured: int
    results: dict[str, torch.Tensor]


class Real:
    """A model, its plans, and real steps by them, each made once."""

    def __init__(self, name, folder):
        self.case = CASES[name]()
        self.folder = folder
        self.eager = results(self.case)
        self.plan = functools.cache(self._plan)
        self.trained = functools.cache(self._trained)

    def _plan(self, fraction, *solver):
        """A plan at a fraction of the baseline peak, or 1 % above the smallest feasible, for what a loop holds."""
        if fraction == ROOM_TO_SPARE:
            return plan(self.case.model, self.case.batch, budget_gb="100%", loss_fn=self.case.loss_fn)
        options = {"solver": solver[0], "time_limit": 2.0} if solver else {}
        everything = self.plan(ROOM_TO_SPARE)
        try:
            return for_budget(everything, fraction * everything.baseline_peak_bytes / 2**30, **options)
        except InfeasibleBudgetError as e:
            return for_budget(everything, 1.01 * e.minimum_gb, **options)

    def _trained(self, fraction, *solver):
        p = self.plan(fraction, *solver)
        p.apply()
        found = results(self.case)
        before = {name: b.clone() for name, b in self.case.model.named_buffers()}
        measured = held_before(self.case) + step_peak(self.case, self.folder)
        p.remove()
        self.case.model.load_state_dict(before, strict=False)  # running statistics: every plan begins with the same
        return Trained(p, measured, found)


@pytest.fixture(scope="module")
def real(name, tmp_path_factory):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return Real(name, tmp_path_factory.mktemp(name))


@pytest.mark.parametrize("fraction", [0.60, LEAST])
@every_model
def test_the_budget_holds_and_the_peak_is_as_predicted(real, fraction):
    t = real.trained(fraction)
    assert t.measured <= t.plan.budget_bytes
    assert t.measured == pytest.approx(t.plan.peak_bytes, rel=0.02)


@every_model
def test_the_baseline_is_as_predicted(real):
    """Everything is kept, but for what brings a graph that would take more than eager mode down to that."""
    t = real.trained(ROOM_TO_SPARE)
    keeps = not [d for d in t.plan.decisions if d.action != "keep"]
    assert keeps == (t.plan.overhead == 0) == (t.plan.peak_bytes == t.plan.baseline_peak_bytes)
    assert keeps or t.plan.peak_bytes <= t.plan.eager_peak_bytes < t.plan.baseline_peak_bytes
    assert t.plan.overhead < 0.01
    assert t.measured == pytest.approx(t.plan.peak_bytes, rel=0.02)


@every_model
def test_gradients_loss_outputs_and_buffers_are_equal(real):
    same_graph = real.trained(ROOM_TO_SPARE).results
    for fraction in (0.6, LEAST):
        t = real.trained(fraction)
        assert t.plan.overhead > 0
        assert t.results.keys() == same_graph.keys() == real.eager.keys()
        for key, theirs in same_graph.items():
            assert torch.equal(t.results[key], theirs), f"{key} differs from the same graph without recomputation"
        for key, theirs in real.eager.items():
            torch.testing.assert_close(t.results[key], theirs, msg=lambda m, key=key: f"{key}: {m}")


@pytest.mark.parametrize("solver", [*more("chen"), "ilp"])
@two_models
def test_every_solver_holds_its_budget(real, solver):
    t = real.trained(0.6, solver)
    assert t.plan.solver == solver
    assert t.measured <= t.plan.budget_bytes
    assert t.measured == pytest.approx(t.plan.peak_bytes, rel=0.02)


@two_models
def test_auto_is_no_worse_than_chen(real):
    chen, auto = real.plan(0.6, "chen"), real.plan(0.6)
    if auto.budget_bytes != chen.budget_bytes:
        auto = for_budget(chen, chen.budget_bytes / 2**30, solver="auto", time_limit=None)
    assert auto.overhead <= chen.overhead
    assert auto.bound <= auto.step_seconds


@two_models
def test_emitted_graphs_are_clean_and_name_what_runs_again(real):
    p = real.plan(0.6)
    (region,) = p.graph_modules
    for module in (region.forward, region.backward):
        assert isinstance(module, torch.fx.GraphModule)
        module.graph.lint()
        inputs = module.graph.find_nodes(op="placeholder")
        assert [n.target for n in inputs] == [n.name for n in inputs]  # two of one target would be one variable
    nodes = (*region.forward.graph.nodes, *region.backward.graph.nodes)  # what is dropped early runs again early
    again = [n for n in nodes if n.meta.get("runs_again")]
    drawn = sum("bernoulli" in n.name for n in again)  # at once as noise, without the room for a mask
    assert 0 < len(again) <= sum(m.recomputed for m in p.timeline) <= len(again) + drawn
    assert {d.module for d in p.decisions} <= {name for name, _ in real.case.model.named_modules()}
    assert all(re.match(r".+\.py:\d+: ", d.source) for d in p.decisions)
