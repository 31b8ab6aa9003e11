"""Ops that run in pieces, written whole again: for backward passes that ask for a gradient which is in pieces only."""

from __future__ import annotations

import operator
from dataclasses import dataclass

from torch import fx

from planner.capture.passes.tangents import is_mark
from planner.core.pieces import run_in_pieces

_WHOLE_OPS = "planner_whole_ops"  # in the `meta` of a node that runs in pieces


@dataclass(frozen=True)
class WholeOps:
    """The ops that one node runs in pieces, as nodes of the graph as it was captured.

    Attributes:
        reads: what they are given, in the order of the node's inputs.
        nodes: the ops and their results, in the order in which they run.
        makes: the node's results.
    """

    reads: tuple[fx.Node, ...]
    nodes: tuple[fx.Node, ...]
    makes: tuple[fx.Node, ...]


def remember(node: fx.Node, ops: WholeOps) -> None:
    """Note what a node runs in pieces."""
    node.meta[_WHOLE_OPS] = ops


def write_whole(graph: fx.Graph) -> bool:
    """Write the gradients of outputs that a backward graph has in pieces whole, as captured, in place.

    Returns whether there were any. O(nodes + edges).
    """
    found = False
    for node in graph.find_nodes(op="call_function", target=run_in_pieces):
        ops: WholeOps = node.meta[_WHOLE_OPS]
        if not any(map(is_mark, ops.nodes)):
            continue
        found = True
        now = dict(zip(ops.reads, node.args[len(node.args) - len(ops.reads) :], strict=True))
        with graph.inserting_before(node):
            for n in ops.nodes:
                now[n] = graph.node_copy(n, now.__getitem__)
        for part in list(node.users):
            assert part.target is operator.getitem
            part.replace_all_uses_with(now[ops.makes[part.args[1]]])
            graph.erase_node(part)
        graph.erase_node(node)
    return found
