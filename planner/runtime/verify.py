"""One real step with a plan and one without, measured by torch's own allocator."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from planner.capture.trace.loss_trace import checked_loss, find_loss, leaves
from planner.capture.trace.state_guard import ModelSnapshot
from planner.compat.autograd import post_accumulate_hooks
from planner.core.call import here
from planner.devices.meter import record_allocations
from planner.errors import BatchError, gb
from planner.requests.request import arguments
from planner.runtime.interception import attached, call_signature, taken_off

if TYPE_CHECKING:
    from planner.core.plan import Plan

FOUND = "found by a real step"  # the line of the account for what a prediction missed


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
            f"{self.gradient_error:.1e}); "
            f"step {self.planned_seconds:.3f} s, without a plan {self.unplanned_seconds:.3f} s"
        )


def verify(plan: Plan, batch: Any = None, kwargs: Mapping[str, Any] | None = None) -> Verification:
    """Run the model for real, under the plan and without it; see `Plan.verify`.

    Raises:
        BatchError: no batch is known, or the model's output holds nothing to differentiate.
        torch.OutOfMemoryError: the planned step does not fit the device.
    """
    request = plan.request
    model = request.model
    args, extra = (
        (request.args, request.kwargs) if batch is None and kwargs is None else arguments(model, batch, kwargs)
    )
    if args is None:
        raise BatchError("verify() needs a batch: the plan was made without one")

    def step() -> None:
        outputs = []  # held to the end, as a training loop holds them
        losses = []
        for _ in range(request.in_flight):
            outputs.append(model(*args, **extra))
            losses.append(_loss(request.loss_fn, outputs[-1]))
        for loss in losses:
            loss.backward()  # type: ignore[no-untyped-call]

    with taken_off(model), _untouched(model, request.gradients_copied) as again:
        try:
            unplanned = _measure(model, step, again)
        except torch.OutOfMemoryError:
            unplanned = None
        plan.apply()
        runtime = attached(model)
        assert runtime is not None
        runtime.started = True  # it is not for other ranks
        try:
            planned = _measure(model, step, again)
            used: Any = runtime.plans[call_signature(model, args, extra)]
        finally:
            plan.remove()
    error, agree = (None, None) if unplanned is None else _compare(planned.gradients, unplanned.gradients)
    resident = used.resident_bytes - used.account.get(FOUND, 0)
    return Verification(
        predicted_bytes=max(m.held_bytes for m in used.timeline if m.phase != "optimizer"),
        measured_bytes=resident + planned.peak,
        unplanned_bytes=None if unplanned is None else resident + unplanned.peak,
        budget_bytes=plan.budget_bytes,
        gradient_error=error,
        gradients_agree=agree,
        planned_seconds=planned.seconds,
        unplanned_seconds=None if unplanned is None else unplanned.seconds,
    )


@dataclass(frozen=True, slots=True)
class _Measured:
    peak: int
    seconds: float
    gradients: dict[str, torch.Tensor]


def _loss(loss_fn: Callable[[Any], torch.Tensor] | None, output: Any) -> torch.Tensor:
    if loss_fn is not None:
        return checked_loss(loss_fn, output)
    if (loss := find_loss(output)) is not None:
        return loss
    parts = [t.mean() for t in leaves(output) if isinstance(t, torch.Tensor) and t.requires_grad]
    if not parts:
        raise BatchError("the model's output holds nothing that needs a gradient")
    return torch.stack(parts).sum()


def _measure(model: nn.Module, step: Callable[[], None], again: Callable[[], None]) -> _Measured:
    step()  # compiles, and warms caches
    again()
    device = next(model.parameters()).device
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds = time.perf_counter() - start
    again()
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        step()
        peak = torch.cuda.max_memory_allocated(device) - before
    else:
        peak = record_allocations(step).peak()
    # off the GPU: the next step has to fit beside them
    gradients = {name: here(p.grad).cpu() for name, p in model.named_parameters() if p.grad is not None}
    again()
    return _Measured(peak, seconds, gradients)


@contextmanager
def _untouched(model: nn.Module, accumulate: bool) -> Iterator[Callable[[], None]]:
    """Gives a function that puts gradients and the model's state back; leaves them as they were.

    Where gradients accumulate, each step begins with gradients of zero.
    """
    parameters = list(model.parameters())
    # an optimizer that steps in the backward pass must not
    hooks = [(h, dict(h)) for p in parameters if (h := post_accumulate_hooks(p))]
    gradients = [p.grad for p in parameters]
    state = ModelSnapshot(model)

    def again() -> None:
        for p in parameters:
            p.grad = torch.zeros_like(p) if accumulate and p.requires_grad else None
        state.restore()

    try:
        for table, _ in hooks:
            table.clear()
        again()
        yield again
    finally:
        again()
        for p, g in zip(parameters, gradients, strict=True):
            p.grad = g
        for table, saved in hooks:
            table.update(saved)


def _compare(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> tuple[float, bool]:
    worst, agree = 0.0, ours.keys() == theirs.keys()
    for name in ours.keys() & theirs.keys():
        a, b = ours[name], theirs[name]
        scale = max(b.abs().max().item(), torch.finfo(b.dtype).tiny) if b.numel() else 1.0
        error = 0.0 if torch.allclose(a, b, 0, 0, equal_nan=True) else (a - b).abs().max().item() / scale
        worst = max(worst, error)
        # rounding errors add up over a reduction; a wrong mask or a stale buffer is far above this
        agree &= error <= min(1e3 * torch.finfo(b.dtype).eps, 0.05)
    return worst, agree
