"""Common-subexpression elimination: of two equal values, the first is read again where it is live anyway.

Models compute the same mask in every layer, and the same contiguous or cast copy of one input for query, key and value.
A copy that nothing writes into is its original: torch.compile captures one for dropout at rate 0. Other than in
`torch._functorch.compile_utils.fx_graph_cse`, no live range becomes longer than that of a value and its duplicates
together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import fx

from planner.capture.joint_graph import fake_result, map_nodes, may_write
from planner.capture.passes.checkpoints import clone_of
from planner.capture.recomputability import is_random
from planner.core.call import storages
from planner.core.layout import is_dense

_CLONE = torch.ops.aten.clone.default
Storages = Mapping[fx.Node, frozenset[int]]


def merge_duplicates(graph: fx.Graph, order: Sequence[fx.Node]) -> list[fx.Node]:
    """Let readers of a value read an equal one that is still live, and drop nodes that nothing reads then. In place.

    At no moment of `order` are more bytes live than before. Values that the graph returns or writes into stay apart.
    O(nodes) time, where few values are equal to each.

    Args:
        graph: a joint graph.
        order: its nodes as they are to run.

    Returns:
        The nodes that are left, in the same order.
    """
    place = {node: i for i, node in enumerate(graph.nodes)}
    at = {node: i for i, node in enumerate(order)}
    held_by = {node: frozenset(storages(node.meta.get("val"))) for node in graph.nodes}
    ends = [graph.output_node(), *filter(may_write, graph.nodes)]
    apart = frozenset[int]().union(*(held_by[n] for end in ends for n in end.all_input_nodes))
    given = apart.union(*(held_by[n] for n in graph.find_nodes(op="placeholder")))
    for node in graph.find_nodes(op="call_function", target=_CLONE):
        if _is_original(node, held_by, given):
            _merge(node, node.args[0], held_by)
    graph.eliminate_dead_code()
    left = set(graph.nodes)
    order = [n for n in order if n in left]
    number = _numbers(graph)
    alike: dict[int, list[fx.Node]] = defaultdict(list)
    for node in order:
        allocated = held_by[node].difference(apart, *(held_by[n] for n in node.all_input_nodes))
        if allocated and isinstance(node.meta["val"], torch.Tensor):
            alike[number[node]].append(node)
    # from the last: a merge takes away no reader that runs later, so a value seen to be live stays live
    for node in reversed(order):
        others = alike[number[node]]
        if not others or others[-1] is not node:
            continue
        others.pop()
        for first in others:
            _, readers = _users(first, held_by)
            if place[first] < place[node] and any(at.get(n, -1) > at[node] for n in readers):
                _merge(node, first, held_by)
                break
    graph.eliminate_dead_code()
    left = set(graph.nodes)
    return [n for n in order if n in left]


def _is_original(node: fx.Node, held_by: Storages, apart: frozenset[int]) -> bool:
    """Whether a copy could as well be what it copies: a whole value of the graph's own, laid out alike, and kept apart
    from nothing.
    """
    (source,) = node.args
    if node.kwargs.get("memory_format") not in (None, torch.preserve_format) or not isinstance(source, fx.Node):
        return False
    value, original = node.meta["val"], source.meta["val"]
    if value.stride() != original.stride() or not is_dense(original):
        return False
    return (held_by[node] | held_by[source]).isdisjoint(apart)


def _numbers(graph: fx.Graph) -> dict[fx.Node, int]:
    """Nodes of one number have equal values: equal ops on equal inputs, and nothing was written in between."""
    number: dict[fx.Node, int] = {}
    known: dict[str, int] = {}
    for at, node in enumerate(graph.nodes):
        number[node] = at
        if may_write(node):
            known.clear()
        elif (
            not is_random(node)
            and clone_of(node) is None
            and getattr(node.target, "namespace", "aten") in ("aten", "prims")
        ):
            arguments = map_nodes((node.args, node.kwargs), lambda n: f"%{number[n]}")
            number[node] = known.setdefault(repr((node.op, str(node.target), arguments)), at)
    return number


def _users(node: fx.Node, held_by: Storages) -> tuple[list[fx.Node], list[fx.Node]]:
    """The views of a value, each after its base, and the ops that read it."""
    views: list[fx.Node] = []
    readers: list[fx.Node] = []
    stack = [node]
    while stack:
        for user in stack.pop().users:
            if held_by[user].isdisjoint(held_by[node]):
                readers.append(user)
            else:
                views.append(user)
                stack.append(user)
    return views, readers


def _merge(node: fx.Node, first: fx.Node, held_by: dict[fx.Node, frozenset[int]]) -> None:
    views, _ = _users(node, held_by)
    node.replace_all_uses_with(first)
    for view in views:  # of another storage now
        view.meta = {**view.meta, "val": fake_result(view)}
        held_by[view] = frozenset(storages(view.meta["val"]))
