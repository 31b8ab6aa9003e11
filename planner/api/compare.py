"""`compare()`: what changed from one plan to another."""

from __future__ import annotations

from planner.api.plan import Plan
from planner.errors import ApplyError, OptionError
from planner.report.compare import compare_records
from planner.report.comparison import Comparison


def compare(a: Plan, b: Plan) -> Comparison:
    """The changes from one plan to another: what was asked for, budget, peak, time, and decisions per module.

    Values are matched by module, kind of op and order.

    Args:
        a: the plan to start from.
        b: the other plan; of any model, mode or device.

    Returns:
        The changes; printing them says it in words.

    Raises:
        OptionError: one of the two is no plan, or waits for its first training step.

    Examples:
        >>> import torch
        >>> from planner import plan
        >>> model, batch = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()), torch.zeros(4, 8)
        >>> p = plan(model, batch, budget_gb=1, loss_fn=torch.Tensor.mean)
        >>> print(str(compare(p, p)).splitlines()[0])
        The plans decide the same for all 1 saved activations.
    """
    for p in (a, b):
        if not isinstance(p, Plan):
            raise OptionError(f"compare() needs two plans; it was given {p!r:.200} of type {type(p).__name__}")
    try:
        return compare_records(a.record, b.record)
    except ApplyError as e:
        raise OptionError(f"compare() needs plans that are made: {e}") from None
