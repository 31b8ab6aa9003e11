"""The values of a region that may leave the device for a while."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import fx

from planner.capture.joint_graph import may_write, nodes_in, tensors
from planner.capture.recomputability import is_collective
from planner.capture.regions.region import Region
from planner.compat.dispatch import written
from planner.compat.ops import OpOverload
from planner.core.layout import elements_spanned


def movable(region: Region) -> frozenset[int]:
    """The values of which nothing but the region's own ops can hold or write a copy. O(nodes + edges).

    Results of the region are not among them, which the caller holds, nor gradients that go out, nor what an op writes
    into or processes send each other, nor a value of which a tensor is neither its owner nor a view that is derived
    from the owner.
    """
    held = set(region.values_in((*region.fwd_outputs, *region.grads)))
    holders: dict[int, list[fx.Node]] = defaultdict(list)
    for node, values in region.value_of.items():
        for v in values:
            holders[v].append(node)
        if is_collective(node.target) or may_write(node):
            held.update(values)
            held.update(v for n in _touched(node) for v in region.value_of[n])
    made = {v for op in region.ops if op.kind == "call" for v in op.writes}
    return frozenset(v for v in made - held if _is_whole(region, v, holders[v]))


def _touched(node: fx.Node) -> Sequence[fx.Node]:
    """What a node writes into, or sends as a collective; all that it is given where that is unknown."""
    if is_collective(node.target) or not isinstance(node.target, OpOverload):
        return node.all_input_nodes
    return list(nodes_in(written(node.target, node.args, node.kwargs)))


def _is_whole(region: Region, value: int, holders: list[fx.Node]) -> bool:
    """Whether one plain tensor is all of a value, and every other tensor of it a view of that one."""
    owner, nbytes = region.values[value].owner, region.values[value].nbytes
    found = list(tensors(owner))
    if owner not in holders or not isinstance(owner.meta.get("val"), torch.Tensor) or not nbytes:
        return False
    if found[0].layout != torch.strided or found[0].storage_offset():
        return False
    if elements_spanned(found[0].shape, found[0].stride()) * found[0].element_size() != nbytes:
        return False
    parent = owner.args[0] if owner.target is operator.getitem else None
    derived: set[fx.Node] = set()
    for node in holders:  # in the order of the graph
        if node is parent:  # a tuple, of which the owner is taken out
            continue
        if node is not owner and derived.isdisjoint(node.all_input_nodes):
            return False
        derived.add(node)
    return True
