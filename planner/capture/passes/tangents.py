"""Backward passes that some gradients do not enter: the graph without them, as autograd goes without undefined ones.

A gradient that is computed from such gradients alone is none, and is not computed. A sum takes the other summand, bit
for bit what autograd's buffers do. Any other op that reads such a gradient beside one that is there, as the backward
pass of `split`, is given zeros: a zero that had come all the way through the graph would be NaN beside an infinity.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import fx

from planner.capture.joint_graph import is_tangent
from planner.errors import ApplyError

_ATEN = torch.ops.aten


def leave_out(graph: fx.Graph, undefined: Collection[fx.Node]) -> None:
    """Take gradients that do not enter a graph, which is a joint graph or a backward pass, out of it, in place.

    The placeholders stay. Outputs that are computed from those gradients alone become None.

    Args:
        graph: the graph.
        undefined: placeholders of gradients.

    Raises:
        ApplyError: zeros are needed whose size, a symbol, no tensor has that is there.
    """
    gone = set(undefined)
    gradients = set(filter(is_tangent, graph.nodes))
    for node in list(graph.nodes):
        inputs = node.all_input_nodes
        if node.op == "output":
            node.args = fx.node.map_arg(node.args, lambda n: None if n in gone else n)
        elif not gradients.isdisjoint(inputs):
            gradients.add(node)
            there = [n for n in inputs if n in gradients and n not in gone]
            if not there:
                gone.add(node)
            elif not gone.isdisjoint(inputs):
                if _is_sum(node):
                    node.replace_all_uses_with(there[0])
                else:
                    for n in filter(gone.__contains__, inputs):
                        node.replace_input_with(n, _zeros(graph, n, node))
    _drop_unused(graph, gone)


def _is_sum(node: fx.Node) -> bool:
    """Whether a node is autograd's sum of two gradients of one tensor."""
    if node.target is not _ATEN.add.Tensor or node.kwargs or len(node.args) != 2:
        return False
    kinds = [(v.shape, v.dtype) for n in node.args if isinstance(n, fx.Node) and _is_tensor(v := n.meta.get("val"))]
    return len(kinds) == 2 and kinds[0] == kinds[1]


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _zeros(graph: fx.Graph, like: fx.Node, before: fx.Node) -> fx.Node:
    value = like.meta["val"]
    with graph.inserting_before(before):
        shape = [_size(graph, n, before) if isinstance(n, torch.SymInt) else n for n in value.shape]
        zeros = graph.call_function(_ATEN.zeros.default, (shape,), {"dtype": value.dtype, "device": value.device})
    zeros.meta["val"] = value
    return zeros


def _size(graph: fx.Graph, size: torch.SymInt, before: fx.Node) -> fx.Node:
    """A node for a size that is a symbol, read off an earlier tensor."""
    for node in graph.nodes:
        value = node.meta.get("val")
        if node is before:
            break
        if isinstance(value, torch.SymInt) and str(value) == str(size):
            return node
        if isinstance(value, torch.Tensor):
            for d, n in enumerate(value.shape):
                if str(n) == str(size):
                    found = graph.call_function(_ATEN.sym_size.int, (node, d))
                    found.meta["val"] = n
                    return found
    raise ApplyError(
        f"a backward pass that only some of the model's outputs get a gradient in needs zeros of {size} elements, which "
        "none of its tensors has. Plan without dynamic=, or give every output that the model returns a gradient"
    )


def _drop_unused(graph: fx.Graph, gone: Collection[fx.Node]) -> None:
    for node in reversed(list(graph.nodes)):
        if node.op in ("placeholder", "output") or node.users:
            continue
        if node in gone or not node.is_impure():
            graph.erase_node(node)
