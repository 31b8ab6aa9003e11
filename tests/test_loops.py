"""Training loops that a plan does not serve; `python -m tests.loops` measures all of `tests/loops.py`."""

import pytest

from planner import PlannerError, PlanWarning, plan

from .loop_harness import judged
from .loops import LOOPS, autoencoder

pytestmark = [pytest.mark.usefixtures("short_searches"), pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("name", [name for name, loop in LOOPS.items() if loop.refused is not None])
def test_what_a_plan_cannot_train_is_refused_in_words(name):
    with pytest.raises(PlannerError, match=LOOPS[name].refused):
        judged(LOOPS[name])


@pytest.mark.filterwarnings("default")
def test_a_loop_that_trains_past_the_plan_is_told_so():
    with pytest.warns(PlanWarning, match="encode"):
        autoencoder(lambda model: plan(model, budget_gb=1).apply(), lambda _: None)
