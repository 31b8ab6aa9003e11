"""A rough trade-off curve in a second or two, from relaxations and segments alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from solvers.bounds.cost import relax
from solvers.problem import Problem
from solvers.schedule import every_op_once, simulate
from solvers.search.annealing import Search
from solvers.search.evaluation import Candidate
from solvers.search.lp_starts import lp_starts
from solvers.search.starts import chained, segments

EFFORT = 0.03  # of the effort that `auto` gives to relaxations
STARTS = 4  # rounded relaxations of each budget


@dataclass(frozen=True, slots=True)
class QuickCurve:
    """Pairs of bytes and cost.

    Attributes:
        points: peak and cost of schedules, by ascending peak and descending cost.
        bounds: budgets, ascending, and a proven lower bound on the cost of any schedule within each.
        segments: peak and cost of the leanest schedule of about sqrt(L) segments (`chen`), where there is one.
    """

    points: tuple[tuple[int, float], ...]
    bounds: tuple[tuple[int, float], ...]
    segments: tuple[int, float] | None


def quick_curve(problem: Problem, points: int = 6) -> QuickCurve:
    """Peak against cost without annealing, so that costs may be above the best.

    Args:
        problem: what to schedule; its budget is not looked at.
        points: how many budgets to look at, between the lowest peak of segments and that of every op once.
    """
    total = problem.total_cost
    search = Search(problem.with_budget(None), lambda _: None)
    segmented = list(chained(segments(search)))
    candidates = [*segmented, *chained(iter([search.keep_only()]))]
    low, high = min(c.peak for c in candidates), simulate(problem, every_op_once(problem)).peak
    bounds = [(high, total)]
    for i in range(points - 1, 0, -1):
        budgeted = problem.with_budget(low + (high - low) * i**2 // points**2)
        relaxed = relax(budgeted, EFFORT)
        bounds.append((budgeted.budget or 0, max(bounds[-1][1], total + relaxed.bound)))
        starts = islice(lp_starts(budgeted, relaxed, EFFORT), STARTS)
        candidates += chained(search.keep_only(keep) for keep in starts)
    leanest = min(segmented, key=lambda c: (c.peak, c.extra), default=None)
    return QuickCurve(
        tuple((c.peak, total + c.extra) for c in _front(candidates)),
        tuple(reversed(bounds)),
        None if leanest is None else (leanest.peak, total + leanest.extra),
    )


def _front(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The candidates that no other one beats, by ascending peak."""
    front: list[Candidate] = []
    for c in sorted(candidates, key=lambda c: (c.peak, c.extra)):
        if not front or c.extra < front[-1].extra:
            front.append(c)
    return front
