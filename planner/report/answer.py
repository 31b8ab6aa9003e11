"""Whether a plan fits, as every report says it."""

from __future__ import annotations

from math import prod

from planner.core.plan import PlanRecord
from planner.core.recipe import Choice
from planner.errors import gb


def peak(plan: PlanRecord) -> int:
    """The step's peak in bytes: the predicted one, or that of a verified step where it was higher."""
    seen = plan.verification
    return plan.peak_bytes if seen is None else max(plan.peak_bytes, seen.measured_bytes or 0)


def fits(plan: PlanRecord) -> bool:
    """Whether the peak is within the budget."""
    return peak(plan) <= plan.budget_bytes


def answer(plan: PlanRecord) -> str:
    """One sentence: whether the plan fits, its peak, its extra time, and the least that any plan would take."""
    return (
        f"{'Fits' if fits(plan) else 'Does not fit'}: peak {gb(peak(plan))} of {gb(plan.budget_bytes)}, {_extra(plan)}."
    )


def least_overhead(plan: PlanRecord) -> float:
    """The proven lower bound on the overhead of any plan within the budget, by the same estimates of times."""
    return max(0.0, (1 + plan.overhead) / (1 + plan.gap) - 1)


def _extra(plan: PlanRecord) -> str:
    own, least = (f"{share:.1%}" for share in (plan.overhead, least_overhead(plan)))
    if not float(own.rstrip("%")):
        return "no extra time"
    if own == least:
        return f"{own} more time, the least possible"
    return f"{own} more time" + (f" (any plan takes at least {least})" if float(least.rstrip("%")) else "")


def subject(plan: PlanRecord) -> str:
    """What was planned for: model, batch, device and budget, in one line."""
    model, batch = plan.identity, plan.step.batch or ()
    size = sum(prod(p.shape) for p in model.parameters)
    first = [f"batch {'x'.join(map(str, kind.shape)) or 'of a scalar'} {kind.dtype}" for kind in batch[:1]]
    more = f" and {len(batch) - 1} more" if len(batch) > 1 else ""
    parts = [f"{model.name} ({_count(size)} parameters)", *(f"{text}{more}" for text in first), plan.device]
    return ", ".join([*parts, f"budget {gb(plan.budget_bytes)}"])


def _count(number: int) -> str:
    """A count of parameters, as people say it: "3.1 M"."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return str(number)


def without_a_plan(plan: PlanRecord) -> str:
    """The peak of the step in eager mode, where it is known, and that of the captured step with nothing recomputed."""
    everything, eager = gb(plan.baseline_peak_bytes), plan.eager_peak_bytes
    if isinstance(plan.recipe, Choice):
        return f"Without a plan: {everything}"
    kept = f"{everything} with everything kept"
    return kept if eager is None else f"Without a plan: {gb(eager)} (eager mode), {kept}"
