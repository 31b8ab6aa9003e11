"""The whole curve of peak against cost: many budgets searched together, each with what the others found."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from solvers.anneal import Effort, Found, Search, Walk, energy_of, ready
from solvers.auto import COLDEST, ENOUGH, bar_of, chained, each_of, effort_of, goal_of, leanest_of, nested, segments
from solvers.bounds import relax, relaxation_bound
from solvers.compiled import Goal
from solvers.errors import ProblemError
from solvers.guides import guides
from solvers.problem import Problem
from solvers.schedule import Schedule, Timeline, every_op_once, simulate, validate
from solvers.solve import Solution, check_time_limit

AS_AUTO = 1 / 4  # of what `auto` would walk for all the points one by one; with the rest, about a third of its time
LEANING, RELAXED = 0.15, 0.5  # of a time limit: for the lowest peak, until when bounds
ROUNDS = ((4, 0.02, 0.4), (4, 0.004, 0.4), (3, 0.001, 0.2))  # walks a point, hottest, share of the work


@dataclass(frozen=True, slots=True)
class _Kept:
    """A schedule that is valid under every budget from its peak on, and its policy, which other searches start from."""

    found: Found
    schedule: Schedule
    timeline: Timeline


@dataclass(frozen=True, slots=True)
class _Point:
    """A budget, its goal, its proven bound, and the cost of re-runs that needs no more search."""

    budget: int
    goal: Goal
    bound: float
    enough: float


class _Found:
    """All schedules found, but those that another one beats in peak and in cost."""

    def __init__(self, search: Search) -> None:
        self.search = search
        self.schedules: list[_Kept] = []

    def add(self, found: Iterable[Found]) -> None:
        for new in found:
            if any(k.found.peak <= new.peak and k.found.extra <= new.extra for k in self.schedules):
                continue
            schedule = self.search.schedule(new.policy)
            timeline = validate(self.search.problem, schedule)
            others = (k for k in self.schedules if k.found.peak < new.peak or k.found.extra < new.extra)
            self.schedules = [*others, _Kept(new, schedule, timeline)]

    def best(self, budget: int) -> _Kept:
        fitting = (k for k in self.schedules if k.timeline.peak <= budget)
        return min(fitting, key=lambda k: (k.timeline.cost, k.timeline.peak))

    def settled(self, point: _Point) -> bool:
        return self.best(point.budget).found.extra <= point.enough

    def improve(self, point: _Point, walks: int, hot: float, effort: Effort, seed: int) -> None:
        """Walk from what is best for a point, whichever point it was found for, and from the cheapest of all."""
        steps, seconds = each_of(self.search, effort, walks)
        ranked = sorted((k.found for k in self.schedules), key=lambda f: energy_of(point.goal, f))
        # hot walks forget where they began; what every op once leads to is seldom what segments lead to
        starts = [self.best(point.budget).found, *ranked[: walks - 2], min(ranked, key=lambda f: f.extra)][:walks]
        round_ = [Walk(f.policy, hot, hot * COLDEST, steps, seconds, seed + i) for i, f in enumerate(starts)]
        self.add(self.search.walk(round_, point.goal, point.goal.price * point.enough))


def pareto(
    problem: Problem, points: int = 10, *, time_limit: float | None = None, progress: bool | None = None
) -> tuple[Solution, ...]:
    """Peak against cost, from the lowest peak found to that of every op once; the problem's budget is not looked at.

    Budgets are closer together the lower they are, where cost changes most: that of point i is the lowest peak plus
    (i / (points - 1))**2 of the way up. They are searched together: what is found for one starts the search for others,
    and every schedule found is a candidate for every budget. Of the candidates that fit a budget, the cheapest is
    taken; of equally cheap ones, the one of the lowest peak.

    So a larger budget never costs more: what fits the smaller one is a candidate for it too. And a smaller budget never
    peaks higher: where the larger one's choice fits it, then as a candidate for both it is the smaller one's choice,
    with its peak; where it does not, it peaks above the smaller budget. A bound for a larger budget is one for a
    smaller budget, so that bounds never rise with the budget either.

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
        >>> from .problem import Op
        >>> ops = [Op("f", (), (0,), 1.0), Op("g", (0,), (1,), 1.0), Op("h", (1,), (2,), 1.0)]
        >>> ops += [Op("dh", (1, 2), (3,), 1.0), Op("dg", (0, 3), (4,), 1.0)]
        >>> found = pareto(Problem(tuple(ops), (4, 4, 1, 1, 1), boundary=3), points=2)
        >>> [(s.timeline.peak, s.timeline.cost) for s in found]
        [(8, 6.0), (10, 5.0)]
    """
    return tuple(solution for _, solution in curve(problem, points, time_limit=time_limit, progress=progress))


def curve(
    problem: Problem, points: int = 10, *, time_limit: float | None = None, progress: bool | None = None
) -> list[tuple[int, Solution]]:
    """What `pareto` returns, each solution with its budget in bytes."""
    check_points(points)
    check_time_limit(time_limit)
    ready()
    begin = time.perf_counter()
    most = effort_of(problem, None).steps  # for one point
    whole = Effort(points * AS_AUTO * most) if time_limit is None else Effort.within(time_limit)
    leaning = Effort(most) if time_limit is None else Effort.within(LEANING * time_limit)
    with bar_of(Effort(leaning.steps + whole.steps), progress) as shown:
        search = Search(problem.with_budget(None), shown.update)
        found = _Found(search)
        found.add(chained(iter([search.keep_only()]), nested(search), segments(search)))
        found.add([leanest_of(search, leaning, 0)])
        high = simulate(problem, every_op_once(problem)).peak
        low = min(k.timeline.peak for k in found.schedules)
        budgets = [low + (high - low) * i**2 // (points - 1) ** 2 for i in range(points)]
        each = _relaxed(found, budgets, None if time_limit is None else begin + RELAXED * time_limit)
        for point in each:
            if not found.settled(point) and found.best(point.budget).timeline.peak == low:
                # the leanest schedule pays for more than this budget asks
                found.add([leanest_of(search, Effort(leaning.steps / 2, whole.deadline), point.budget)])
        for n, (walks, hot, share) in enumerate(ROUNDS):
            open_ = [p for p in (each, each[::-1])[n % 2] if not found.settled(p)]
            later = sum(share for _, _, share in ROUNDS[n:])
            for done, point in enumerate(open_):
                shown.set_description_str(
                    f"solving budget {done + 1} of {len(open_)}, round {n + 1} of {len(ROUNDS)}", refresh=False
                )
                deadline = whole.until(share / later / (len(open_) - done))
                found.improve(point, walks, hot, Effort(share * min(most, whole.steps / len(open_)), deadline), n)
    note = "time ran out before the end of the search" if search.late else ""
    seconds = (time.perf_counter() - begin) / points
    solutions = []
    for budget, point in zip(budgets, reversed(each), strict=True):
        best = found.best(budget)
        bound = min(point.bound, best.timeline.cost)
        solutions.append((budget, Solution(best.schedule, best.timeline, "pareto", seconds, bound, note)))
    return solutions


def check_points(points: object) -> None:
    """Raise ProblemError where `points` is no number of points."""
    if not isinstance(points, int) or isinstance(points, bool) or points < 2:
        raise ProblemError(f"points={points!r} is not a whole number of at least 2; give how many budgets to look at")


def _relaxed(found: _Found, budgets: list[int], until: float | None) -> list[_Point]:
    """The points, the largest budget first, with bounds; where their relaxations lead is added to what is found."""
    each: list[_Point] = []
    total = found.search.problem.total_cost
    bound = total
    for budget in reversed(budgets):
        problem = found.search.problem.with_budget(budget)
        guided: Iterator[Found | None] = iter(())
        if until is None or time.perf_counter() < until:
            relaxed = relax(problem)
            bound = max(bound, relaxation_bound(problem, relaxed))
            guided = (found.search.keep_only(keep) for keep in guides(problem, relaxed))
        each.append(_Point(budget, goal_of(problem), bound, bound - total + ENOUGH * bound))
        for start in chained(guided):
            found.add([start])
            if found.settled(each[-1]):
                break
    return each
