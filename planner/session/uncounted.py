"""Tensors that a plan does not count: warns where it leaves no room for them, gradients and what calls have saved."""

from __future__ import annotations

from torch import nn

from planner.compat.modules import modules_in, parameters_in
from planner.core.account import UNREDUCED
from planner.core.loop import Loop
from planner.core.occupancy import CLEARED_LATE
from planner.core.options import GB
from planner.core.plan import PlanRecord
from planner.costs.static_memory import storage_bytes, trained_bytes
from planner.devices.accelerator import present
from planner.devices.specs import free_memory
from planner.errors import gb, warn
from planner.parallel.sharded import unreduced_bytes


def adds_up(seen: Loop, model: nn.Module, budget_bytes: int) -> bool:
    """Whether a loop adds up the gradients of its calls, and the device has room for them beside the budget."""
    if seen.gradients != "accumulated":
        return False
    device = next(model.parameters()).device
    accelerator = present(device)
    free = free_memory() if accelerator is None else accelerator.available(device) + accelerator.allocated(device)
    return trained_bytes(model) + budget_bytes <= free


def _cleared_late(record: PlanRecord) -> bool:
    return record.step.occupancy == CLEARED_LATE or record.step.loop.gradients == "cleared late"


def gradients_warned(model: nn.Module, record: PlanRecord, begun: bool) -> bool:
    """Warn where `uncounted` finds gradients; whether it does."""
    held = uncounted(model, record, begun)
    if held:
        warn(
            f"{gb(held)} of gradients are there already, which this plan does not count: the step may take "
            f"{gb(most_held(record, begun) + held)} of {gb(record.budget_bytes)}. Plan with accumulate=True, or clear "
            "them with zero_grad(set_to_none=True)"
        )
    return bool(held)


def unreduced_warned(model: nn.Module, record: PlanRecord) -> bool:
    """Warn where `fully_shard` keeps gradients whole that a plan leaves no room for; whether it does."""
    late = unreduced_bytes(model) - record.account.get(UNREDUCED, 0)
    if not late or late <= record.budget_bytes - record.peak_bytes:
        return False
    warn(
        f"fully_shard keeps {gb(late)} of gradients whole until a later microbatch reduces them "
        f"(set_requires_gradient_sync(False)), which this plan does not count: the step may take "
        f"{gb(record.peak_bytes + late)} of {gb(record.budget_bytes)}. Count them with "
        f"account_gb={{{UNREDUCED!r}: {late / GB:.3g}}}, or plan without a batch: then the first step shows them"
    )
    return True


def waiting_warned(record: PlanRecord, waits: bool) -> bool:
    """Warn where an earlier call waits for its backward pass, which a plan leaves no room for; whether it does."""
    if not waits or record.options.in_flight > 1:
        return False
    kept = record.kept_bytes
    if kept <= record.budget_bytes - record.peak_bytes:
        return False
    warn(
        f"the model runs forward again before the backward pass of an earlier call, whose activations "
        f"({gb(kept)}) this plan does not count: the step may take {gb(record.peak_bytes + kept)} of "
        f"{gb(record.budget_bytes)}. Count them with in_flight=2, or as many as there are at once, "
        "or call backward() after each"
    )
    return True


def uncounted(model: nn.Module, record: PlanRecord, begun: bool) -> int:
    """Bytes of gradients that are there, that a plan does not count, and for which it leaves no room; else 0.

    Args:
        model: the model that trains by the plan.
        record: the plan.
        begun: whether to look for room in the backward pass, which begins, or before it, as in `most_held`.
    """
    if record.step.gradients_copied or (not begun and _cleared_late(record)):
        return 0
    held = storage_bytes(p.grad for p in parameters_in(modules_in(model)) if p.grad is not None)
    return held if held and held > record.budget_bytes - most_held(record, begun) else 0


def most_held(record: PlanRecord, begun: bool) -> int:
    """The peak of a step from the beginning of its backward pass on, or before it, in bytes."""
    return max(m.held_bytes for m in record.timeline if (m.phase in ("forward", "loss")) != begun)
