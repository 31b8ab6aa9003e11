"""Whether a plan fits, as every report says it."""

from __future__ import annotations

from planner.core.plan import PlanRecord


def peak(plan: PlanRecord) -> int:
    """The most bytes that the step takes: as predicted, or as a real step took where that was more."""
    seen = plan.verification
    return plan.peak_bytes if seen is None else max(plan.peak_bytes, seen.measured_bytes)


def fits(plan: PlanRecord) -> bool:
    """Whether that is within the budget."""
    return peak(plan) <= plan.budget_bytes
