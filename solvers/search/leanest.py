"""The schedule of the lowest peak, whatever it costs."""

from __future__ import annotations

from dataclasses import dataclass

from solvers.bounds.peak import minimum_peak_bound
from solvers.problem import Problem
from solvers.schedule import Schedule
from solvers.search.annealing import Search, Walk, ready
from solvers.search.arrays import Goal
from solvers.search.effort import THREADS, Effort, bar_of, each_of, effort_of
from solvers.search.evaluation import Candidate
from solvers.search.offload import search_of
from solvers.search.starts import chained, nested, segments

TIE = 1e-3  # energy of the cost of every op once, where the variable part of the first peak is 1: it breaks ties
HOT, COLD = 0.02, 2e-5  # temperatures of the walks


@dataclass(frozen=True, slots=True)
class Minimum:
    """The leanest schedule that the search reached, its peak, and a proven lower bound on the peak of any; bytes."""

    schedule: Schedule
    peak: int
    bound: int


def minimum_peak(problem: Problem, *, time_limit: float | None = None, progress: bool | None = None) -> Minimum:
    """The schedule of the lowest peak that the search reaches, whatever it costs; the budget is not looked at.

    Args:
        problem: what to schedule.
        time_limit: as for `auto`.
        progress: as for `auto`.
    """
    ready()
    effort = effort_of(problem, time_limit)
    with bar_of(effort, progress) as bar:
        search = search_of(problem, bar.update)
        leanest = leanest_of(search, effort)
        return Minimum(search.schedule(leanest), leanest.peak, minimum_peak_bound(problem))


def lean_peak(problem: Problem) -> int:
    """The peak of the leanest start, in bytes, without any search: a schedule of no higher peak is always found."""
    return min(start.peak for start in _starts(search_of(problem, lambda steps: None)))


def leanest_of(search: Search, effort: Effort, target: int = 0, enough: int = 0) -> Candidate:
    """The leanest start, annealed for its peak down to `target`; cost only breaks ties.

    The walks end at a peak of `enough`, and are the same for any `enough`: a peak that one call reaches, another call
    reaches too. Where values may leave, the leanest schedule in which none does is a start: no peak is above its.
    """
    problem = search.problem
    starts = _starts(search)
    if (first := min(starts, key=lambda c: (c.peak, c.extra))).peak <= enough:
        return first
    if problem.link is not None:
        plain = leanest_of(Search(problem.without_link(), search.tick), effort, target, enough)
        starts += [c for c in (search.judge(plain.policy, 0.0), search.leaner(plain)) if c is not None]
    best = min(starts, key=lambda c: (c.peak, c.extra))
    variable = max(1, best.peak - problem.resident)
    goal = Goal(TIE / (problem.total_cost or 1.0), 1 / variable, float(target), float("inf"), problem.resident)
    # each thread does two walks
    steps, _ = each_of(problem, len(search.choices.gaps), effort, THREADS)
    walks = [Walk(best.policy, HOT, COLD, steps / 2, effort.left(), seed) for seed in range(2 * THREADS)]
    return min((best, *search.walk(walks, goal, goal.penalty * enough)), key=lambda c: (c.peak, c.extra))


def _starts(search: Search) -> list[Candidate]:
    return [search.leaner(c) for c in chained(nested(search), segments(search), iter([search.keep_only()]))]
