"""The result of measuring one real step."""

from __future__ import annotations

from dataclasses import dataclass

from planner.errors import gb

FOUND = "found by a real step"  # the line of the account for the bytes that a prediction missed


@dataclass(frozen=True, slots=True)
class Verification:
    """What one real step showed; bytes and seconds.

    Attributes:
        predicted_bytes: the plan's peak, up to the end of the backward pass.
        measured_bytes: the planned step's peak there: what the plan counts as resident, and what the allocator handed
            out. The optimizer does not step.
        unplanned_bytes: the same for the model without a plan; None where that ran out of memory.
        budget_bytes: the budget.
        gradient_error: largest difference of a gradient between the two steps, relative to the largest entry of that
            gradient without the plan; None where there is nothing to compare with.
        gradients_agree: whether every difference is within float rounding of its dtype; None likewise.
        capture_error: the same difference of a step that was captured likewise and recomputes nothing: torch.compile's
            own; None where there was nothing to explain, or it could not be run.
        plan_error: the difference of the planned step from that one: the plan's own; None likewise.
        unlike: names of custom ops that gave other results when they ran twice on the same inputs, looked for where the
            gradients of a plan that runs ops again differ.
        planned_seconds, unplanned_seconds: time of one step each, after a warm-up.
    """

    predicted_bytes: int
    measured_bytes: int
    unplanned_bytes: int | None
    budget_bytes: int
    gradient_error: float | None
    gradients_agree: bool | None
    planned_seconds: float
    unplanned_seconds: float | None
    capture_error: float | None = None
    plan_error: float | None = None
    unlike: tuple[str, ...] = ()

    @property
    def cause(self) -> str:
        """Where a difference of gradients is from, in words; empty where there is none, or it is not known."""
        if self.unlike:
            names = ", ".join(self.unlike)
            return f"{names} gave other results when run again on equal inputs: keep={[*self.unlike]} keeps the first"
        if self.capture_error is None or self.plan_error is None:
            return ""
        nothing = f"{self.capture_error:.1e} with nothing recomputed"
        if not self.plan_error:
            return f"torch.compile's own: {nothing}, and the plan adds none"
        return f"{nothing}, and {self.plan_error:.1e} between that and the plan"

    @property
    def within_budget(self) -> bool:
        """Whether the measured peak is within the budget."""
        return self.measured_bytes <= self.budget_bytes

    @property
    def prediction_error(self) -> float:
        """Measured over predicted, less one."""
        return self.measured_bytes / self.predicted_bytes - 1

    @property
    def overhead(self) -> float | None:
        """Time of the planned step over that of the other, less one; of one step each, so with their noise."""
        return None if self.unplanned_seconds is None else self.planned_seconds / self.unplanned_seconds - 1

    def __str__(self) -> str:
        held = "held" if self.within_budget else "EXCEEDED"
        text = (
            f"predicted peak {gb(self.predicted_bytes)}, measured {gb(self.measured_bytes)} "
            f"({self.prediction_error:+.2%}), budget {gb(self.budget_bytes)} ({held}); "
        )
        if self.unplanned_bytes is None:
            return f"{text}step {self.planned_seconds:.3f} s; without a plan out of memory, so gradients not compared"
        return (
            f"{text}without a plan {gb(self.unplanned_bytes)}; "
            f"gradients {'agree' if self.gradients_agree else 'DIFFER'} (largest relative difference "
            f"{self.gradient_error:.1e}{f', {self.cause}' if self.cause else ''}); "
            f"step {self.planned_seconds:.3f} s, without a plan {self.unplanned_seconds:.3f} s"
        )
