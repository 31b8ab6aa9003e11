"""Gradients of outputs that are views of one result of a graph, as `h[:, :d]` and `h[:, d:]` are.

AOTAutograd returns that result, and makes the views outside its graph (`OutputType.alias_of_intermediate` in
torch/_functorch/_aot_autograd/schemas.py). So autograd's engine takes their gradients to gradients of the whole result,
and adds these up, before the graph's backward pass begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from planner.capture.trace.loss_trace import LiveBytes


class View(NamedTuple):
    """A result of a graph that is such a view, and the edge of autograd's graph to the result that it is of."""

    tensor: torch.Tensor
    of: GradientEdge


def viewed_outside(results: Sequence[torch.Tensor]) -> list[View]:
    """Those of some differentiable results of graphs that are such views."""
    found = ((t, _edge_to_graph(get_gradient_edge(t))) for t in results)
    return [View(t, edge) for t, edge in found if edge is not None and edge.node is not t.grad_fn]


def bytes_of_sums(views: Sequence[View]) -> int:
    """The most bytes of their gradients, and of the gradients of the results, at once; the graphs stay.

    The views' own are taken to be there when the first is added, as a loss that reads them all leaves them.
    """
    if not views:
        return 0
    scaled = [t * 1 for t, _ in views]
    seeds = [torch.ones((), dtype=t.dtype, device=t.device).expand_as(t) for t in scaled]
    meter = LiveBytes()
    with meter:
        torch.autograd.grad(scaled, [*dict.fromkeys(of for _, of in views)], seeds, retain_graph=True)
    return meter.peak


def _edge_to_graph(edge: GradientEdge) -> GradientEdge | None:
    """The edge of a compiled graph's result, by way of nodes with one input alone; None where there is none."""
    while "CompiledFunction" not in edge.node.name():
        after = [(node, nr) for node, nr in edge.node.next_functions if node is not None]
        if len(after) != 1:
            return None
        edge = GradientEdge(*after[0])
    return edge
