"""What no gradient was seen to come to, and plans leave out: gradients of outputs, optimizer state of parameters."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from torch import fx, nn

from planner.capture.joint_graph import index_of
from planner.capture.trace.step import TrainingGraph
from planner.core.loop import Loop
from planner.requests.request import Request


def cut_outputs(graph: TrainingGraph, detached: Mapping[str, Collection[int]]) -> frozenset[int]:
    """Positions of the leaves of the output that get no gradient, where these results of Dynamo graphs get none."""
    regions = ((r, key) for key, order in graph.order.items() for r in order if r is not None)
    cut = {(r, at) for r, key in regions for at in detached.get(key, ())}
    return frozenset(at for at, result in enumerate(graph.outputs) if result in cut)


def beside_loss(graph: TrainingGraph | None, seen: Loop, before: Loop) -> tuple[int, ...]:
    """The outputs that were seen to get a gradient, and that a plan took to get none, as this one or one before it."""
    cut = () if graph is None else cut_outputs(graph, graph.detached)
    return tuple(at for at in seen.beside_loss if at in cut or at in before.beside_loss)


def worth_leaving_out(graph: TrainingGraph | None, seen: Loop, tolerance: int) -> tuple[int, ...]:
    """The outputs that were seen to get no gradient and whose gradients a plan may leave out; none for a few bytes."""
    fed = {} if graph is None else {at: nbytes for at, nbytes in graph.fed.items() if at in seen.unreached}
    return tuple(sorted(fed)) if sum(fed.values()) > tolerance else ()


def given_aside(graph: TrainingGraph | None, seen: Loop) -> tuple[int, ...]:
    """Of the results that the loop has as attributes and computes its loss from, those that other graphs take."""
    taken = seen.aside if graph is None else [link.aside for link in graph.links]
    return tuple(at for at in seen.aside if at in taken)


def worth_not_counting(graph: TrainingGraph | None, seen: Loop, model: nn.Module, tolerance: int) -> tuple[str, ...]:
    """The parameters that were seen to have no optimizer state and get none from a step; none for a few bytes."""
    names = () if graph is None else _untrained(graph, seen.stateless)
    return names if sum(model.get_parameter(name).nbytes for name in names) > tolerance else ()


def counting_trained(request: Request, graph: TrainingGraph) -> Request:
    """The request for a captured step, which counts the optimizer state of all parameters that the step trains."""
    stateless = _untrained(graph, request.loop.stateless)
    return replace(request, loop=replace(request.loop, stateless=stateless))


def guesses(request: Request, graph: TrainingGraph) -> Iterator[tuple[Request, str]]:
    """What a loop may be like whose first step shows it, for a step that does not fit otherwise; with words for a note.

    Each has the guess before it as well.
    """
    loop, sees = request.loop, "with them the step does not fit. A training step shows whether that is so."
    names = [name for name, p in request.model.named_parameters() if p.requires_grad]
    if request.optimizers and (stateless := _untrained(graph, names)):
        loop = replace(loop, stateless=stateless)
        what = "Parameters that no gradient of this step is for are taken to have no optimizer state"
        yield replace(request, loop=loop), f"{what}: {sees}"
    if not graph.fed.keys() <= set(loop.unreached):
        held = tuple(at for at in range(len(graph.outputs)) if at not in graph.fed)
        loop = replace(loop, unreached=tuple(sorted(graph.fed)), outputs_held=held)
        what = "Outputs that others are computed from are taken to get no gradient, and not to be held"
        yield replace(request, loop=loop), f"{what}: {sees}"


def _untrained(graph: TrainingGraph, names: Collection[str]) -> tuple[str, ...]:
    """Those of these parameters that no gradient of a captured step is for. What runs as without a plan, as by values
    that each step has anew, may train all that is in it.
    """
    if not names:
        return ()
    trained, apart = _trained(graph), tuple(f"{path}." if path else "" for path in graph.paths.apart)
    return tuple(name for name in names if name not in trained and not name.startswith(apart))


def _trained(graph: TrainingGraph) -> set[str]:
    """The parameters that the backward passes of the regions compute gradients of, or that ops outside graphs read."""
    computed = [
        {index_of(n.meta.get("desc")) for n, grad in zip(r.primals, r.grads, strict=False) if isinstance(grad, fx.Node)}
        for r in graph.regions
    ]
    outside = {r for r, region in enumerate(graph.regions) if not region.fingerprint}
    return {name for (r, at), name in graph.parameters.items() if r in outside or at in computed[r]}
