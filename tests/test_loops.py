"""A plan holds in training loops as people write them, the planner told nothing: `tests/loops.py` has them."""

import pytest
import torch

from planner import PlannerError, PlanWarning, plan

from .loop_harness import Loop, differences, judged
from .loops import LOOPS, first_batch_kept, retained_gradient

pytestmark = [pytest.mark.usefixtures("short_searches"), pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("name", [name for name, loop in LOOPS.items() if loop.refused is None])
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


@pytest.mark.filterwarnings("default")
def test_a_loop_that_trains_past_the_plan_is_told_so():
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(plan(model, budget_gb=1).apply().parameters())
    model.forward(torch.randn(8, 64)).sum().backward()
    with pytest.warns(PlanWarning, match="trains without its plan"):
        optimizer.step()
