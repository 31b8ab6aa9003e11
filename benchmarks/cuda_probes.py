"""What only a device can tell: the constants that plans take from data sheets, and the times of ops."""

from __future__ import annotations

import time
from typing import Any

import torch

from planner import plan
from planner.devices.accelerator import accelerator_of
from planner.devices.find import find_device
from planner.offload.pinned import measured_rates

from .cuda_models import Work

ROOM_TO_SPARE_GB = 65536.0


def constants(device: torch.device) -> dict[str, Any]:
    """Bytes outside the allocator, of workspaces that stay, of those that products bring; beside the profile's."""
    accelerator = accelerator_of(device)
    if accelerator is None:
        return {"note": "no accelerator: nothing to ask"}
    profile = find_device(None, device)
    accelerator.prepare(device)
    free, total = torch.cuda.mem_get_info(device)
    held = accelerator.workspaces(device)
    x = torch.ones(1024, 1024, device=device)
    accelerator.reset_peak(device)
    before = accelerator.allocated(device)
    y = x @ x
    accelerator.synchronize(device)
    brought = (accelerator.peak(device) or 0) - before - y.nbytes
    return {
        "context_bytes": total - free - torch.cuda.memory_reserved(device),
        "context_of_the_profile_bytes": profile.context,
        "workspaces_held_bytes": held,
        "workspaces_of_the_rule_bytes": profile.blas,
        "workspace_of_a_product_bytes": brought,
        "workspace_of_a_product_by_the_rule_bytes": profile.product,
        "link_gb_per_second": _copied(device),
        "link_of_the_profile": profile.link / 1e9,
        "link_of_offload": dict(zip(("out", "back", "share while both copy"), measured_rates(device), strict=True)),
        "capability": ".".join(map(str, profile.capability)),
    }


def _copied(device: torch.device, nbytes: int = 2**28) -> float:
    """GB per second from pinned host memory."""
    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(nbytes, dtype=torch.uint8, device=device)
    there.copy_(host)
    torch.cuda.synchronize(device)
    start = time.perf_counter()
    there.copy_(host, non_blocking=True)
    torch.cuda.synchronize(device)
    return nbytes / (time.perf_counter() - start) / 1e9


def costs(work: Work) -> dict[str, float]:
    """Seconds of a step that recomputes nothing: by the roofline, by measured ops, and of a real step."""
    found = {}
    with work.casting():
        for source in ("roofline", "measured"):
            p = plan(
                work.model, work.batch, budget_gb=ROOM_TO_SPARE_GB, loss_fn=work.loss_fn, costs=source, progress=False
            )
            found[f"{source}_seconds"] = p.step_seconds
    device = next(work.model.parameters()).device
    accelerator = accelerator_of(device)
    times = []
    for _ in range(4):
        work.model.zero_grad(set_to_none=True)
        start = time.perf_counter()
        work.step()
        if accelerator is not None:
            accelerator.synchronize(device)
        times.append(time.perf_counter() - start)
    return {**found, "step_seconds": min(times[1:])}
