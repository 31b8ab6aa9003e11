"""The whole curve of peak against cost: many budgets searched together, each from the candidates of all."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

from solvers.bounds.cost import relax, relaxation_bound
from solvers.errors import ProblemError
from solvers.problem import Problem
from solvers.protocol import Solution, check_time_limit
from solvers.schedule import Schedule, Timeline, every_op_once, simulate, validate
from solvers.search.annealing import Search, Walk, energy_of, ready
from solvers.search.arrays import Goal
from solvers.search.effort import Effort, bar_of, each_of, effort_of
from solvers.search.evaluation import Candidate
from solvers.search.leanest import leanest_of
from solvers.search.lp_starts import lp_starts
from solvers.search.offload import MoveSearch, search_of
from solvers.search.rounds import COLDEST, ENOUGH, goal_of
from solvers.search.starts import chained, nested, segments
from solvers.search.together import moving_starts

AS_AUTO = 1 / 4  # of the steps of `auto` for all points one by one; with the relaxations, about a third of its time
LEANING = 0.15  # share of a time limit for the lowest peak
RELAXED = 0.5  # share of a time limit after which no more points are relaxed
ROUNDS = ((4, 0.02, 0.4), (4, 0.004, 0.4), (3, 0.001, 0.2))  # walks a point, hottest, share of the work


@dataclass(frozen=True, slots=True)
class _Judged:
    """A candidate with its validated schedule, which serves every budget from its peak on."""

    candidate: Candidate
    schedule: Schedule
    timeline: Timeline


@dataclass(frozen=True, slots=True)
class _Point:
    """A budget, its goal, its proven bound, and the cost of re-runs that ends its search."""

    budget: int
    goal: Goal
    bound: float
    enough: float


class _Front:
    """All candidates so far, without those that another one beats in peak and in cost."""

    def __init__(self, search: Search) -> None:
        self.search = search
        self.judged: list[_Judged] = []

    def add(self, candidates: Iterable[Candidate]) -> None:
        for new in candidates:
            if any(j.candidate.peak <= new.peak and j.candidate.extra <= new.extra for j in self.judged):
                continue
            schedule = self.search.schedule(new)
            timeline = validate(self.search.problem, schedule)
            others = (j for j in self.judged if j.candidate.peak < new.peak or j.candidate.extra < new.extra)
            self.judged = [*others, _Judged(new, schedule, timeline)]

    def best(self, budget: int) -> _Judged:
        fitting = (j for j in self.judged if j.timeline.peak <= budget)
        return min(fitting, key=lambda j: (j.timeline.cost, j.timeline.peak))

    def settled(self, point: _Point) -> bool:
        return self.best(point.budget).candidate.extra <= point.enough

    def improve(self, point: _Point, walks: int, hot: float, effort: Effort, seed: int) -> None:
        """Walk from the best candidates for a point, whichever point they were searched for, and from the cheapest."""
        steps, seconds = each_of(self.search.problem, len(self.search.choices.gaps), effort, walks)
        ranked = sorted((j.candidate for j in self.judged), key=lambda c: energy_of(point.goal, c))
        # hot walks forget where they began; every op once leads to other schedules than segments do
        starts = [self.best(point.budget).candidate, *ranked[: walks - 2], min(ranked, key=lambda c: c.extra)][:walks]
        round_ = [Walk(c.policy, hot, hot * COLDEST, steps, seconds, seed + i) for i, c in enumerate(starts)]
        self.add(self.search.walk(round_, point.goal, point.goal.price * point.enough))


def pareto(
    problem: Problem, points: int = 10, *, time_limit: float | None = None, progress: bool | None = None
) -> tuple[Solution, ...]:
    """Peak against cost, from the lowest known peak to that of every op once; the problem's budget is not looked at.

    Budgets are closer together the lower they are, where cost changes most: that of point i is the lowest peak plus
    (i / (points - 1))**2 of the way up. They are searched together: every schedule is a candidate for every budget, and
    the best candidates of one budget start the search for others. Of the candidates that fit a budget, the cheapest is
    taken; of equally cheap ones, the one of the lowest peak.

    So a larger budget never costs more: every schedule that fits the smaller one is a candidate for it too. And a
    smaller budget never peaks higher: where the larger one's choice fits it, then as a candidate for both it is the
    smaller one's choice, with its peak; where it does not, it peaks above the smaller budget. A bound for a larger
    budget is one for a smaller budget, so that bounds never rise with the budget either.

    Takes about `points` / 3 times as long as `auto`, counted in work, not by a clock, unless there is a `time_limit`.

    Args:
        problem: what to schedule.
        points: how many budgets, at least 2.
        time_limit: seconds for all points together, about; None for no limit but the work.
        progress: show a bar; None for only where a terminal is watching.

    Returns:
        One solution a budget, ascending; points may share a schedule. `seconds` is each one's share of the time.

    Raises:
        ProblemError: `points` is not a whole number of at least 2, or the time limit is not a positive number.

    Examples:
        >>> from solvers.problem import Op
        >>> ops = [Op("f", (), (0,), 1.0), Op("g", (0,), (1,), 1.0), Op("h", (1,), (2,), 1.0)]
        >>> ops += [Op("dh", (1, 2), (3,), 1.0), Op("dg", (0, 3), (4,), 1.0)]
        >>> curve = pareto(Problem(tuple(ops), (4, 4, 1, 1, 1), boundary=3), points=2)
        >>> [(s.timeline.peak, s.timeline.cost) for s in curve]
        [(8, 6.0), (10, 5.0)]
    """
    return tuple(solution for _, solution in curve(problem, points, time_limit=time_limit, progress=progress))


def curve(
    problem: Problem, points: int = 10, *, time_limit: float | None = None, progress: bool | None = None
) -> list[tuple[int, Solution]]:
    """The solutions of `pareto`, each with its budget in bytes."""
    check_points(points)
    check_time_limit(time_limit)
    ready()
    begin = time.perf_counter()
    most = effort_of(problem, None).steps  # for one point
    whole = Effort(points * AS_AUTO * most) if time_limit is None else Effort.within(time_limit)
    leaning = Effort(most) if time_limit is None else Effort.within(LEANING * time_limit)
    with bar_of(Effort(leaning.steps + whole.steps), progress) as shown:
        search = search_of(problem.with_budget(None), shown.update)
        front = _Front(search)
        front.add(chained(iter([search.keep_only()]), nested(search), segments(search)))
        front.add([leanest_of(search, leaning, 0)])
        high = simulate(problem, every_op_once(problem)).peak
        low = min(j.timeline.peak for j in front.judged)
        budgets = [low + (high - low) * i**2 // (points - 1) ** 2 for i in range(points)]
        each = _relaxed(front, budgets, None if time_limit is None else begin + RELAXED * time_limit)
        for point in each:
            if not front.settled(point) and front.best(point.budget).timeline.peak == low:
                # the leanest schedule pays for a lower peak than this budget asks for
                front.add([leanest_of(search, Effort(leaning.steps / 2, whole.deadline), point.budget)])
        _improve(front, each, whole, most, shown)
    note = "time ran out before the end of the search" if search.late else ""
    seconds = (time.perf_counter() - begin) / points
    solutions = []
    for budget, point in zip(budgets, reversed(each), strict=True):
        best = front.best(budget)
        bound = min(point.bound, best.timeline.cost)
        solutions.append((budget, Solution(best.schedule, best.timeline, "pareto", seconds, bound, note)))
    return solutions


def _improve(front: _Front, each: list[_Point], whole: Effort, most: float, shown: Any) -> None:
    """Rounds of walks for every point that is not settled, upwards and downwards in turn."""
    for n, (walks, hot, share) in enumerate(ROUNDS):
        open_ = [p for p in (each, each[::-1])[n % 2] if not front.settled(p)]
        later = sum(share for _, _, share in ROUNDS[n:])
        for done, point in enumerate(open_):
            shown.set_description_str(
                f"solving budget {done + 1} of {len(open_)}, round {n + 1} of {len(ROUNDS)}", refresh=False
            )
            deadline = whole.until(share / later / (len(open_) - done))
            front.improve(point, walks, hot, Effort(share * min(most, whole.steps / len(open_)), deadline), n)


def check_points(points: object) -> None:
    """Raise ProblemError where `points` is not a whole number of at least 2."""
    if not isinstance(points, int) or isinstance(points, bool) or points < 2:
        raise ProblemError(f"points={points!r} is not a whole number of at least 2; give how many budgets to look at")


def _relaxed(front: _Front, budgets: list[int], until: float | None) -> list[_Point]:
    """The points, the largest budget first, with bounds; candidates that relaxations lead to are added to the front."""
    each: list[_Point] = []
    search = front.search
    bound = total = search.problem.total_cost
    for budget in reversed(budgets):
        problem = search.problem.with_budget(budget)
        starts: Iterator[Candidate | None] = iter(())
        if until is None or time.perf_counter() < until:
            relaxed = relax(problem)
            bound = max(bound, relaxation_bound(problem, relaxed))
            starts = (search.keep_only(keep) for keep in lp_starts(problem, relaxed))
            if isinstance(search, MoveSearch):
                starts = chain(starts, moving_starts(search, problem, relaxed))
        each.append(_Point(budget, goal_of(problem), bound, bound - total + ENOUGH * bound))
        for start in chained(starts):
            front.add([start])
            if front.settled(each[-1]):
                break
    return each
