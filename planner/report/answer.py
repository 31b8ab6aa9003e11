"""Whether a plan fits, as every report says it."""

from __future__ import annotations

from planner.core.plan import PlanRecord
from planner.core.recipe import Choice
from planner.errors import gb


def peak(plan: PlanRecord) -> int:
    """The step's peak in bytes: the predicted one, or that of a verified step where it was higher."""
    seen = plan.verification
    return plan.peak_bytes if seen is None else max(plan.peak_bytes, seen.measured_bytes)


def fits(plan: PlanRecord) -> bool:
    """Whether the peak is within the budget."""
    return peak(plan) <= plan.budget_bytes


def answer(plan: PlanRecord) -> str:
    """One sentence: whether the plan fits, its peak, its cost in time, and how far from the best it can be."""
    return (
        f"{'Fits' if fits(plan) else 'Does not fit'}: peak {gb(peak(plan))} of {gb(plan.budget_bytes)}, "
        f"{plan.overhead:.1%} more time (at most {plan.gap:.1%} above the best)."
    )


def without_a_plan(plan: PlanRecord) -> str:
    """The peak of the step in eager mode, where it is known, and that of the captured step with nothing recomputed."""
    everything, eager = gb(plan.baseline_peak_bytes), plan.eager_peak_bytes
    if isinstance(plan.recipe, Choice):
        return f"Without a plan: {everything}"
    kept = f"{everything} with everything kept"
    return kept if eager is None else f"Without a plan: {gb(eager)} (eager mode), {kept}"
