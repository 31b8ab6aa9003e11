"""Starts for the search: the values that linear relaxations of the problem keep."""

from __future__ import annotations

from collections.abc import Iterator

from solvers.bounds.cost import points
from solvers.bounds.relaxation import Relaxed, build, solve
from solvers.problem import Problem

SHARES = (1.0, 0.97, 0.93, 0.88, 0.8, 0.7)  # of the room that the budget leaves
SINGLE = 6  # single points that are relaxed too
WORK = 1.5e6  # of all relaxations together, in the unit of `Program.work`
SEARCHED = 1_000  # columns of the largest relaxation that is also searched for whole numbers
NODES = 20  # of that search
ROUNDING = (0.5, 0.01)  # an op of which no more than this share runs again keeps its values


def lp_starts(problem: Problem, relaxed: Relaxed, effort: float = 1.0) -> Iterator[frozenset[int]]:
    """Sets of values to keep, by rounding relaxations; the other values are recomputed when a reader needs them.

    The most promising set comes first: it rounds `relaxed`, and its schedule often fits, or nearly so, at a cost that
    equals the bound. Schedules hold more bytes than a relaxation knows of, so that others are relaxed for less than the
    budget, at the points of `relaxed` and at single ones. Whether a schedule fits is for the search to say.

    About 50 sets, in 1 or 2 s; a caller may stop early. `effort` is a share of that work.
    """
    if problem.budget is None or not relaxed.points:
        return
    seen = set()

    def rounded(solved: Relaxed) -> Iterator[frozenset[int]]:
        for part in ROUNDING:
            keep = solved.kept(problem, part)
            if solved.again and keep not in seen:
                seen.add(keep)
                yield keep

    yield from rounded(relaxed)
    work = effort * WORK
    for share in SHARES:
        room = int((problem.budget - problem.resident) * share)
        smaller = problem.with_budget(problem.resident + max(0, room))
        for at in dict.fromkeys((relaxed.points, *((t,) for t in points(problem)[:SINGLE]))):
            program = build(smaller, at)
            work -= program.work
            if work < 0:
                return
            whole = len(program.costs) <= SEARCHED and len(at) == 1 and share == 1.0
            for nodes in (0, NODES)[: 1 + whole]:
                yield from rounded(solve(smaller, program, nodes))
