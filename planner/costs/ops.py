"""Per op: FLOPs by torch's own formulas, bytes moved, seconds and workspace by formula or by running it."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from planner.capture.joint_graph import map_nodes, tensors
from planner.capture.passes.dropout import drawn_by, is_noise
from planner.capture.recomputability import crosses_the_link, is_collective, is_random, replay_bytes
from planner.capture.regions.region import Region
from planner.compat.ops import OpOverload, schema_of
from planner.compat.tensors import storage_key
from planner.core.call import Call, describe_call, tensors_in
from planner.costs.measure_op import Allocated
from planner.costs.measured_ops import measure
from planner.costs.pieces import cost_in_pieces, pieces_of
from planner.costs.predicted_workspace import predicted_workspace
from planner.devices.specs import Device

_ATEN = torch.ops.aten
# attention kernels that torch.utils.flop_counter does not know, and one of the same arguments that it does
_SAME_FLOPS: dict[Any, Any] = {
    _ATEN._scaled_dot_product_flash_attention_for_cpu: _ATEN._scaled_dot_product_flash_attention,
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: _ATEN._scaled_dot_product_flash_attention_backward,
}
# FLOPs for each element of the weights and each row of the sequence, time and batch
_LSTMS: dict[Any, int] = {_ATEN.mkldnn_rnn_layer: 2, _ATEN.mkldnn_rnn_layer_backward: 4}
_TAKES_ZEROS = {_ATEN.mkldnn_rnn_layer_backward.default}
CONVOLUTIONS = {_ATEN.convolution.default, _ATEN.convolution_backward.default}


@dataclass(frozen=True, slots=True)
class OpEstimate:
    """The costs of one op.

    Attributes:
        seconds: time of one run.
        flops: of one run.
        workspace: bytes live only while it runs.
        excess: bytes of its results beyond the sizes of their storages in the graph.
    """

    seconds: float
    flops: int
    workspace: int
    excess: int = 0


def estimate(
    regions: Sequence[Region],
    device: Device,
    *,
    measure_on: torch.device | None,
    timed: bool = False,
    progress: bool | None = None,
) -> tuple[tuple[OpEstimate, ...], ...]:
    """Estimates for every op of every region.

    Args:
        regions: of the captured step.
        device: the roofline.
        measure_on: the device to run each distinct op once on, for its workspace; None: not measured, taken as
            `predicted_workspace` on CUDA and as 0 elsewhere.
        timed: take seconds from runs there too. Ops that could not be run take their roofline's, scaled by the median
            ratio of measured seconds to the roofline's.
        progress: show a progress bar; None for only where a terminal is watching.
    """
    nodes = [op.node for region in regions for op in region.ops if op.kind == "call"]
    of = estimate_nodes(nodes, device, measure_on=measure_on, timed=timed, progress=progress)
    state = OpEstimate(0.0, 0, 0, 0)
    return tuple(
        _share_dropouts(region, [of[op.node] if op.kind == "call" else state for op in region.ops])
        for region in regions
    )


def estimate_nodes(
    nodes: Sequence[fx.Node],
    device: Device,
    *,
    measure_on: torch.device | None,
    timed: bool = False,
    progress: bool | None = None,
) -> dict[fx.Node, OpEstimate]:
    """Estimates for nodes that call ops, each on its own; arguments as for `estimate()`."""
    inside = {node: runs for node in nodes if (runs := pieces_of(node))}
    if inside:
        in_them = [op.node for runs in inside.values() for region, _ in runs for op in region.ops]
        whole = [*(node for node in nodes if node not in inside), *in_them]
        of = estimate_nodes(whole, device, measure_on=measure_on, timed=timed, progress=progress)
        granularity = 512 if device.caches else 1
        for node, runs in inside.items():
            of[node] = OpEstimate(*cost_in_pieces(runs, of, granularity))
        return of
    measured: dict[fx.Node, Allocated] = {}
    if measure_on is not None:
        calls = {node: call_of(node) for node in nodes if _measurable(node)}
        allocated = measure(calls.values(), measure_on, timed=timed, progress=progress)
        measured = {node: allocated[call.key] for node, call in calls.items() if call.key in allocated}
    ratios = [m.seconds / roofline_seconds(node, device) for node, m in measured.items() if m.seconds is not None]
    scale = median(ratios) if ratios else 1.0
    return {node: _estimate(node, device, measured.get(node), scale) for node in nodes}


def _share_dropouts(region: Region, estimates: list[OpEstimate]) -> tuple[OpEstimate, ...]:
    """Take the scaling off a drawing op's time: where the mask is drawn, its result comes with it."""
    at = {op.node.name: i for i, op in enumerate(region.ops) if op.kind == "call"}
    for i, op in enumerate(region.ops):
        if (name := drawn_by(op.node)) is not None:
            draw = estimates[at[name]]
            estimates[at[name]] = replace(draw, seconds=max(0.0, draw.seconds - estimates[i].seconds))
    return tuple(estimates)


def _measurable(node: fx.Node) -> bool:
    """Whether an op may run alone on arbitrary numbers: an op that checks them on a GPU would end the process.

    Sparse tensors have no storage of their own that could be made alike.
    """
    target = node.target
    if not isinstance(target, OpOverload) or is_collective(target):
        return False
    if any(t.layout != torch.strided for each in node.all_input_nodes for t in tensors_in(each.meta.get("val"))):
        return False
    return bool(schema_of(target).returns) and not reads_workspace(node) and not crosses_the_link(node)


def reads_workspace(node: fx.Node) -> bool:
    """Whether an op reads the bytes that its forward op left for it: arbitrary ones would end the process.

    oneDNN's LSTM takes zeros, where their size is known, and so do kernels of batch normalisation.
    """
    target: Any = node.target
    if target is _ATEN.batch_norm_backward.default:
        return False
    names = [a.name for a in schema_of(target).arguments]
    left = [x for name, x in zip(names, node.args, strict=False) if name in ("workspace", "reserve")]
    sizes = [t.nbytes for x in left if isinstance(x, fx.Node) for t in tensors(x)]
    return bool(left) and not (target in _TAKES_ZEROS and sizes and all(sizes))


def call_of(node: fx.Node) -> Call:
    """The call that a node makes, by its fake tensors."""
    args, kwargs = map_nodes((node.args, dict(node.kwargs)), lambda n: n.meta.get("val"))
    target: Any = node.target
    if is_noise(node):  # scaled in place, after a copy in its dtype
        target, args, kwargs = torch.ops.aten._to_copy.default, args[:1], {"dtype": node.meta["val"].dtype}
    names = [a.name for a in schema_of(target).arguments]
    if "philox_seed" in names and "dropout_p" in names:
        # attention's backward pass reads the seed on the host, where fake tensors put it on the GPU: without dropout
        # it reads none, and holds as much
        args = tuple(0.0 if name == "dropout_p" else a for name, a in zip(names, args, strict=False))
    return describe_call(target, args, kwargs, node.meta.get("val"))


def _estimate(node: fx.Node, device: Device, measured: Allocated | None, scale: float) -> OpEstimate:
    if measured is None:
        measured = Allocated(predicted_workspace(node, device) if device.type == "cuda" else 0, 0)
    flops = node_flops(node)
    seconds = scale * roofline_seconds(node, device, flops) if measured.seconds is None else measured.seconds
    workspace = measured.workspace + replay_bytes(node)[1] + _copied_state(node)
    return OpEstimate(seconds, flops, workspace, measured.excess)


def _copied_state(node: fx.Node) -> int:
    """Bytes of the copy that oneDNN's LSTM makes in its backward pass where one tensor of zeros is both of its states:
    it was measured with two.
    """
    if node.target not in _TAKES_ZEROS:
        return 0
    hidden, cell = (t for n in node.args[5:7] if isinstance(n, fx.Node) for t in tensors(n))
    return cell.nbytes if storage_key(hidden) == storage_key(cell) else 0


def roofline_seconds(node: fx.Node, device: Device, flops: int | None = None) -> float:
    """The longest of computing, moving bytes and drawing random numbers, and the launch; `flops` are its, if known."""
    drawn = sum(t.numel() for t in tensors(node)) / device.draws if is_random(node) else 0.0
    copied = sum(t.nbytes for t in tensors(node)) / device.link if crosses_the_link(node) else 0.0
    moved = bytes_moved(node) / device.bandwidth
    flops = node_flops(node) if flops is None else flops
    return max(flops / _rate(node, device) if flops else 0.0, moved, drawn, copied) + device.launch


def _rate(node: fx.Node, device: Device) -> float:
    """FLOPs per second in the narrowest floating-point dtype that a node returns."""
    dtypes = {t.dtype for t in tensors(node) if t.is_floating_point()}
    narrowest = min(dtypes, key=lambda d: d.itemsize, default=torch.float32)
    if narrowest is torch.float32:
        backends: Any = torch.backends
        library = backends.cudnn.conv if node.target in CONVOLUTIONS else backends.cuda.matmul
        if library.fp32_precision == "tf32":
            return device.tf32
    return device.flops.get(narrowest, device.flops[torch.float32])


def node_flops(node: fx.Node) -> int:
    """FLOPs of one call, by `torch.utils.flop_counter`, and of oneDNN's LSTMs; 0 for others."""
    packet: Any = getattr(node.target, "overloadpacket", None)
    if packet in _LSTMS:
        sequence, *weights = (t for n in node.all_input_nodes[:3] for t in tensors(n))
        return _LSTMS[packet] * math.prod(sequence.shape[:2]) * sum(w.numel() for w in weights)
    formula = flop_registry.get(_SAME_FLOPS.get(packet, packet))
    if formula is None:
        return 0
    args, kwargs = map_nodes((node.args, dict(node.kwargs)), lambda n: n.meta.get("val"))
    return int(formula(*_every_head(node, args), **kwargs, out_val=node.meta.get("val")))


def _every_head(node: fx.Node, args: Sequence[Any]) -> list[Any]:
    """Arguments of attention with the keys and values of grouped queries as wide as the kernel multiplies them.

    The formulas of torch 2.11 refuse fewer heads than queries have.
    """
    op: Any = node.target
    named = {a.name: value for a, value in zip(schema_of(op).arguments, args, strict=False)}
    query, key = named.get("query"), named.get("key")
    if not (isinstance(query, torch.Tensor) and isinstance(key, torch.Tensor) and query.dim() == key.dim() == 4):
        return list(args)
    for name in ("key", "value"):
        named[name] = named[name][:, :1].expand(-1, query.shape[1], -1, -1)
    return list(named.values())


def bytes_moved(node: fx.Node) -> int:
    """Bytes read and written by one call: every tensor it takes and returns, once."""
    if node.target is operator.getitem:
        return 0
    return sum(t.numel() * t.element_size() for n in (node, *node.all_input_nodes) for t in tensors(n))
