"""Where to start a search: what relaxations of the problem keep."""

from __future__ import annotations

from collections.abc import Iterator

from solvers.bounds import points
from solvers.problem import Problem
from solvers.relaxation import Relaxed, build, solve

SHARES = (1.0, 0.97, 0.93, 0.88, 0.8, 0.7)  # of the room that the budget leaves
SINGLE = 6  # single points looked at
WORK = 1.5e6  # of all relaxations
SEARCHED = 1_000  # columns of a relaxation that is searched for whole numbers too
NODES = 20  # of that search


def guides(problem: Problem, relaxed: Relaxed, effort: float = 1.0) -> Iterator[frozenset[int]]:
    """Values to keep, the others to be made again when they are needed: what relaxations would do.

    Starts for a search, the most promising first; the search says which of them fit. The first is what `relax` found:
    often a schedule that fits, or nearly, at a cost that equals the bound. As the schedules that follow hold more than
    a relaxation knows of, more are solved for less than the budget, at its points and at single ones. About 50 sets, in
    1 or 2 s; a caller may stop early. `effort` is a share of that.
    """
    if problem.budget is None or not relaxed.points:
        return
    seen = set()

    def fresh(found: Relaxed) -> Iterator[frozenset[int]]:
        for part in (0.5, 0.01):
            keep = found.kept(problem, part)
            if found.again and keep not in seen:
                seen.add(keep)
                yield keep

    yield from fresh(relaxed)
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
                yield from fresh(solve(smaller, program, nodes))
