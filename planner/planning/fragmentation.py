"""Plans that leave the caching allocator the room that their own fragmentation takes."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil

from planner.core.step import Step, with_line
from planner.devices.caching_allocator import Event, lasting_limit, reserved
from planner.errors import InfeasibleBudgetError
from planner.lowering.margin import CONTEXT, EXPANDABLE, MARGIN, add_margin, allocator_events, expandable, fragments
from planner.requests.request import Request
from solvers import Schedule, Solution, Timeline, cost_bound, simulate
from solvers.schedule import waiting_bytes

ROUNDS, GROWTH = 3, 0.15  # solves, and what each adds to the margin that its predecessor's schedule would need
BETWEEN, APART = 2, 0.01  # further solves, and margins that are closer, as a part of the budget, are as good
ADVICE = (
    "PYTORCH_ALLOC_CONF=expandable_segments:True, with which little lies between the allocator's blocks, does, too."
)


def solve_with_margin(
    step: Step, request: Request, solve: Callable[[Step], Solution], first: int | None = None
) -> tuple[Step, Solution]:
    """Solve, and solve again with a larger margin where the simulated allocator runs out of memory.

    The first margin is that of keeping everything. Where no schedule comes of a margin, or the allocator runs out of
    memory by each, the leanest schedule that the solver knows is a plan, if the allocator has room for that, and
    margins between are tried.

    Args:
        step: without a margin.
        request: what is planned.
        solve: a step with a margin -> its solution; InfeasibleBudgetError where there is none.
        first: the margin of a known plan, to try first.

    Returns:
        The step with its margin, and the solution.

    Raises:
        InfeasibleBudgetError: the allocator needs more than the budget for the leanest schedule, too.
    """
    if not fragments(request, step.account):
        return step, solve(step)
    schedule: Schedule | None = None
    too_little = 0
    for n in range(ROUNDS):
        if schedule is None and first is not None:
            roomy = with_line(step, MARGIN, first)
        else:
            roomy = add_margin(step, request, schedule, GROWTH * n)
        try:
            solution = solve(roomy)
        except InfeasibleBudgetError as e:
            if expandable():
                raise _with_its_margin(e, roomy.account[MARGIN]) from None
            return _between(step, request, solve, too_little, _leanest(step, request, e))
        schedule = solution.schedule
        if expandable() or not reserved(*_room(step, request, schedule, solution.timeline)).out_of_memory:
            return roomy, solution
        too_little = max(too_little, roomy.account[MARGIN])
    try:
        solve(with_line(step, MARGIN, request.budget_bytes))
    except InfeasibleBudgetError as e:
        return _between(step, request, solve, too_little, _leanest(step, request, e))
    raise AssertionError("a margin of the whole budget leaves no room")


def _between(
    step: Step, request: Request, solve: Callable[[Step], Solution], too_little: int, best: tuple[Step, Solution]
) -> tuple[Step, Solution]:
    """A faster plan than the leanest one, by margins between one with which the allocator runs out of memory and the
    largest for which there is a schedule.
    """
    enough = request.budget_bytes - (best[1].timeline.peak - best[0].account[MARGIN])
    for _ in range(BETWEEN):
        if enough - too_little < APART * request.budget_bytes:
            break
        margin = (enough + too_little) // 2
        roomy = with_line(step, MARGIN, margin)
        try:
            solution = solve(roomy)
        except InfeasibleBudgetError:  # it was searched for a time that is limited
            break
        if reserved(*_room(step, request, solution.schedule, solution.timeline)).out_of_memory:
            too_little = margin
            continue
        enough = margin
        if solution.timeline.cost < best[1].timeline.cost:
            best = roomy, solution
    return best


def _room(step: Step, request: Request, schedule: Schedule, timeline: Timeline) -> tuple[list[Event], int]:
    """What a schedule allocates and frees, and the bytes that its segments may take together."""
    beside = step.account[CONTEXT] + max(waiting_bytes(step.problem, schedule.steps), default=0)
    return allocator_events(step, request, schedule, timeline), request.budget_bytes - beside


def _leanest(step: Step, request: Request, refused: InfeasibleBudgetError) -> tuple[Step, Solution]:
    """The leanest schedule of a refusal, as a plan; raises the refusal, with what the allocator needs for it."""
    schedule: Schedule | None = refused.leanest
    if schedule is None:
        raise refused
    bare = simulate(step.problem.with_budget(None), schedule)
    events, limit = _room(step, request, schedule, bare)
    lacking = lasting_limit(events, limit) - limit if reserved(events, limit).out_of_memory else 0
    margin = max(0, request.budget_bytes + lacking - bare.peak)
    if lacking:
        takes = {**refused.takes, MARGIN: margin}
        lower = f"{refused.lower} {ADVICE}".strip()
        note = " ".join(getattr(refused, "__notes__", ()))
        least, late = request.budget_bytes + lacking, refused.late
        raise InfeasibleBudgetError(refused.budget_gb, least, takes, lower=lower, note=note, late=late)
    roomy = with_line(step, MARGIN, margin)
    timeline = simulate(roomy.problem, schedule)
    bound = min(timeline.cost, cost_bound(roomy.problem))
    return roomy, Solution(schedule, timeline, "leanest", 0.0, bound)


def _with_its_margin(e: InfeasibleBudgetError, margin: int) -> InfeasibleBudgetError:
    """The error for segments that can grow: a larger budget needs a larger margin."""
    asked = e.minimum_bytes - margin
    least = ceil(asked * (1 + EXPANDABLE)) + 1
    return InfeasibleBudgetError(e.budget_gb, least, {**e.takes, MARGIN: least - asked}, lower=e.lower, late=e.late)
