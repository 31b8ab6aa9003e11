"""Schedules that peak no higher than the step in eager mode, where keeping everything would, within the budget.

A captured graph may hold more than eager mode does: models take other ways through their code under torch.compile (a
scan instead of a loop, a mask instead of `is_causal`), and what eager code writes in place has tensors of its own.
"""

from __future__ import annotations

from dataclasses import replace

from planner.capture.trace.step import TrainingGraph
from planner.errors import gb
from planner.requests.request import Request
from solvers import InfeasibleError, Problem, Solution, cost_bound, every_op_once, simulate, solve

SLACK = 0.01  # of the time of keeping everything, where eager mode takes less, and of its peak


def no_higher_than_eager(problem: Problem, request: Request, graph: TrainingGraph) -> Solution | None:
    """A solution that peaks no higher than eager mode and costs no more time; None where there is none, or no need.

    Where the model checkpoints itself, eager mode's peak says nothing of keeping everything.

    Args:
        problem: the captured step, with its budget.
        request: what is planned.
        graph: the captured step, with what it takes in eager mode.
    """
    eager, options = graph.eager, request.options
    if eager is None or any(region.checkpointed for region in graph.regions):
        return None
    everything = simulate(problem, every_op_once(problem)).peak
    if not (1 + SLACK) * eager.peak_bytes < everything <= request.budget_bytes:
        return None
    try:
        lean = problem.with_budget(eager.peak_bytes)
        solution = solve(lean, options.solver, time_limit=options.time_limit, progress=options.progress)
    except InfeasibleError:
        return None
    if solution.timeline.cost > max(eager.seconds, (1 + SLACK) * problem.total_cost):
        return None
    note = (
        f"Everything kept would take {gb(everything)}, more than the {gb(eager.peak_bytes)} of eager mode without a "
        f"plan: recomputing brings it down to that for {solution.timeline.cost / problem.total_cost - 1:.1%} of time."
    )
    bound = min(solution.timeline.cost, cost_bound(problem))
    return replace(solution, bound=bound, note=f"{solution.note} {note}".strip())
