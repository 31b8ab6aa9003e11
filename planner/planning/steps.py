"""Plans with the optimizer's steps in the backward pass: what each step takes, and the steps that would be wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import nn, optim

from planner.capture.passes.steps import is_step
from planner.capture.regions.region import Region
from planner.capture.trace.step import TrainingGraph
from planner.core.call import here
from planner.costs.ops import OpEstimate
from planner.costs.optimizer import step_workspace
from planner.errors import CaptureError
from planner.requests.request import Request


def with_steps(
    request: Request, graph: TrainingGraph, estimates: Sequence[Sequence[OpEstimate]]
) -> Sequence[Sequence[OpEstimate]]:
    """The estimates, those of steps with the temporaries that the optimizer takes for that parameter.

    Parameters of equal layout may be in groups of several options: the one that takes the most counts.

    Raises:
        CaptureError: a parameter would be stepped before all of its gradient is there.
    """
    optimizer = request.optimizer
    if not request.options.step_in_backward or not isinstance(optimizer, optim.Optimizer):
        return estimates
    _refuse_unsafe(graph)
    groups: dict[Any, list[tuple[torch.Tensor, dict[str, Any]]]] = {}
    for group in optimizer.param_groups:
        for p in group["params"]:
            alike = groups.setdefault(_layout(p), [])
            if all(other is not group for _, other in alike):
                alike.append((p, group))

    @cache
    def workspace(layout: Any) -> int:
        return max(step_workspace(optimizer, group, p, cuda=request.device.caches) for p, group in groups[layout])

    def of(region: Region, i: int, known: OpEstimate) -> OpEstimate:
        node: Any = region.ops[i].node
        return replace(known, workspace=workspace(_layout(node.args[0].meta["val"]))) if is_step(node) else known

    pairs = zip(graph.regions, estimates, strict=True)
    return [[of(region, i, known) for i, known in enumerate(each)] for region, each in pairs]


def _layout(t: torch.Tensor) -> tuple[object, ...]:
    t = here(t)
    return tuple(t.shape), t.stride(), t.dtype


def _refuse_unsafe(graph: TrainingGraph) -> None:
    """Refuse a parameter in several captured graphs, in several calls of one, or in code that runs between them."""
    shared = [link for link in graph.links if link.producer is None]
    outside = [region for region in graph.regions if not region.fingerprint]
    named = [n for region in outside for n in region.primals if isinstance(n.meta["val"], nn.Parameter)]
    if shared or any(n.meta["val"].requires_grad for n in named):
        raise CaptureError(
            f"step_in_backward=True: a parameter is used in several of the {len(graph.regions)} parts into which "
            "torch.compile has cut this step (TORCH_LOGS=graph_breaks says where), or outside of them, so that no part "
            "has its whole gradient. Take the graph breaks out, or plan with step_in_backward=False"
        )
