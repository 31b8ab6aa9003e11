"""Gradients in place, as autograd makes them: no third tensor beside the two that are added, no copy of zeros."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import fx

from planner.capture.joint_graph import fake_result
from planner.capture.passes.checkpoints import clone_of
from planner.capture.passes.order import Order
from planner.capture.recomputability import is_collective
from planner.capture.shapes import SYMBOLIC
from planner.compat.ops import OpOverload
from planner.core.call import storages
from planner.core.layout import is_dense

_ATEN = torch.ops.aten
_ADD = _ATEN.add.Tensor
# ops that copy their first argument and write into the copy, and what writes into the argument itself
_IN_PLACE: dict[object, OpOverload] = {
    _ADD: _ATEN.add_.Tensor,
    _ATEN.index_add.default: _ATEN.index_add_.default,
    _ATEN.index_put.default: _ATEN.index_put_.default,
    _ATEN.masked_scatter.default: _ATEN.masked_scatter_.default,
    _ATEN.scatter.src: _ATEN.scatter_.src,
    _ATEN.scatter_add.default: _ATEN.scatter_add_.default,
}
_APART = {in_place: op for op, in_place in _IN_PLACE.items()}
Storages = Mapping[fx.Node, frozenset[int]]


def add_in_place(graph: fx.Graph, order: Order) -> None:
    """Let ops of the backward pass write into an argument that nothing reads afterwards. In place; O(nodes + edges).

    Such an op is a sum (addition commutes to the last bit, so that the term may be either one), or one that puts
    gradients into zeros. The argument is a dense tensor that an op of the backward pass has made, laid out as the
    result is, and of which the graph returns no view.

    Args:
        graph: a joint graph.
        order: its nodes as they are to run.
    """
    held_by = {node: frozenset(storages(node.meta.get("val"))) for node in graph.nodes}
    at = {node: i for i, node in enumerate(order.nodes)}
    last = _last_reads(graph, at, held_by)
    own = made_in_backward(order, held_by)
    moved: set[fx.Node] = set()  # their results are in other storages now
    for node in graph.nodes:
        if any(n in moved and not held_by[n].isdisjoint(held_by[node]) for n in node.all_input_nodes):
            node.meta = {**node.meta, "val": fake_result(node)}  # a view
            moved.add(node)
        if node.target not in _IN_PLACE or node not in at or node in order.forward or clone_of(node) is not None:
            continue
        for term, *others in _ways_round(node):
            shared = held_by[term].intersection(*(held_by[n] for n in node.all_input_nodes if n is not term))
            free = not shared and all(s in own and last[s] == at[node] for s in held_by[term])
            if free and _layout(term) == _layout(node) and is_dense(term.meta["val"]):
                node.target, node.args = _IN_PLACE[node.target], (term, *others)
                node.meta = {**node.meta, "val": term.meta["val"]}
                moved.add(node)
                break


def _ways_round(node: fx.Node) -> list[tuple[Any, ...]]:
    """The arguments of an op that may write into the first; none where it is no tensor."""
    ways = [node.args, node.args[::-1]] if node.target is _ADD and len(node.args) == 2 else [node.args]
    if node.target is _ADD and (node.kwargs or len(node.all_input_nodes) < 2):
        return []
    return [way for way in ways if isinstance(way[0], fx.Node)]


def add_apart(graph: fx.Graph) -> None:
    """Let each result that `add_in_place` has written be a tensor of its own again. In place; O(nodes)."""
    for in_place, op in _APART.items():
        for node in graph.find_nodes(op="call_function", target=in_place):
            node.target = op


def _last_reads(graph: fx.Graph, at: Mapping[fx.Node, int], held_by: Storages) -> dict[int, int]:
    """For each storage, the place of the last node that reads it; past all for one that the graph returns."""
    last: dict[int, int] = {}
    for node in graph.nodes:
        for read in node.all_input_nodes:
            for storage in held_by[read]:
                last[storage] = max(last.get(storage, 0), at.get(node, len(at)))
    return last


def made_in_backward(order: Order, held_by: Storages) -> Collection[int]:
    """Storages that torch's own ops allocate in the backward pass; what other processes send or are sent is not."""
    made: set[int] = set()
    others: set[int] = set()
    for node in order.nodes:
        plain = isinstance(node.target, OpOverload) and node.target.namespace in ("aten", "prims")
        made |= held_by[node].difference(*(held_by[n] for n in node.all_input_nodes))
        if node in order.forward or (isinstance(node.target, OpOverload) and not plain) or is_collective(node.target):
            others |= held_by[node].union(*(held_by[n] for n in node.all_input_nodes))
    return made - others


def _layout(node: fx.Node) -> tuple[object, ...]:
    t = node.meta.get(SYMBOLIC, node.meta["val"])
    return t.dtype, t.device, tuple(map(str, t.shape)), tuple(map(str, t.stride()))
