"""The default solver: the exact one for the smallest problems, the search for all others."""

from __future__ import annotations

from solvers.exact.checkmate import ilp
from solvers.exact.moving import cheapest_with_moves
from solvers.problem import Problem
from solvers.protocol import Answer
from solvers.schedule import every_op_once, simulate
from solvers.search.rounds import search
from solvers.search.together import search_with_moves

EXACT = 8  # `ilp` solves problems of no more ops: its model then holds every schedule that can be optimal


def auto(problem: Problem, *, time_limit: float | None = None, progress: bool | None = None) -> Answer:
    """The cheapest schedule that the search reaches within the budget, never costlier than `chen`'s, and a cost bound.

    Args:
        problem: what to schedule; up to `EXACT` ops it is solved exactly.
        time_limit: seconds on two cores; None for about 2, and more for thousands of ops. It becomes a count of
            simulated steps; the clock itself only matters where the machine is slower than expected.
        progress: show a bar; None for only where a terminal is watching.

    Raises:
        InfeasibleError: no schedule that the search reached fits; its `minimum` is a budget that succeeds under any
            time limit: it is looked for with the default effort, whatever the limit is.
    """
    once = every_op_once(problem)
    if problem.budget is None or simulate(problem, once).peak <= problem.budget:
        return Answer(once, problem.total_cost)
    if problem.link is not None:
        cheapest = cheapest_with_moves(problem)
        if cheapest is not None:
            return Answer(cheapest, simulate(problem, cheapest).cost)
        return search_with_moves(problem, time_limit=time_limit, progress=progress)
    solver = ilp if len(problem.ops) <= EXACT else search
    return solver(problem, time_limit=time_limit, progress=progress)
