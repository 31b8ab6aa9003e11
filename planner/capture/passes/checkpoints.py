"""Models that checkpoint themselves: how many of their calls do, and the joint graph with those calls as they asked.

AOTAutograd traces a checkpointed call as if it kept everything and leaves tags on its nodes: which call they belong to,
and the policy of the call's context (`torch._functorch.partitioners` reads the same ones).
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Any, Literal

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from planner.capture.joint_graph import fake_result, map_nodes
from planner.capture.recomputability import keep_reason
from planner.core.call import storages

Checkpoints = Literal["replace", "keep"]
_AGAIN = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)
_CLONE_OF = "planner_clone_of"  # in a node's meta


def checkpointed_calls(graph: fx.Graph) -> int:
    """How many calls within a joint graph the model itself checkpoints."""
    return len({call for node in graph.nodes if (call := _call_of(node)) is not None})


def clone_of(node: fx.Node) -> fx.Node | None:
    """The forward node that a node of the backward pass repeats; None for other nodes."""
    original: fx.Node | None = node.meta.get(_CLONE_OF)
    return original


def repeat_checkpointed(graph: fx.Graph, forward: Collection[fx.Node], mutated: Collection[fx.Node]) -> None:
    """Let the backward pass read clones of the nodes that checkpointed calls do not save. In place.

    Results of a call, results that its policy saves and ops that must not run twice stay one node. O(nodes + edges)
    time.

    Args:
        graph: a joint graph.
        forward: the nodes of its forward pass.
        mutated: placeholders that the step writes into.
    """
    held_by = {node: storages(node.meta.get("val")).keys() for node in graph.nodes}
    again = _repeated(forward, mutated, held_by)
    clones: dict[fx.Node, fx.Node] = {}
    views: set[fx.Node] = set()
    for user in list(graph.nodes):
        if user in forward or user.op in ("placeholder", "output"):
            continue
        _clone_inputs(graph, user, again, clones)
        moved = {storage for n in user.all_input_nodes if n in again or n in views for storage in held_by[n]}
        user.args, user.kwargs = map_nodes((user.args, user.kwargs), lambda n: clones.get(n, n))
        if not moved.isdisjoint(held_by[user]):  # a view, of a clone now
            user.meta = {**user.meta, "val": fake_result(user)}
            views.add(user)


def _repeated(
    forward: Collection[fx.Node], mutated: Collection[fx.Node], held_by: Mapping[fx.Node, Collection[int]]
) -> set[fx.Node]:
    """The forward nodes whose results a checkpointed call does not save, and which may run twice."""
    written = {storage for node in mutated for storage in held_by[node]}
    readers: dict[int, set[Any]] = defaultdict(set)  # storage -> the calls that read it in the forward pass
    for node in forward:
        for user in node.users:
            if user in forward or user.op == "output":
                for storage in held_by[node]:
                    readers[storage].add(_call_of(user))

    def runs_again(node: fx.Node) -> bool:
        maker: Any = node.args[0] if node.target is operator.getitem else node
        call = _call_of(maker)
        if node.op != "call_function" or call is None or maker.meta.get("recompute") not in _AGAIN:
            return False
        if keep_reason(maker, [n for n in maker.all_input_nodes if not written.isdisjoint(held_by[n])]):
            return False
        if not isinstance(node.meta["val"], torch.Tensor):
            return True  # several results, each decided by itself
        own = set(held_by[node]).difference(*(held_by[n] for n in maker.all_input_nodes))
        return all(readers[storage] <= {call} for storage in own)

    return {node for node in forward if runs_again(node)}


def _clone_inputs(graph: fx.Graph, user: fx.Node, again: Collection[fx.Node], clones: dict[fx.Node, fx.Node]) -> None:
    """Clone the inputs of a node that run again, and their own such inputs before them, right before the node."""
    stack = [n for n in user.all_input_nodes if n in again and n not in clones]
    while stack:
        node = stack[-1]
        todo = [n for n in node.all_input_nodes if n in again and n not in clones]
        if todo and node not in clones:
            stack.extend(todo)
            continue
        stack.pop()
        if node not in clones:
            with graph.inserting_before(user):
                clones[node] = _clone(graph, node, clones)


def _clone(graph: fx.Graph, node: fx.Node, clones: Mapping[fx.Node, fx.Node]) -> fx.Node:
    new = graph.node_copy(node, lambda n: clones.get(n, n))
    new.meta = {**node.meta, "val": fake_result(new), _CLONE_OF: node, "partitioner_tag": "is_backward"}
    return new


def _call_of(node: fx.Node) -> Any:
    """A number of the checkpointed call that a node belongs to; None for other nodes."""
    if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node.meta.get("ac_graph_id") if "recompute" in node.meta else None
