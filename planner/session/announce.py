"""What is said of plans while they are made: one log line for each, and one warning where there is none."""

from __future__ import annotations

import logging

from torch import nn

from planner.errors import PlannerError, gb, warn
from planner.requests.planned import Planned

log = logging.getLogger("planner")


def announce(planned: Planned, seconds: float, why: str = "") -> None:
    """Log that a plan was made, unless its user wants no progress shown.

    Args:
        planned: the plan.
        seconds: that planning took.
        why: it was made anew, in words that follow "because"; empty for the first plan of a model.
    """
    record = planned.record
    if record.options.progress is False:
        return
    anew = f" anew, because {why}," if why else ""
    log.info(
        "planned%s in %.1f s: peak %s of a budget of %s, %.1f%% more time, estimated",
        anew,
        seconds,
        gb(record.peak_bytes),
        gb(record.budget_bytes),
        100 * record.overhead,
    )


def warn_unplanned(model: nn.Module, error: PlannerError) -> None:
    """Warn that a model trains as it is."""
    warn(f"this {type(model).__name__} trains without a plan, as on_failure='warn' asks: {error}")
