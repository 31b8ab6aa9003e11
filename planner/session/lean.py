"""Plans that take the least: for steps that do not fit, and for calls in which what is recomputed takes no time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from planner.core.loop import Loop
from planner.core.options import GB
from planner.errors import InfeasibleBudgetError
from planner.requests.planned import Planned
from planner.requests.request import Request

HARDLY = 0.01  # of the budget: how much more a plan may take that is made anew
LEAST = 1  # byte, which no plan is for
Make = Callable[[Request], Planned]


def leanest(make: Make, request: Request) -> Planned:
    """The plan for calls that get no backward pass, in which what is recomputed takes no time: it saves little."""
    try:
        return within(make, request, LEAST)
    except InfeasibleBudgetError as e:
        return within(make, request, min(e.minimum_bytes, request.budget_bytes))


def within(make: Make, request: Request, nbytes: int) -> Planned:
    """The plan for a budget in bytes, as one for the budget that was asked for."""
    planned = make(replace(request, budget_gb=nbytes / GB))
    return replace(planned, record=replace(planned.record, budget_bytes=request.budget_bytes), request=request)


def over_budget(make: Make, request: Request, least: int) -> tuple[Planned, int]:
    """The plan for a step that does not fit, and the bytes that it takes.

    Args:
        make: makes a plan; InfeasibleBudgetError where none fits.
        request: for the step.
        least: bytes that would do.
    """
    if request.loop.between_steps > request.budget_bytes:  # no plan changes that: the step itself is to fit
        alone = replace(request, loop=replace(request.loop, between_steps=0))
        try:
            return make(alone), least
        except InfeasibleBudgetError as e:
            return over_budget(make, alone, e.minimum_bytes)[0], least
    if request.options.offload and least > request.budget_bytes * (1 + HARDLY) and _waits(request.loop):
        return _leanest_that_moves(make, request)
    return within(make, request, least), least


def _waits(loop: Loop) -> bool:
    """Whether a loop has what calls saved there longer than until one backward pass after each."""
    return loop.in_flight > 1 or loop.graph_retained


def _leanest_that_moves(make: Make, request: Request) -> tuple[Planned, int]:
    """The plan in which values leave, though the loop has calls wait, and the bytes that it takes with what waits.

    Nothing leaves in the leanest plan: one in which values do takes less, also beside what waits for a while.
    """
    lean = replace(request, loop=replace(request.loop, in_flight=1, graph_retained=False))
    try:
        planned = make(lean)
    except InfeasibleBudgetError as e:
        planned = within(make, lean, e.minimum_bytes)
    waiting = max(1, request.loop.in_flight - 1) * planned.record.kept_bytes
    return planned, planned.record.peak_bytes + waiting
