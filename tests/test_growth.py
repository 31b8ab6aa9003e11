"""Loops that hold somewhat more from step to step are not planned for anew at each of them."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from planner.core.loop import Loop as Known
from planner.core.loop import LossSeen
from planner.session.growth import Growth

from .loop_harness import Loop, differences, judged
from .loops import mlp

BUDGET = 1_000_000  # bytes


@pytest.mark.thorough
@pytest.mark.usefixtures("short_searches")
@pytest.mark.filterwarnings("ignore")
def test_predictions_that_are_kept_ask_for_few_plans():
    def loop(put, ended):
        model = put(mlp(256, out=10))
        optimizer = torch.optim.Adam(model.parameters())
        kept = []
        for _ in range(14):
            x, y = torch.randn(512, 256), torch.randint(10, (512,))
            out = model(x)
            loss = cross_entropy(out, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            kept.append(out.detach())  # 20 KB, by which the least that is feasible is exceeded
            ended(loss)

    unplanned, seen = judged(Loop(loop, share=0.3))
    assert differences(seen, unplanned) == []
    assert 0.99 < seen.peak / max(seen.predicted) < 1.01
    assert seen.plans <= 8


def test_plans_count_as_much_again_as_a_loop_has_grown_by_once_it_has_grown_often():
    growth, planned, plans = Growth(), Known(), 0
    for nbytes in range(0, 200_000, 1000):
        seen = growth.counted((), Known(around=nbytes), planned)
        if seen != planned:
            planned, plans = growth.foreseen((), seen, planned, BUDGET), plans + 1
            assert nbytes <= planned.around <= 2 * nbytes + BUDGET // 100
    assert plans < 12


def test_what_is_much_more_at_once_is_no_growth():
    growth, planned = Growth(), Known(around=1000)
    seen = Known(around=1000 + BUDGET // 10)
    assert growth.foreseen((), seen, planned, BUDGET) == seen
    assert growth.counted((), planned, seen) == planned
    assert growth.foreseen((), Known(around=500), seen, BUDGET) == Known(around=500)


def test_a_budget_that_only_lacks_what_is_foreseen_suffices():
    growth, seen = Growth(), Known(around=3000)
    assert growth.foreseen((), Known(around=2000), Known(around=1000), BUDGET) == Known(around=2000)  # once may be all
    planned = growth.foreseen((), seen, Known(around=2000), BUDGET)
    assert planned.around > seen.around
    (without,) = growth.lesser((), planned, 1)  # which does not suffice, either: it is still counted
    assert without == seen == next(growth.lesser((), planned, 1))
    assert [*growth.lesser((), seen, 1)] == []


def test_other_planned_models_take_less_where_no_plan_fits():
    loss = LossSeen(100, 0, 5000, 0, 0, others=3000)
    (leaner,) = Growth().lesser((), Known(loss=loss), 2000)
    assert leaner.loss == LossSeen(100, 0, 3000, 0, 0, others=1000)
    assert [*Growth().lesser((), Known(loss=loss), 4000)] == []
