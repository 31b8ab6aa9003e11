"""Sums of gradients in place, as autograd's engine adds them up: no third tensor beside the two that are added."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import fx

from planner.capture.joint_graph import fake_result, is_dense
from planner.capture.passes.checkpoints import clone_of
from planner.capture.passes.order import Order
from planner.capture.recomputability import is_collective
from planner.capture.shapes import SYMBOLIC
from planner.compat.ops import OpOverload
from planner.core.call import storages

_ADD, _ADD_IN_PLACE = torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor
Storages = Mapping[fx.Node, frozenset[int]]


def add_in_place(graph: fx.Graph, order: Order) -> None:
    """Let each sum of the backward pass write into a term that nothing reads afterwards. In place; O(nodes + edges).

    Addition commutes to the last bit, so that the term may be either one. It is a dense tensor that an op of the
    backward pass has made, laid out as the sum is, and of which the graph returns no view.

    Args:
        graph: a joint graph.
        order: its nodes as they are to run.
    """
    held_by = {node: frozenset(storages(node.meta.get("val"))) for node in graph.nodes}
    at = {node: i for i, node in enumerate(order.nodes)}
    last = _last_reads(graph, at, held_by)
    own = _made_in_backward(order, held_by)
    moved: set[fx.Node] = set()  # their results are in other storages now
    for node in graph.nodes:
        if any(n in moved and not held_by[n].isdisjoint(held_by[node]) for n in node.all_input_nodes):
            node.meta = {**node.meta, "val": fake_result(node)}  # a view
            moved.add(node)
        if node.target is not _ADD or node not in at or node in order.forward or clone_of(node) is not None:
            continue
        terms = [n for n in node.args if isinstance(n, fx.Node)]
        if len(terms) < 2 or node.kwargs or not held_by[terms[0]].isdisjoint(held_by[terms[1]]):
            continue
        for term, other in (terms, reversed(terms)):
            free = all(s in own and last[s] == at[node] for s in held_by[term])
            if free and _layout(term) == _layout(node) and is_dense(term.meta["val"]):
                node.target, node.args = _ADD_IN_PLACE, (term, other)
                node.meta = {**node.meta, "val": term.meta["val"]}
                moved.add(node)
                break


def add_apart(graph: fx.Graph) -> None:
    """Let each sum that `add_in_place` has written be a tensor of its own again. In place; O(nodes)."""
    for node in graph.find_nodes(op="call_function", target=_ADD_IN_PLACE):
        node.target = _ADD


def _last_reads(graph: fx.Graph, at: Mapping[fx.Node, int], held_by: Storages) -> dict[int, int]:
    """For each storage, the place of the last node that reads it; past all for one that the graph returns."""
    last: dict[int, int] = {}
    for node in graph.nodes:
        for read in node.all_input_nodes:
            for storage in held_by[read]:
                last[storage] = max(last.get(storage, 0), at.get(node, len(at)))
    return last


def _made_in_backward(order: Order, held_by: Storages) -> Collection[int]:
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
