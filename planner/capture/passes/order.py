"""The order in which the nodes of a joint graph run, the forward pass first."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch import fx

from planner.capture.joint_graph import ancestors, is_tangent
from planner.capture.passes.checkpoints import clone_of
from planner.capture.recomputability import is_collective


@dataclass(frozen=True)
class Order:
    """The nodes of a joint graph as they are to run.

    Attributes:
        nodes: without placeholders and the output.
        forward: nodes that run in the forward pass; placeholders may be among them.
    """

    nodes: Sequence[fx.Node]
    forward: Collection[fx.Node]


def tagged_forward(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that AOTAutograd has tagged as traced in the forward pass."""
    return {n for n in graph.nodes if n.meta.get("partitioner_tag") == "is_forward"}


def traced_order(graph: fx.Graph) -> Order:
    """The order in which a graph was traced."""
    return Order(_calls(graph), tagged_forward(graph))


def execution_order(graph: fx.Graph, forward: set[fx.Node], needed: set[fx.Node]) -> Order:
    """Forward nodes, then backward nodes; those that wait for no gradient are sunk to their first use.

    Impure nodes without results (assertions) stay where they are: in the forward pass if no gradient reaches them.
    Collectives stay as well: every process has to run them in the same order.

    Args:
        graph: a joint graph.
        forward: the nodes that the forward outputs are computed from.
        needed: the nodes that the gradients are computed from.
    """
    nodes = _calls(graph)
    waits = set(filter(is_tangent, graph.nodes))
    for node in nodes:
        if not waits.isdisjoint(node.all_input_nodes):
            waits.add(node)
    asserted = ancestors(n for n in nodes if n.is_impure() and n not in waits and n not in needed)
    forward = forward | asserted
    first = [n for n in nodes if n in forward]
    rest = [n for n in nodes if n not in forward and (n in needed or n.is_impure())]
    return Order([*first, *_sunk(rest, waits)], forward)


def _sunk(nodes: Sequence[fx.Node], waits: Collection[fx.Node]) -> list[fx.Node]:
    """The nodes of a backward pass; each that waits for no gradient and may move comes right before its first use."""
    members = set(nodes)
    done: dict[fx.Node, None] = {}
    for node in nodes:
        # a clone's draws are replayed
        stays = is_collective(node.target) or (node.is_impure() and clone_of(node) is None)
        stack = [node] if node in waits or stays else []
        while stack:  # its inputs that wait for no gradient, deepest first
            top = stack[-1]
            todo = [n for n in top.all_input_nodes if n in members and n not in done]
            if todo and top not in done:
                stack.extend(reversed(todo))
            else:
                done[stack.pop()] = None
    # gradients that wait for no gradient at all (constants) come last
    return [*done, *(n for n in nodes if n not in done)]


def _calls(graph: fx.Graph) -> list[fx.Node]:
    return [n for n in graph.nodes if n.op not in ("placeholder", "output")]
