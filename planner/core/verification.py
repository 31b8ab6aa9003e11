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
        measured_bytes: the planned step's peak there: what the plan counts as resident, and what was asked of the
            allocator. The optimizer does not step. None on a device whose allocator keeps no peak (Apple's).
        unplanned_bytes: the same for the model without a plan; None where that ran out of memory, too.
        reserved_bytes: the planned step's peak by what the allocator had of the device, its fragmentation with it; of a
            step held to the budget where one that was free took more and this one ran. None where nothing lies between
            it and what was asked for (the CPU), or no peak is kept.
        budget_bytes: the budget.
        gradient_error: largest difference of a gradient between the two steps, relative to the largest entry of that
            gradient without the plan; None where there is nothing to compare with.
        gradients_agree: whether every difference is within float rounding of its dtype; None likewise. Where the plan
            itself adds none, a difference is rounding, too, that is no larger than what parameters cause which are off
            by 256 units in the last place: layers of BatchNorm make much of little. With `draws`, of the differences
            from the step of `capture_error`: those from eager mode's are of other masks.
        capture_error: the same difference of a step that was captured likewise and recomputes nothing: torch.compile's
            own; None where there was nothing to explain, or it could not be run.
        plan_error: the difference of the planned step from that one: the plan's own; None likewise.
        draws: whether graphs that Inductor compiled draw random numbers, which are others than eager mode's.
        unlike: names of custom ops that gave other results when they ran twice on the same inputs, looked for where the
            gradients of a plan that runs ops again differ.
        planned_seconds, unplanned_seconds: time of one step each, after a warm-up.
        loss_left_out: whether the prediction counts a loss that a loop computes outside the model, and these steps had
            another, as no `loss_fn` tells that one.
    """

    predicted_bytes: int
    measured_bytes: int | None
    unplanned_bytes: int | None
    budget_bytes: int
    gradient_error: float | None
    gradients_agree: bool | None
    planned_seconds: float
    unplanned_seconds: float | None
    capture_error: float | None = None
    plan_error: float | None = None
    draws: bool = False
    unlike: tuple[str, ...] = ()
    reserved_bytes: int | None = None
    loss_left_out: bool = False

    @property
    def cause(self) -> str:
        """Where a difference of gradients is from, in words; empty where there is none, or it is not known."""
        if self.unlike:
            names = ", ".join(self.unlike)
            return f"{names} gave other results when run again on equal inputs: keep={[*self.unlike]} keeps the first"
        if self.capture_error is None or self.plan_error is None:
            return ""
        nothing = f"{self.capture_error:.1e} with nothing recomputed"
        if self.draws:
            nothing = f"{nothing}, as Inductor draws other random numbers than eager mode"
        if not self.plan_error:
            return f"torch.compile's own: {nothing}, and the plan adds none"
        return f"{nothing}, and {self.plan_error:.1e} between that and the plan"

    @property
    def within_budget(self) -> bool | None:
        """Whether what the allocator took is within the budget; None where no peak is known."""
        taken = self.measured_bytes if self.reserved_bytes is None else self.reserved_bytes
        return None if taken is None else taken <= self.budget_bytes

    @property
    def measured(self) -> str:
        """The measured peak in words."""
        return "unknown" if self.measured_bytes is None else gb(self.measured_bytes)

    @property
    def missing_bytes(self) -> int:
        """What the prediction lacks of a plan that holds its budget; 0 where it does, or no peak is known."""
        if self.measured_bytes is None or self.within_budget:
            return 0
        return max(self.measured_bytes - self.predicted_bytes, (self.reserved_bytes or 0) - self.budget_bytes)

    @property
    def prediction_error(self) -> float | None:
        """Measured over predicted, less one: both are of bytes as they are asked for."""
        return None if self.measured_bytes is None else self.measured_bytes / self.predicted_bytes - 1

    @property
    def overhead(self) -> float | None:
        """Time of the planned step over that of the other, less one; of one step each, so with their noise."""
        return None if self.unplanned_seconds is None else self.planned_seconds / self.unplanned_seconds - 1

    def __str__(self) -> str:
        text = f"predicted peak {gb(self.predicted_bytes)}, {self._measured()}"
        if self.unplanned_seconds is None:
            return f"{text}step {self.planned_seconds:.3f} s; without a plan out of memory, so gradients not compared"
        without = "" if self.unplanned_bytes is None else f"without a plan {gb(self.unplanned_bytes)}; "
        return (
            f"{text}{without}gradients {'agree' if self.gradients_agree else 'DIFFER'} (largest relative difference "
            f"{self.gradient_error:.1e}{f', {self.cause}' if self.cause else ''}); "
            f"step {self.planned_seconds:.3f} s, without a plan {self.unplanned_seconds:.3f} s"
        )

    def _measured(self) -> str:
        budget = f"budget {gb(self.budget_bytes)}"
        if self.measured_bytes is None:
            return f"not measured (the device's allocator keeps no peak), {budget}; "
        held = "held" if self.within_budget else "EXCEEDED"
        reserved = "" if self.reserved_bytes is None else f", {gb(self.reserved_bytes)} with fragmentation"
        apart = ", without the loss that a loop computes: loss_fn= would tell it" if self.loss_left_out else ""
        return (
            f"measured {gb(self.measured_bytes)} ({self.prediction_error:+.2%}{apart}){reserved}, {budget} ({held}); "
        )
