"""The rows and columns of the relaxation that a link adds: which values are on the host only at a point in time.

What is on the host only when an op starts has been copied out before, and what a later op reads of it is copied back
afterwards. So the copies take no longer than the first runs, the re-runs and all other time before, and after.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from itertools import accumulate

from solvers.bounds.program import Program
from solvers.problem import Problem

LONGEST = 4.0  # of the cost of every op once: what a stage may take beside its first runs and the re-runs that count


def most_spent(problem: Problem) -> float:
    """The cost of re-runs and waiting from which on the relaxation says nothing."""
    return math.inf if problem.link is None else LONGEST * problem.total_cost


def add_spare(problem: Problem, program: Program, cost_unit: float) -> int:
    """The column of a stage for the time of waiting, and of runs that the relaxation does not know."""
    return program.column(most_spent(problem) / cost_unit)


def add_away(
    problem: Problem, program: Program, live: Mapping[int, int], here: Collection[int], end: int
) -> dict[int, int]:
    """Columns for the values that are on the host only when op `end` starts: live ones that it does not use."""
    return {
        v: _part_of(program, column)
        for v, column in live.items()
        if v in problem.movable and v not in here and problem.producer[v] < end
    }


def _part_of(program: Program, whole: int) -> int:
    column = program.column()
    program.row([(whole, 1.0), (column, -1.0)], 0.0)
    return column


def close_away(problem: Problem, program: Program, cost_unit: float) -> None:
    """The rows that say how long copies may take, once all stages are there.

    At point j, the values that were away are copied out within the stages up to j, and back within the later ones.
    """
    link, sizes = problem.link, problem.sizes
    assert link is not None
    times = list(accumulate((op.cost for op in problem.ops), initial=0.0))
    total = sum(sizes) or 1
    for j, away in enumerate(program.away):
        if not away:
            continue
        point = program.stages[j + 1].begin
        for rate, stages, time in (
            (link.out, range(j + 1), times[point]),
            (link.back, range(j + 1, len(program.stages)), times[-1] - times[point]),
        ):
            terms = [(column, (link.latency + sizes[v] / rate) / cost_unit) for v, column in away.items()]
            for k in stages:
                spent = {**dict.fromkeys(program.stages[k].again.values()), program.spare[k]: None}
                terms += [(column, -program.costs[column]) for column in spent]
            program.row(terms, -math.inf, time / cost_unit)
        if link.host is not None:
            program.row([(column, sizes[v] / total) for v, column in away.items()], -math.inf, link.host / total)
