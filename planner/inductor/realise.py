"""A joint graph of Inductor's, coarsened: values are what it realises, ops the cones of nodes that it fuses into each.

A node that is not realised is part of every op that reads it: its results exist in no memory. What a schedule runs are
these ops; `expanded` says which nodes that are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from planner.capture.joint_graph import ancestors, nodes_in, signature_of, tensors
from planner.capture.passes.order import execution_order, tagged_forward
from planner.capture.recomputability import is_random
from planner.capture.regions.region import GraphOp, GraphValue, Region, analyse
from planner.compat.ops import OpOverload
from planner.costs.ops import OpEstimate, bytes_moved, node_flops, roofline_seconds
from planner.devices.specs import Device

_ATEN, _PRIMS = torch.ops.aten, torch.ops.prims
# these compute each element by itself, and are not tagged as such
_POINTWISE = {
    _ATEN.full.default,
    _ATEN.full_like.default,
    _ATEN.scalar_tensor.default,
    _ATEN.constant_pad_nd.default,
    _ATEN.cat.default,
    _ATEN.embedding.default,
    _ATEN.index.Tensor,
    _ATEN.gather.default,
    _PRIMS.iota.default,
    _PRIMS.convert_element_type.default,
}
DRAWS = "it draws random numbers, which Inductor draws once"


@dataclass(frozen=True)
class Fused:
    """A region whose ops are those of its fused kernels, as far as a schedule decides about them.

    Attributes:
        fine: the region, one op for each node that makes a storage.
        coarse: the same with the fused ops and the realised values alone.
        cones: for each coarse op, the ops of `fine` that it runs, in their order; its own is the last.
    """

    fine: Region
    coarse: Region
    cones: tuple[tuple[int, ...], ...]

    def expanded(self, steps: Iterable[int]) -> list[int]:
        """The ops of `fine` that these coarse ops run."""
        return [i for step in steps for i in self.cones[step]]

    @property
    def realised(self) -> tuple[int, ...]:
        """The ops of `fine` whose results exist in memory."""
        return tuple(cone[-1] for cone in self.cones)


def read(joint: fx.GraphModule, num_fwd_outputs: int) -> Region:
    """Inductor's joint graph as ops on storages, in the order in which they are to run; nothing is drawn again.

    Args:
        joint: the graph after Inductor's passes; what nothing reads is taken out of it.
        num_fwd_outputs: how many of its outputs the forward pass returns.
    """
    graph = joint.graph
    graph.eliminate_dead_code()
    signature = signature_of(graph, num_fwd_outputs)
    tagged = tagged_forward(graph)
    drawn = [n for n in graph.nodes if is_random(n) and n in tagged]
    forward = ancestors([*nodes_in(signature.fwd_outputs), *drawn])
    order = execution_order(graph, forward, ancestors(nodes_in(signature.grads)))
    region = analyse(joint, num_fwd_outputs, order)
    states = {v for op in region.ops if op.kind == "rng_state" for v in op.writes}
    ops, before = [], 0
    for i, op in enumerate(region.ops):
        if op.kind == "rng_state":
            continue
        if is_random(op.node) or not states.isdisjoint(op.reads):
            op = replace(op, keep_because=op.keep_because or DRAWS, reads=tuple(v for v in op.reads if v not in states))
        ops.append(op)
        before += i < region.boundary
    return replace(region, ops=tuple(ops), boundary=before)


def realised_ops(region: Region, named: Collection[str]) -> tuple[int, ...]:
    """The ops of a region whose results exist in memory.

    Args:
        region: as `read` returns it.
        named: names of nodes whose results, or views of them, Inductor realises where it partitions the graph itself.
    """
    there = {v for outputs in (region.fwd_outputs, region.grads) for v in region.values_in(outputs)}
    there.update(region.values_in(n for n in region.joint.graph.nodes if n.name in named))
    return tuple(
        i
        for i, op in enumerate(region.ops)
        if op.keep_because or not _is_pointwise(op.node) or not there.isdisjoint(op.writes)
    )


def _is_pointwise(node: fx.Node) -> bool:
    target = node.target
    return isinstance(target, OpOverload) and (torch.Tag.pointwise in target.tags or target in _POINTWISE)


def fuse(region: Region, realised: Sequence[int]) -> Fused:
    """The region with the ops of these numbers alone, each with what is fused into it. O(nodes in all cones)."""
    kept, writer = set(realised), {v: i for i, op in enumerate(region.ops) for v in op.writes}
    cones: list[tuple[int, ...]] = []
    ops: list[GraphOp] = []
    number = _numbers(region, kept)
    for i in realised:
        cone, reads, takes = {i}, dict[int, None](), dict[int, None]()
        stack = [i]
        while stack:
            op = region.ops[stack.pop()]
            takes.update(dict.fromkeys(op.takes))
            for v in op.reads:
                at = writer.get(v)
                if at is None or at in kept:
                    reads[number[v]] = None
                elif at not in cone:
                    cone.add(at)
                    stack.append(at)
        own = region.ops[i]
        writes = tuple(number[v] for v in own.writes)
        ops.append(GraphOp(own.node, "call", tuple(sorted(reads)), writes, own.keep_because, tuple(takes)))
        cones.append(tuple(sorted(cone)))
    values = [GraphValue(region.values[v].owner, region.values[v].nbytes) for v in number]
    held = {n: tuple(number[v] for v in of if v in number) for n, of in region.value_of.items()}
    before = sum(i < region.boundary for i in realised)
    coarse = replace(region, ops=tuple(ops), boundary=before, values=tuple(values), value_of=held)
    return Fused(region, coarse, tuple(cones))


def _numbers(region: Region, realised: Collection[int]) -> Mapping[int, int]:
    """For each value that is realised or comes in, its number among these."""
    there = {v for i in realised for v in region.ops[i].writes}.union(region.values_in(region.tangents))
    return {v: n for n, v in enumerate(sorted(there))}


def costs_of(fused: Fused, device: Device, workspaces: Mapping[str, int]) -> tuple[OpEstimate, ...]:
    """What each coarse op takes: the longest of computing and moving the bytes that it reads and makes, and a launch.

    Args:
        fused: the region.
        device: whose rates.
        workspaces: of the nodes that are no kernels of Inductor's own, by name: bytes.
    """
    nodes = [op.node for op in fused.fine.ops]
    sizes = [v.nbytes for v in fused.coarse.values]
    primals = [sum(t.nbytes for t in tensors(n)) for n in fused.coarse.primals]
    found = []
    for op, cone in zip(fused.coarse.ops, fused.cones, strict=True):
        moved = sum(sizes[v] for v in (*op.reads, *op.writes)) + sum(primals[at] for at in op.takes)
        flops = sum(node_flops(nodes[i]) for i in cone)
        seconds = max((roofline_seconds(nodes[i], device) for i in cone if node_flops(nodes[i])), default=0.0)
        moving = min(moved, bytes_moved(op.node)) if len(cone) == 1 else moved
        seconds = max(seconds, moving / device.bandwidth + device.launch)
        found.append(OpEstimate(seconds, flops, workspaces.get(op.node.name, 0)))
    return tuple(found)
