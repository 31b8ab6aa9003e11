"""A plan holds in training loops as people write them, the planner told nothing: `tests/loops.py` has them."""

import pytest

from planner import PlannerError

from .loop_harness import differences, judged
from .loops import LOOPS

pytestmark = [pytest.mark.usefixtures("short_searches"), pytest.mark.filterwarnings("ignore")]
EXACT = 0.01  # of the prediction: how far the highest step may be from it


@pytest.mark.parametrize("name", [name for name, loop in LOOPS.items() if loop.refused is None])
def test_each_step_from_the_second_stays_within_the_budget_as_predicted(name):
    loop = LOOPS[name]
    unplanned, seen = judged(loop)
    assert differences(seen, unplanned, loop.tolerance) == []
    assert seen.peak <= seen.budget, f"of {seen.budget / seen.peak:.1%}, step by step: {seen.measured}"
    assert max(seen.predicted) == pytest.approx(seen.peak, rel=EXACT)
    assert 1 <= seen.plans <= loop.plans


@pytest.mark.parametrize("name", [name for name, loop in LOOPS.items() if loop.refused is not None])
def test_what_a_plan_cannot_train_is_refused_in_words(name):
    with pytest.raises(PlannerError, match=LOOPS[name].refused):
        judged(LOOPS[name])
