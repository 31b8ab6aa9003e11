"""The optimizer's steps as ops of a joint graph: each parameter is stepped once its gradient is whole and it is read
no more.

A step changes a parameter in place. So it comes after all that reads the parameter in the backward pass, and after all
that reads any value which the forward pass has computed from it: such a value may be recomputed from the parameter
until then (`planner.capture.regions.region` has ops of such a backward pass run once).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import fx

from planner.capture.joint_graph import fake_result, index_of, nodes_in, signature_of
from planner.capture.passes.in_place_sums import made_in_backward
from planner.capture.passes.order import Order
from planner.core.call import storages
from planner.core.layout import is_dense
from planner.stepping.step import step_now

_CLONE = torch.ops.aten.clone.default
_FORMATS = (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)
Storages = Mapping[fx.Node, frozenset[int]]


def is_step(node: fx.Node) -> bool:
    """Whether a node steps a parameter."""
    return node.target is step_now


def steps_in(graph: fx.Graph) -> list[fx.Node]:
    """The nodes of a graph that step parameters, of which each is the first argument."""
    return graph.find_nodes(op="call_function", target=step_now)


def add_steps(graph: fx.Graph, order: Order, num_fwd_outputs: int, inputs: Collection[int]) -> Order:
    """Let gradients of parameters go into steps and no further, in place; returns the order with the steps.

    An optimizer may write into a gradient (SGD with Nesterov's momentum does): one that something else holds or reads
    later, that does not fill its storage, or that has another layout than the parameter, is copied before, as
    autograd copies it into `.grad` (`torch/csrc/autograd/functions/accumulate_grad.h`). O(nodes + edges).

    Args:
        graph: a joint graph.
        order: its nodes as they are to run.
        num_fwd_outputs: how many of its outputs the forward pass returns.
        inputs: positions of the parameters among the inputs of the graph that was traced.
    """
    signature = signature_of(graph, num_fwd_outputs)
    held_by = {node: frozenset(storages(node.meta.get("val"))) for node in graph.nodes}
    at = {node: i for i, node in enumerate(order.nodes)}
    reads = _last_reads(graph, order, at, held_by)
    made = made_in_backward(order, held_by)
    first = sum(n in order.forward for n in order.nodes)  # of the backward pass
    goes_out = Counter(s for n in nodes_in(signature.grads) for s in held_by[n])
    output = graph.output_node()
    results: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    placed: dict[int, list[fx.Node]] = defaultdict(list)
    for k, (primal, gradient) in enumerate(zip(signature.primals, signature.grads, strict=True)):
        if index_of(primal.meta.get("desc")) not in inputs or not isinstance(gradient, fx.Node):
            continue
        place = max(first - 1, reads[primal], at.get(gradient, -1))
        alone = all(s in made and goes_out[s] == 1 for s in held_by[gradient])
        shared = not alone or not is_dense(gradient.meta["val"]) or _read_after(gradient, place, at, held_by)
        layout = _layout_of(primal)
        alike = layout is None or gradient.meta["val"].is_contiguous(memory_format=layout)
        placed[place] += _step(graph, primal, gradient, None if alike and not shared else layout or _FORMATS[0])
        results[num_fwd_outputs + k] = None
    output.args = (tuple(results),)
    nodes = placed[-1]
    for i, node in enumerate(order.nodes):
        nodes += [node, *placed[i]]
    return Order(nodes, order.forward)


def _layout_of(primal: fx.Node) -> torch.memory_format | None:
    """The memory format of a parameter; None for another layout."""
    return next((f for f in _FORMATS if primal.meta["val"].is_contiguous(memory_format=f)), None)


def _step(graph: fx.Graph, primal: fx.Node, gradient: fx.Node, copied: torch.memory_format | None) -> list[fx.Node]:
    """The nodes that step a parameter, by a copy of its gradient where that is to have a memory format."""
    place: dict[str, Any] = {key: gradient.meta.get(key) for key in ("stack_trace", "nn_module_stack")}
    nodes = []
    with graph.inserting_before(graph.output_node()):
        if copied is not None:
            gradient = graph.call_function(_CLONE, (gradient,), {"memory_format": copied})
            gradient.meta = {**place, "val": fake_result(gradient)}
            nodes.append(gradient)
        step = graph.call_function(step_now, (primal, gradient))
    step.meta = {**place, "val": None}
    return [*nodes, step]


def _last_reads(graph: fx.Graph, order: Order, at: Mapping[fx.Node, int], held_by: Storages) -> dict[fx.Node, int]:
    """For each node, the place of the last op of the backward pass that reads it or what the forward pass computes from
    it; -1 for none.
    """
    last: dict[fx.Node, int] = {}
    for node in reversed(graph.nodes):
        places = [-1]
        for user in node.users:
            if user in order.forward:
                places.append(last[user])
            elif user in at:
                is_view = not held_by[user].isdisjoint(held_by[node])
                places += [at[user], last[user] if is_view else -1]
        last[node] = max(places)
    return last


def _read_after(node: fx.Node, place: int, at: Mapping[fx.Node, int], held_by: Storages) -> bool:
    """Whether anything reads a node's storage after a place."""
    bases, stack = {node}, [node]
    while stack:  # all nodes that hold it
        top = stack.pop()
        around = {n for n in (*top.all_input_nodes, *top.users) if not held_by[n].isdisjoint(held_by[node])} - bases
        bases |= around
        stack += around
    return any(at.get(user, -1) > place for base in bases for user in base.users)
