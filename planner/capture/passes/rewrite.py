"""All rewrites of a joint graph that is to be planned, in their order; the graph is changed in place."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import fx

from planner.capture.joint_graph import ancestors, nodes_in, signature_of
from planner.capture.passes.checkpoints import Checkpoints, repeat_checkpointed
from planner.capture.passes.dropout import split_dropouts
from planner.capture.passes.duplicates import merge_duplicates
from planner.capture.passes.in_place_sums import add_in_place
from planner.capture.passes.order import Order, execution_order, tagged_forward
from planner.capture.passes.steps import add_steps
from planner.capture.recomputability import is_random

_ATEN = torch.ops.aten
# op -> position of its `train` / `update` flag; running statistics are arguments 3 and 4 of both
_BATCH_NORM_BACKWARD = {
    _ATEN.native_batch_norm_backward.default: 7,
    _ATEN.batch_norm_backward.default: 7,
}


def rewrite(
    joint: fx.GraphModule, num_fwd_outputs: int, checkpoints: Checkpoints, stepped: Collection[int] = ()
) -> Order:
    """Rewrite a joint graph for planning, in place; returns the order in which its nodes are to run.

    Nodes that neither feed the forward outputs nor depend on a gradient run in the backward pass, just before they
    are first needed.

    Args:
        joint: the graph; forward nodes are tagged as AOTAutograd does.
        num_fwd_outputs: how many of its outputs the forward pass returns.
        checkpoints: "keep" for calls that the model itself checkpoints to run again as it asks.
        stepped: positions of the parameters that an optimizer steps in the backward pass, among the traced inputs.
    """
    graph = joint.graph
    split_dropouts(graph)
    _drop_unread_statistics(graph)
    graph.eliminate_dead_code()
    signature = signature_of(graph, num_fwd_outputs)
    # random ops draw in the order of the forward pass, whoever uses their results
    tagged = tagged_forward(graph)
    drawn = [n for n in graph.nodes if is_random(n) and n in tagged]
    forward = ancestors([*nodes_in(signature.fwd_outputs), *drawn])
    if checkpoints == "keep":
        repeat_checkpointed(graph, forward, signature.mutated)
    order = execution_order(graph, forward, ancestors(nodes_in(signature.grads)))
    order = Order(merge_duplicates(graph, order.nodes), order.forward)
    if stepped:
        order = add_steps(graph, order, num_fwd_outputs, stepped)
    add_in_place(graph, order)  # the last: no value may be read later than the order says
    return order


def _drop_unread_statistics(graph: fx.Graph) -> None:
    """Drop the running statistics that a training-mode BatchNorm's backward op reads and does not use.

    They are the *updated* buffers: read, they would hold copies of them until the backward pass.
    """
    for node in graph.nodes:
        at = _BATCH_NORM_BACKWARD.get(node.target) if node.op == "call_function" else None
        if at is not None and node.args[at] is True:
            node.args = (*node.args[:3], None, None, *node.args[5:])
