"""What is known of a step before there is a batch: a budget that even that does not fit is refused at once."""

from __future__ import annotations

from planner.costs.account import account_of
from planner.costs.static_memory import trained_bytes
from planner.errors import InfeasibleBudgetError, OptionError
from planner.requests.request import Request


def refuse_hopeless(request: Request) -> None:
    """Raise InfeasibleBudgetError where parameters, gradients, optimizer state and the like exceed the budget.

    An optimizer that cannot be tried yet counts nothing here: the first step will tell.
    """
    try:
        lines, _ = account_of(request)
    except OptionError:
        return
    if not request.gradients_copied and not request.options.step_in_backward:
        lines = {**lines, "gradients": trained_bytes(request.model, request.options.shard)}
    least = sum(lines.values())
    if least > request.budget_bytes:
        raise InfeasibleBudgetError(request.budget_gb, least, lines, whole=False)
