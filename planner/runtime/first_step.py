"""What the first training step under a plan showed: one log line, and a warning where the prediction is off."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from planner.capture.trace.loss_trace import leaves
from planner.compat.autograd import when_backward_ends
from planner.core.call import tensors_in
from planner.core.plan import PlanRecord
from planner.core.verification import FOUND
from planner.devices.accelerator import Accelerator, accelerator_of
from planner.errors import gb, warn
from planner.runtime.outputs import Unasking

OFF = 0.03  # of the prediction: when to warn

log = logging.getLogger("planner")


@dataclass(frozen=True, slots=True)
class Before:
    """What the device's allocator had when a step began, in bytes: of all tensors, and the most since a reset; both as
    they were asked for. None for the most where it keeps no peak.
    """

    accelerator: Accelerator
    device: torch.device
    held: int
    most: int | None


def begin(model: nn.Module) -> Before | None:
    """What to compare with after the step; None where there is nothing to measure."""
    device = next(model.parameters()).device
    accelerator = accelerator_of(device)
    if accelerator is None:
        return None
    accelerator.prepare(device)  # the plan counts the workspaces of libraries as resident
    return Before(accelerator, device, accelerator.allocated(device), accelerator.peak(device))


def report_after(result: Any, plan: PlanRecord, before: Before | None) -> None:
    """Report at the end of the backward pass of a call's result; nothing where it has none."""

    def ended() -> None:
        report(plan, measured(plan, before))

    when_begun(result, lambda: when_backward_ends(ended))


def when_begun(result: Any, then: Callable[[], object]) -> None:
    """Call a function once, when the backward pass of a call's result begins."""
    outputs = [t for t in tensors_in(leaves(result)) if t.requires_grad]
    handles: list[Any] = []

    def began(_: torch.Tensor) -> None:
        if handles:
            for handle in handles:
                handle.remove()
            handles.clear()
            then()

    handles += [t.register_hook(Unasking(began)) for t in outputs]  # type: ignore[no-untyped-call]


def measured(plan: PlanRecord, before: Before | None) -> int | None:
    """Bytes of the step's peak, as the plan counts them; None where an earlier, higher peak hides it."""
    # what waits, and gradients that were used, were there before
    if before is None or before.most is None or plan.options.in_flight > 1 or plan.step.occupancy is not None:
        return None

    most = before.accelerator.peak(before.device) or 0
    resident = int(plan.resident_bytes) - plan.account.get(FOUND, 0)
    return resident + most - before.held if most > before.most else None


def report(plan: PlanRecord, found: int | None) -> None:
    """The log line, and the warning.

    Args:
        plan: what ran.
        found: the measured peak of the step up to the end of its backward pass, in bytes; None where it is not known.
    """
    predicted = plan.passes_peak_bytes
    of = f"of a budget of {gb(plan.budget_bytes)}, {plan.overhead:.1%} more time, estimated"
    if plan.options.progress is not False:
        seen = "not measured" if found is None else f"{gb(found)} measured ({found / predicted - 1:+.1%})"
        log.info("first step: peak to the end of the backward pass %s predicted, %s; %s", gb(predicted), seen, of)
    off = 0.0 if found is None else found / predicted - 1
    if abs(off) <= OFF or (off < 0 and plan.step.maxima is not None):  # it may be a smaller batch
        return
    advice = (
        "plan.repair() plans again with the difference taken off, and apply(verify=True) does so before the first "
        "step; account_gb={'what it is': GB} counts what the plan does not know of"
        if off > 0
        else "the plan recomputes more than it has to: a larger budget_gb costs less time"
    )
    warn(f"the first step's peak was {gb(found or 0)}, {off:+.1%} from the {gb(predicted)} predicted {of}. {advice}")
