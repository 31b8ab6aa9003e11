"""What the device's allocator shows of steps under a plan.

Of the first one: a log line, and a warning where the prediction is off. Of all others: a warning where more than the
budget was held at once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from planner.compat.autograd import when_backward_ends
from planner.core.call import tensors_in
from planner.core.objects import leaves
from planner.core.plan import PlanRecord
from planner.core.verification import FOUND
from planner.devices.accelerator import Accelerator, accelerator_of
from planner.errors import gb, warn
from planner.runtime.outputs import Unasking
from solvers import BRIEF

OFF = 0.03  # of the prediction: when to warn
LONG = 16  # calls, in which most loops are known

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


class Peaks:
    """Looks at the allocator of a model's device as calls by its plans begin.

    A plan counts what its step holds, and what the loop was seen to hold. What comes later or between the steps (an
    evaluation, another model, a list that grows) shows in the allocator's peak, which stays there: a look at the 1st,
    2nd, 4th, 8th, ... call is enough.

    Attributes:
        reported: whether the first step was reported.
    """

    def __init__(self, *, reported: bool = False) -> None:
        self.reported, self._warned = reported, False
        self._calls = self._earlier = 0

    def plan_made(self) -> None:
        """There is another plan: what was held until its first call is not its."""
        self._calls = 0

    def overdue(self, plan: PlanRecord) -> bool:
        """Whether the newest plan is one that was searched for briefly, and has served for long all the same."""
        return self._calls == LONG and plan.solver == BRIEF

    def call_begins(
        self, model: nn.Module, plan: PlanRecord, *, first: bool
    ) -> Callable[[Any, PlanRecord | None], None]:
        """A call by a plan begins; the function reports what it showed, given its result and the plan that it ran by.

        Args:
            model: that is called.
            plan: by which it is to run.
            first: whether it is the one to report.
        """
        self._calls += 1
        if not self._warned and not self._calls & (self._calls - 1):
            self._look(next(model.parameters()).device, plan)
        if not first:
            return lambda result, ran: None
        self.reported, before = True, _begin(model)
        return lambda result, ran: None if ran is None else _report_after(result, ran, before)

    def _look(self, device: torch.device, plan: PlanRecord) -> None:
        """Warn where more than the budget was held at once since the first call by the newest plan."""
        if (accelerator := accelerator_of(device)) is None:
            return
        most = accelerator.peak(device) or 0
        self._earlier = most if self._calls == 1 else min(self._earlier, most)  # the loop may have reset the peak
        if most > max(self._earlier, plan.budget_bytes):
            self._warned = True
            warn(
                f"tensors took {gb(most)} on {device} at once since the first step by this plan, which is to take "
                f"{gb(plan.peak_bytes)} of {gb(plan.budget_bytes)}: the process holds something else beside its "
                "steps, or takes more between them (an evaluation, another model, results that it keeps). "
                "account_gb={'what it is': GB} counts what is there during a step"
            )


def _begin(model: nn.Module) -> Before | None:
    """What to compare with after the step; None where there is nothing to measure."""
    device = next(model.parameters()).device
    accelerator = accelerator_of(device)
    if accelerator is None:
        return None
    accelerator.prepare(device)  # the plan counts the workspaces of libraries as resident
    return Before(accelerator, device, accelerator.allocated(device), accelerator.peak(device))


def _report_after(result: Any, plan: PlanRecord, before: Before | None) -> None:
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
