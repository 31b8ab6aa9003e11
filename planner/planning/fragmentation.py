"""Plans that leave the caching allocator the room that their own fragmentation takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import ceil

from planner.core.step import Step
from planner.devices.caching_allocator import reserved, smallest_limit
from planner.errors import InfeasibleBudgetError, gb, warn
from planner.lowering.margin import CONTEXT, EXPANDABLE, MARGIN, add_margin, allocator_events, expandable, fragments
from planner.requests.request import Request
from solvers import Solution
from solvers.schedule import waiting_bytes

ROUNDS, GROWTH = 3, 0.15  # solves, and what each adds to the margin that its predecessor's schedule would need


def solve_with_margin(step: Step, request: Request, solve: Callable[[Step], Solution]) -> tuple[Step, Solution]:
    """Solve, and solve again with a larger margin where the simulated allocator runs out of memory.

    The first margin is that of keeping everything, whatever the budget is, so that a budget that was named as feasible
    is. Where no margin that fits is enough, the note of the solution says so.

    Args:
        step: without a margin.
        request: what is planned.
        solve: a step with a margin -> its solution; InfeasibleBudgetError where there is none.

    Returns:
        The step with its margin, and the solution.
    """
    if not fragments(request, step.account):
        return step, solve(step)
    best: tuple[Step, Solution] | None = None
    for n in range(ROUNDS):
        roomy = add_margin(step, request, best[1].schedule if best else None, GROWTH * n)
        try:
            solution = solve(roomy)
        except InfeasibleBudgetError as e:
            if best is None:
                raise (_with_its_margin(e, roomy.account[MARGIN]) if expandable() else e) from None
            break
        best = roomy, solution
        if expandable():
            return best
        events = allocator_events(step, request, solution.schedule, solution.timeline)
        others = max(waiting_bytes(step.problem, solution.schedule.steps), default=0)
        limit = request.budget_bytes - step.account[CONTEXT] - others
        if not reserved(events, limit).out_of_memory:
            return best
    assert best is not None
    roomy, solution = best
    note = (
        f"The caching allocator may need {gb(smallest_limit(events) - limit)} more than the budget, by simulation, for "
        "what lies between its blocks: train with PYTORCH_ALLOC_CONF=expandable_segments:True, which avoids most of "
        "that, or give more."
    )
    warn(note)
    return roomy, replace(solution, note=f"{solution.note} {note}".strip())


def _with_its_margin(e: InfeasibleBudgetError, margin: int) -> InfeasibleBudgetError:
    """The error for segments that can grow: a larger budget needs a larger margin."""
    asked = e.minimum_bytes - margin
    least = ceil(asked * (1 + EXPANDABLE)) + 1
    return InfeasibleBudgetError(e.budget_gb, least, {**e.takes, MARGIN: least - asked}, lower=e.lower)
