"""Per op: FLOPs by torch's own formulas, bytes moved, seconds by the roofline, workspace by running it once."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from ..capture.call import Call, describe_call
from ..capture.dropout import drawn_by
from ..capture.region import GraphOp, Region, map_nodes, tensors
from ..capture.safety import is_random, rng_state_bytes
from .device import Device
from .workspace import Allocated, measure

_ATEN = torch.ops.aten
# attention kernels that torch.utils.flop_counter does not know, and one of the same arguments that it does
_SAME_FLOPS: dict[Any, Any] = {
    _ATEN._scaled_dot_product_flash_attention_for_cpu: _ATEN._scaled_dot_product_flash_attention,
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: _ATEN._scaled_dot_product_flash_attention_backward,
}


@dataclass(frozen=True, slots=True)
class OpEstimate:
    """What one op costs.

    Attributes:
        seconds: time of one run.
        flops: of one run.
        workspace: bytes held only while it runs.
        excess: bytes that its results hold beyond the sizes of their storages in the graph.
    """

    seconds: float
    flops: int
    workspace: int
    excess: int = 0


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
    found: dict[fx.Node, Allocated] = {}
    if measure_on is not None:
        calls = {op.node: call_of(op.node) for region in regions for op in region.ops if _measurable(op)}
        allocated = measure(calls.values(), measure_on, progress=progress)
        found = {node: allocated[call.key] for node, call in calls.items()}
    return tuple(_share_dropouts(region, [_estimate(op, device, found) for op in region.ops]) for region in regions)


def _share_dropouts(region: Region, estimates: list[OpEstimate]) -> tuple[OpEstimate, ...]:
    """Take the scaling off a drawing op's time: where the mask is drawn, its result comes with it."""
    at = {op.node: i for i, op in enumerate(region.ops) if op.kind == "call"}
    for scaled, i in at.items():
        draw = drawn_by(scaled)
        if draw is not None:
            alone = max(0.0, estimates[at[draw]].seconds - estimates[i].seconds)
            estimates[at[draw]] = replace(estimates[at[draw]], seconds=alone)
    return tuple(estimates)


def _measurable(op: GraphOp) -> bool:
    return op.kind == "call" and isinstance(op.node.target, torch._ops.OpOverload)


def call_of(node: fx.Node) -> Call:
    """The call that a node makes, by its fake tensors."""
    args, kwargs = map_nodes((node.args, dict(node.kwargs)), lambda n: n.meta.get("val"))
    target: Any = node.target
    return describe_call(target, args, kwargs, node.meta.get("val"))


def _estimate(op: GraphOp, device: Device, found: Mapping[fx.Node, Allocated]) -> OpEstimate:
    if op.kind == "rng_state":
        return OpEstimate(0.0, 0, 0, 0)
    flops, moved = node_flops(op.node), bytes_moved(op.node)
    width = min((t.element_size() for t in tensors(op.node) if t.is_floating_point()), default=4)
    drawn = sum(t.numel() for t in tensors(op.node)) / device.draws if is_random(op.node) else 0.0
    seconds = max(flops / device.flops.get(width, device.flops[4]), moved / device.bandwidth, drawn) + device.launch
    allocated = found.get(op.node, Allocated(0, 0))
    # replaying a random op saves the generator's present state beside the one it runs under
    return OpEstimate(seconds, flops, allocated.workspace + rng_state_bytes(op.node), allocated.excess)


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
