"""What the ops of a trace cost, each distinct one estimated once."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import fx

from planner.capture.recomputability import draws_apart, is_random, is_replayed, keep_reason, replay_bytes
from planner.compat import pytree
from planner.compat.ops import schema_of
from planner.core.call import TensorSpec
from planner.costs.ops import estimate_nodes, reads_workspace
from planner.eager.trace import DistinctOp, Trace
from planner.errors import CaptureError
from planner.requests.request import Request


@dataclass(frozen=True, slots=True)
class OpCost:
    """One op, by itself.

    Attributes:
        seconds: of one run.
        workspace: bytes held only while it runs.
        excess: bytes that its results hold beyond their sizes.
        random: whether it draws random numbers.
        replayed: whether it may, and so has to find the generator as its first run did.
        keep_because: why it must not run twice; empty where it may.
        paired: whether it reads bytes that only its forward op can make.
    """

    seconds: float = 0.0
    workspace: int = 0
    excess: int = 0
    random: bool = False
    replayed: bool = False
    keep_because: str = ""
    paired: bool = False


_VIEW = OpCost()
CostsKnown = dict[tuple[Any, ...], OpCost]


def costs_of(trace: Trace, request: Request, mode: Any, device: torch.device, known: CostsKnown) -> list[OpCost]:
    """One entry per op of the trace; what is not known yet is estimated, and added to it.

    Args:
        trace: what ran.
        request: what devices to estimate for, and how.
        mode: the fake tensors' mode.
        device: where the fake tensors are.
        known: what was estimated before.
    """
    new = {op.distinct.key: op.distinct for op in trace.ops if op.distinct and op.distinct.key not in known}
    nodes = {key: _node(op, mode, device) for key, op in new.items()}
    estimates = estimate_nodes(
        list(nodes.values()),
        request.device,
        measure_on=request.measure_on,
        timed=request.costs == "measured",
        progress=request.options.progress,
    )
    for key, node in nodes.items():
        found = estimates[node]
        apart = draws_apart(node.args, node.kwargs)
        mutable = schema_of(new[key].target).is_mutable and not apart
        aten = new[key].target.namespace in ("aten", "prims")
        known[key] = OpCost(
            found.seconds,
            found.workspace - replay_bytes(node)[1],
            found.excess,
            is_random(node),
            is_replayed(node),
            "" if mutable and aten else keep_reason(node, ()),
            reads_workspace(node),
        )
    costs = [known[op.distinct.key] if op.distinct else _VIEW for op in trace.ops]
    for i, op in enumerate(trace.ops):
        if op.distinct and costs[i].paired:
            # cannot be run by itself: taken to need what the op that it belongs to does, and a copy of a gradient
            made = [costs[trace.born[s]].workspace for s in op.reads if trace.born[s] >= 0]
            given = [prod(x.shape) * x.dtype.itemsize for x in op.distinct.args if isinstance(x, TensorSpec)]
            costs[i] = replace(costs[i], workspace=max(made, default=0) + max(given, default=0))
    return costs


def _node(op: DistinctOp, mode: Any, device: torch.device) -> fx.Node:
    """The op as a node of a graph of its own, on fake tensors."""
    graph = fx.Graph()

    def fake(spec: TensorSpec) -> torch.Tensor:
        if not all(isinstance(n, int) for n in spec.shape):
            raise CaptureError(
                f"{op.target} runs on a nested tensor, whose sizes depend on the values of tensors: eager mode is not "
                "planned with one. Pad the tensor, plan a submodule, or plan in another mode"
            )
        with mode:
            return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=device)

    def argument(spec: TensorSpec) -> fx.Node:
        node = graph.placeholder(f"x{len(graph.nodes)}")
        node.meta["val"] = fake(spec)
        return node

    args, kwargs = pytree.tree_map_only(TensorSpec, argument, (op.args, op.kwargs))
    node = graph.call_function(op.target, args, kwargs)
    node.meta["val"] = pytree.tree_map_only(TensorSpec, fake, op.result)
    return node
