"""The backward pass of a step under fake tensors: what arrives where, and what runs outside the regions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import Node, get_gradient_edge

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
        backward: those of its backward pass; what autograd adds up is left out.
        gradients: what its backward pass makes for what it has read, by the edge of autograd's graph.
        saved: what autograd nodes saved, by their numbers.
    """

    forward: tuple[EagerCall, ...]
    backward: tuple[EagerCall, ...]
    gradients: Mapping[Edge, torch.Tensor]
    saved: Mapping[int, tuple[torch.Tensor, ...]]


@dataclass(frozen=True)
class Backward:
    """What a backward pass showed.

    Attributes:
        reached: the gradients of the results that were asked for, as `torch.autograd.grad` returns them.
        parts: what ran before each region, and after the last.
        arrived: the gradients of tensors that regions and parts make, by the tensor's identity.
    """

    reached: tuple[torch.Tensor | None, ...]
    parts: tuple[EagerPart, ...]
    arrived: Mapping[int, torch.Tensor]


def edge_of(t: torch.Tensor) -> Edge:
    """Where autograd's graph takes the gradient of a tensor."""
    edge = get_gradient_edge(t)
    return edge.node, edge.output_nr


def reads(calls: Sequence[EagerCall]) -> tuple[torch.Tensor, ...]:
    """The tensors that ops take from elsewhere, each once."""
    known: set[int] = set()
    found = []
    for call in calls:
        for t in tensors_in((call.args, call.kwargs)):
            if id(t) not in known:
                known.add(id(t))
                found.append(t)
        known.update(id(t) for t in tensors_in(call.result))
    return tuple(found)


def watch_backward(
    recording: Recording,
    regions: Sequence[RegionCall],
    between: Sequence[tuple[EagerCall, ...]],
    roots: Sequence[torch.Tensor],
    arriving: Sequence[torch.Tensor] | None,
    results: Sequence[torch.Tensor],
    ends: Sequence[torch.Tensor],
) -> Backward:
    """Run the backward pass, and watch.

    Args:
        recording: of the mode of all tensors.
        regions: the calls that have a gradient.
        between: what ran before each of them, and after the last.
        roots: where the backward pass begins.
        arriving: the gradients of the roots; None for a scalar's.
        results: what gradients are asked for.
        ends: the model's outputs; what runs before a gradient arrives there belongs to the loss.
    """
    backward: list[list[EagerCall]] = [[] for _ in between]
    gradients: list[dict[Edge, torch.Tensor]] = [{} for _ in between]
    saved: dict[int, tuple[torch.Tensor, ...]] = defaultdict(tuple)
    arrived: dict[int, torch.Tensor] = {}
    at = len(regions)  # the part whose ops run now
    begun = False
    numbers = iter(range(1, 1 << 60))
    last = {id(t) for t in ends}
    read = [t for calls in between for t in reads(calls) if t.requires_grad]
    made = [t for call in regions for t in tensors_in(call.results) if t.requires_grad]
    taken = [t for call in regions for t in tensors_in(call.inputs) if t.requires_grad]

    def arrives(key: int, gradient: torch.Tensor) -> None:
        nonlocal begun
        if key in last and not begun:
            recording.taken()
            begun = True
        arrived[key] = gradient

    def collect() -> None:
        backward[at].extend(call for call in recording.taken() if call.node or call.target not in _SUMS)

    def node_begins(_: Any, node: Node) -> None:
        recording.node = next(numbers)
        saved[recording.node] = tuple(tensors_in(saved_by(node)))

    def node_ends(made: Any, _: Any, node: Node) -> None:
        recording.node = 0
        for (following, number), gradient in zip(node.next_functions, made, strict=True):
            if following is not None and gradient is not None:
                gradients[at].setdefault((following, number), gradient)

    def region_begins(_: Any) -> None:
        collect()
        recording.pause()

    def region_ends(_: Any, __: Any, r: int) -> None:
        nonlocal at
        recording.resume()
        at = r

    crossing = {id(t): t for t in (*read, *made, *taken, *ends) if not t.is_leaf}
    hooks = [(t, partial(arrives, key)) for key, t in crossing.items()]
    handles = [t.register_hook(hook) for t, hook in hooks]  # type: ignore[no-untyped-call]
    for node in _nodes(roots):
        if "CompiledFunction" not in node.name() and "AccumulateGrad" not in node.name():
            handles.append(node.register_prehook(partial(node_begins, node=node)))
            handles.append(node.register_hook(partial(node_ends, node=node)))
    for r, call in enumerate(regions):
        for node in {t.grad_fn for t in tensors_in(call.results) if t.grad_fn is not None}:
            if "CompiledFunction" in node.name():
                handles += [node.register_prehook(region_begins), node.register_hook(partial(region_ends, r=r))]
    leaves = [t for t in read if t.is_leaf]
    recording.resume()
    try:
        reached = torch.autograd.grad(roots, [*results, *leaves], arriving, allow_unused=True)
    finally:
        recording.pause()
        recording.node = 0
        for handle in handles:
            handle.remove()
    collect()
    parts = (
        EagerPart(forward, tuple(back), own, saved)
        for forward, back, own in zip(between, backward, gradients, strict=True)
    )
    return Backward(reached[: len(results)], tuple(parts), arrived)


def _nodes(roots: Sequence[torch.Tensor]) -> set[Node]:
    seen = {t.grad_fn for t in roots if t.grad_fn is not None}
    stack = list(seen)
    while stack:
        following = {node for node, _ in stack.pop().next_functions if node is not None} - seen
        seen |= following
        stack.extend(following)
    return seen
