"""The default solver: exact ones for the smallest problems, searches for all others."""

from __future__ import annotations

from dataclasses import replace

from solvers.exact.checkmate import ilp
from solvers.exact.moving import cheapest_with_moves
from solvers.problem import Problem
from solvers.protocol import Answer
from solvers.schedule import InfeasibleError, every_op_once, simulate
from solvers.search.rounds import search
from solvers.search.together import search_with_moves

EXACT = 8  # `ilp` solves problems of no more ops: its model then holds every schedule that can be optimal


def auto(
    problem: Problem, *, time_limit: float | None = None, progress: bool | None = None, brief: bool = False
) -> Answer:
    """The cheapest schedule that the search reaches within the budget, never costlier than `chen`'s, and a cost bound.

    Where the problem has a link, it decides what to keep, to recompute and to move together, and takes about twice as
    long; the answer is never costlier than the one without the link.

    Args:
        problem: what to schedule; up to `EXACT` ops it is solved exactly.
        time_limit: seconds on two cores; None for about 2, and more for thousands of ops. It becomes a count of
            simulated steps; the clock itself only matters where the machine is slower than expected.
        progress: show a bar; None for only where a terminal is watching.
        brief: end at the cheapest schedule that fits before anything is annealed, or after little of it; not with a
            link.

    Raises:
        InfeasibleError: no schedule that the search reached fits; its `minimum` is a budget that succeeds under any
            time limit: it is looked for with the default effort, whatever the limit is.
    """
    once = every_op_once(problem)
    if problem.budget is None or simulate(problem, once).peak <= problem.budget:
        return Answer(once, problem.total_cost)
    if problem.link is not None:
        return _with_moves(problem, time_limit, progress)
    if brief and len(problem.ops) > EXACT:
        return search(problem, time_limit=time_limit, progress=progress, brief=True)
    solver = ilp if len(problem.ops) <= EXACT else search
    return solver(problem, time_limit=time_limit, progress=progress)


def _with_moves(problem: Problem, time_limit: float | None, progress: bool | None) -> Answer:
    """The answer where values may leave, never costlier than without."""
    if (cheapest := cheapest_with_moves(problem)) is not None:
        return Answer(cheapest, simulate(problem, cheapest).cost)
    found = search_with_moves(problem, time_limit=time_limit, progress=progress)
    if len(problem.ops) <= EXACT:
        try:
            without = ilp(problem.without_link(), time_limit=time_limit, progress=progress).schedule
        except InfeasibleError:
            return found
        cheaper = min(found.schedule, without, key=lambda schedule: simulate(problem, schedule).cost)
        return replace(found, schedule=cheaper)
    return found
