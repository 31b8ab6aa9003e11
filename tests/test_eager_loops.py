"""Loops under `mode="eager"`: what a step takes is what was predicted, several calls and backward passes included."""

import pytest

from planner import PlanWarning, plan

from .loop_harness import GB, differences, run
from .loops import LOOPS
from .variants import more

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize(
    "name",
    [
        "contrastive",
        *more("triplet", "bootstrapped"),
        "backward_twice",
        "given_gradients",
        *more("variational"),
        "closure",
        "behind_a_trained_stem",
        "kept_by_its_graph",
    ],
)
def test_a_loop_with_room_takes_what_was_predicted(name):
    loop = LOOPS[name]
    unplanned = run(loop)
    seen = run(loop, lambda model: plan(model, budget_gb=1.5 * unplanned.peak / GB, mode="eager").apply())
    assert differences(seen, unplanned) == []
    assert 0.99 * seen.predicted[-1] <= seen.peak <= 1.001 * seen.predicted[-1]


def test_gradients_that_no_pass_adds_up_are_said_not_to_be_seen():
    def put(model):
        return plan(model, budget_gb=1, mode="eager").apply()

    with pytest.warns(PlanWarning, match="autograd.grad.*not seen"):
        run(LOOPS["gradients_of_each"], put)


@pytest.mark.parametrize("name", ["head_left_out", "deep_heads_in_turn"])
def test_graphs_of_outputs_without_a_gradient_are_within_the_budget(name):
    loop = LOOPS[name]
    unplanned = run(loop)
    budget = 0.8 * unplanned.peak
    seen = run(loop, lambda model: plan(model, budget_gb=budget / GB, mode="eager").apply())
    assert differences(seen, unplanned) == []
    assert seen.plans <= 3
    assert max(seen.measured) <= budget
    assert 0.99 * max(seen.predicted) <= seen.peak <= 1.001 * max(seen.predicted)
