"""Per op: FLOPs by torch's own formulas, bytes moved, seconds by the roofline, workspace by running it once."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from ..capture.region import GraphOp, Region, map_nodes, tensors
from ..lowering import OpEstimate
from .device import Device
from .workspace import workspaces

_ATEN = torch.ops.aten
# attention kernels that torch.utils.flop_counter does not know, and one of the same arguments that it does
_SAME_FLOPS: dict[Any, Any] = {
    _ATEN._scaled_dot_product_flash_attention_for_cpu: _ATEN._scaled_dot_product_flash_attention,
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: _ATEN._scaled_dot_product_flash_attention_backward,
}


def estimate(
    regions: Sequence[Region], device: Device, *, measure_on: torch.device | None, progress: bool | None = None
) -> tuple[tuple[OpEstimate, ...], ...]:
    """Estimates for every op of every region.

    Args:
        regions: what was captured.
        device: the roofline.
        measure_on: the device to run each distinct op once on, for its workspace; None: not measured, taken as 0.
        progress: show a progress bar; None for only where a terminal is watching.
    """
    calls = [op.node for region in regions for op in region.ops if op.kind == "call"]
    spaces = workspaces(calls, measure_on, progress=progress) if measure_on is not None else {}
    return tuple(tuple(_estimate(op, device, spaces.get(op.node, 0)) for op in region.ops) for region in regions)


def _estimate(op: GraphOp, device: Device, workspace: int) -> OpEstimate:
    if op.kind == "rng_state":
        return OpEstimate(0.0, 0, 0)
    flops, moved = node_flops(op.node), bytes_moved(op.node)
    width = min((t.element_size() for t in tensors(op.node) if t.is_floating_point()), default=4)
    rate = device.flops.get(width, device.flops[4])
    return OpEstimate(max(flops / rate, moved / device.bandwidth) + device.launch, flops, workspace)


def node_flops(node: fx.Node) -> int:
    """FLOPs of one call, by `torch.utils.flop_counter`; 0 for ops that it does not count."""
    packet: Any = getattr(node.target, "overloadpacket", None)
    formula = flop_registry.get(_SAME_FLOPS.get(packet, packet))
    if formula is None:
        return 0
    args, kwargs = map_nodes((node.args, dict(node.kwargs)), lambda n: n.meta.get("val"))
    return int(formula(*args, **kwargs, out_val=node.meta.get("val")))


def bytes_moved(node: fx.Node) -> int:
    """Bytes read and written by one call: every tensor it takes and returns, once."""
    if node.target is operator.getitem:
        return 0
    return sum(t.numel() * t.element_size() for n in (node, *node.all_input_nodes) for t in tensors(n))
