"""Schedules of fused ops as the two graphs that Inductor compiles, their nodes tagged with their steps."""

from __future__ import annotations

import operator
from collections.abc import Sequence

from torch import fx

from planner.capture.regions.region import Region
from planner.codegen.emit import emit, runnable
from planner.codegen.moving import moves_fit
from planner.core.recipe import PlannedRegion
from planner.inductor.realise import Fused, fuse
from planner.pieces.rewrite import in_pieces

OP = "planner_op"  # in a node's `meta`: the coarse op that it is
STEP = "planner_step"  # the step of the schedule that a node is of, as `compat.inductor_hooks` reads it


def emit_fused(fused: Fused, forward: Sequence[int], backward: Sequence[int]) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The forward and backward graphs of a schedule of coarse ops.

    Args:
        fused: the region.
        forward: indices into its coarse ops, in the order in which the forward pass runs them.
        backward: the same for the backward pass.
    """
    for i, op in enumerate(fused.coarse.ops):
        op.node.meta[OP] = i
    graphs = emit(fused.fine, fused.expanded(forward), fused.expanded(backward), fused=True)
    for graph in graphs:
        _tag(graph.graph)
    return graphs


def emit_planned(
    region: Region, planned: PlannedRegion, store: int = 0
) -> tuple[fx.GraphModule, fx.GraphModule] | None:
    """The graphs of a planned region, in the mode that it was planned in; None where the schedule is not of it.

    Args:
        region: the region.
        planned: its schedule.
        store: where values go that leave, as for `emit`.
    """
    if planned.realised is None:
        written, steps = in_pieces(region, planned.splits), (*planned.forward, *planned.backward)
        if written is None or not runnable(written, planned.forward, planned.backward):
            return None
        if not moves_fit(written, steps, planned.moves):
            return None
        again = planned.made_again
        return emit(written, planned.forward, planned.backward, planned.moves, store, made_again=again)
    if any(not 0 <= i < len(region.ops) for i in planned.realised):
        return None
    fused = fuse(region, planned.realised)
    if not runnable(fused.coarse, planned.forward, planned.backward):
        return None
    return emit_fused(fused, planned.forward, planned.backward)


def _tag(graph: fx.Graph) -> None:
    """Tag each node with the step that ends with the next fused op; a part of a result with that of the whole."""
    step = 0
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        source = node.args[0] if node.target is operator.getitem else None
        if isinstance(source, fx.Node) and OP in source.meta:
            node.meta[STEP], node.meta[OP] = source.meta[STEP], source.meta[OP]
            continue
        node.meta[STEP] = step
        step += OP in node.meta
