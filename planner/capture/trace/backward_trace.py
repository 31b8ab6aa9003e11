"""The backward pass of a step under fake tensors: where gradients arrive, and which ops run outside the regions."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from planner.capture.regions.calls import RegionCall
from planner.capture.trace.recording import EagerCall, Recording
from planner.compat.autograd import saved_by
from planner.core.call import tensors_in

Edge = tuple[Node, int]
_SUMS = (torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor)


@dataclass(frozen=True)
class EagerPart:
    """The ops between two calls of compiled graphs.

    Attributes:
        forward: those of the forward pass.
        backward: those of its backward pass, with autograd's sums of gradients.
        gradients: the gradients of its inputs, by the edge of autograd's graph.
        saved: the tensors that autograd nodes saved, by the numbers of the nodes.
    """

    forward: tuple[EagerCall, ...]
    backward: tuple[EagerCall, ...]
    gradients: Mapping[Edge, torch.Tensor]
    saved: Mapping[int, tuple[torch.Tensor, ...]]


@dataclass(frozen=True)
class Backward:
    """A backward pass that was watched.

    Attributes:
        reached: the gradients of the results that were asked for, as `torch.autograd.grad` returns them.
        parts: the ops that ran before each region, and after the last.
        arrived: the gradients of tensors that cross between regions and parts, by the tensor's identity.
    """

    reached: tuple[torch.Tensor | None, ...]
    parts: tuple[EagerPart, ...]
    arrived: Mapping[int, torch.Tensor]


def sums(call: EagerCall) -> bool:
    """Whether an op of the backward pass is a sum of gradients, which autograd's engine makes between its nodes."""
    return not call.node and call.target in _SUMS


def edge_of(t: torch.Tensor) -> Edge:
    """Where autograd's graph takes the gradient of a tensor."""
    edge = get_gradient_edge(t)
    return edge.node, edge.output_nr


def reads(calls: Sequence[EagerCall]) -> tuple[torch.Tensor, ...]:
    """The tensors that ops take from elsewhere, each once."""
    known: set[int] = set()
    taken = []
    for call in calls:
        for t in tensors_in((call.args, call.kwargs)):
            if id(t) not in known:
                known.add(id(t))
                taken.append(t)
        known.update(id(t) for t in tensors_in(call.result))
    return tuple(taken)


def watch_backward(
    recording: Recording,
    regions: Sequence[RegionCall],
    between: Sequence[tuple[EagerCall, ...]],
    roots: Sequence[torch.Tensor],
    arriving: Sequence[torch.Tensor] | None,
    results: Sequence[GradientEdge],
    ends: Sequence[torch.Tensor],
) -> Backward:
    """Run the backward pass and sort its ops and gradients by part.

    Args:
        recording: of the mode of all tensors.
        regions: the calls that have a gradient.
        between: the ops that ran before each of them, and after the last.
        roots: where the backward pass begins.
        arriving: the gradients of the roots; None for a scalar's.
        results: where the gradients that are asked for are taken.
        ends: the model's outputs; ops that run before a gradient arrives there belong to the loss.
    """
    read = [t for calls in between for t in reads(calls) if t.requires_grad]
    crossing = [t for call in regions for t in tensors_in((call.results, call.inputs)) if t.requires_grad]
    watch = _Watch(recording, len(between), {id(t) for t in ends})
    handles = [
        *watch.hook_tensors([*read, *crossing, *ends]),
        *watch.hook_nodes(_nodes(roots)),
        *watch.hook_regions(regions),
    ]
    leaves = [get_gradient_edge(t) for t in read if t.is_leaf]
    recording.resume()
    try:
        reached = torch.autograd.grad(roots, [*results, *leaves], arriving, allow_unused=True)
    finally:
        recording.pause()
        recording.node = 0
        for handle in handles:
            handle.remove()
    watch.collect()
    parts = (
        EagerPart(forward, tuple(backward), gradients, watch.saved)
        for forward, backward, gradients in zip(between, watch.backward, watch.gradients, strict=True)
    )
    return Backward(reached[: len(results)], tuple(parts), watch.arrived)


class _Watch:
    """Sorts the ops of a backward pass by the part that they belong to, while hooks on tensors and nodes call it.

    Args:
        recording: of the mode of all tensors; its ops are collected here.
        parts: how many parts there are between regions.
        ends: identities of the model's outputs.

    Attributes:
        backward, gradients, saved: of `EagerPart`, the first two for each part.
        arrived: as in `Backward`.
    """

    def __init__(self, recording: Recording, parts: int, ends: Collection[int]) -> None:
        self.recording = recording
        self.ends = ends
        self.at = parts - 1  # the part whose ops run now
        self.left_loss = False
        self.numbers = itertools.count(1)
        self.backward: list[list[EagerCall]] = [[] for _ in range(parts)]
        self.gradients: list[dict[Edge, torch.Tensor]] = [{} for _ in range(parts)]
        self.saved: dict[int, tuple[torch.Tensor, ...]] = defaultdict(tuple)
        self.arrived: dict[int, torch.Tensor] = {}

    def hook_tensors(self, crossing: Sequence[torch.Tensor]) -> list[Any]:
        """Note the gradients of tensors that cross from one region or part to another."""
        distinct = {id(t): t for t in crossing if not t.is_leaf}
        return [t.register_hook(partial(self._arrives, key)) for key, t in distinct.items()]  # type: ignore[no-untyped-call]

    def hook_nodes(self, nodes: Iterable[Node]) -> list[Any]:
        """Note the tensors that autograd nodes of ops outside the regions save and return."""
        own = [n for n in nodes if "CompiledFunction" not in n.name() and "AccumulateGrad" not in n.name()]
        before = [node.register_prehook(partial(self._node_begins, node)) for node in own]
        return before + [node.register_hook(partial(self._node_ends, node)) for node in own]

    def hook_regions(self, regions: Sequence[RegionCall]) -> list[Any]:
        """Leave out the ops of the regions themselves."""
        handles: list[Any] = []
        for r, call in enumerate(regions):
            for node in {t.grad_fn for t in tensors_in(call.results) if t.grad_fn is not None}:
                if "CompiledFunction" in node.name():
                    handles.append(node.register_prehook(self._region_begins))
                    handles.append(node.register_hook(partial(self._region_ends, r)))
        return handles

    def collect(self) -> None:
        """Give the ops since the last call to the part that runs now."""
        self.backward[self.at].extend(self.recording.taken())

    def _arrives(self, key: int, gradient: torch.Tensor | None) -> None:
        if gradient is None:  # a node that asks for what did not arrive computes none for it
            return
        if key in self.ends and not self.left_loss:
            self.recording.taken()
            self.left_loss = True
        self.arrived[key] = gradient

    def _node_begins(self, node: Node, _: Any) -> None:
        self.recording.node = next(self.numbers)
        self.saved[self.recording.node] = tuple(tensors_in(saved_by(node)))

    def _node_ends(self, node: Node, gradients: Any, _: Any) -> None:
        self.recording.node = 0
        for (following, number), gradient in zip(node.next_functions, gradients, strict=True):
            if following is not None and gradient is not None:
                self.gradients[self.at].setdefault((following, number), gradient)

    def _region_begins(self, _: Any) -> None:
        self.collect()
        self.recording.pause()

    def _region_ends(self, r: int, _: Any, __: Any) -> None:
        self.recording.resume()
        self.at = r


def _nodes(roots: Sequence[torch.Tensor]) -> set[Node]:
    seen = {t.grad_fn for t in roots if t.grad_fn is not None}
    stack = list(seen)
    while stack:
        following = {node for node, _ in stack.pop().next_functions if node is not None} - seen
        seen |= following
        stack.extend(following)
    return seen
