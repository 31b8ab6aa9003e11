"""The loss outside the model as a plan counts it: as the loop's first step showed it, else as it was captured."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from planner.capture.regions.calls import Link
from planner.capture.regions.region import Region
from planner.capture.trace.step import TrainingGraph
from planner.core.call import bytes_of_elements
from planner.core.loop import Loop, LossSeen
from planner.costs.account import batch_of
from planner.costs.measured_ops import measure
from planner.costs.static_memory import batch_tensors, storage_bytes, trained_bytes
from planner.lowering.several import Between
from planner.requests.request import Request

# from torch 2.13 on, a compiled region may free a gradient that enters its backward pass while that runs
TANGENTS_FREED = hasattr(torch.autograd.Function, "boxed_grads_call")

_NONE = frozenset[tuple[int, int]]()
TAKEN_LEAST = (
    "A loss outside the model is taken to hold nothing but the gradients of outputs: with more the step does not fit. "
    "A training step shows whether that is so."
)


@dataclass(frozen=True, slots=True)
class CountedLoss:
    """What a loop holds between the passes of the planned graphs; sizes in bytes.

    Attributes:
        workspace: at most while the loss and its gradients are computed, beside the gradients of the model's outputs.
        left: from the loss to the end of the backward pass.
        waiting: what a microbatch that waits for its backward pass holds in the forward pass of another.
        excess: what is left of a microbatch whose backward pass has run.
        forward: at most until the loop has let go of the outputs that it does let go of, gradients among it.
        let_go: these outputs, as (region, result).
        at_once: of these, the ones that are gone before it computes anything.
        waited: of these, the ones that each waiting call holds, and that its backward pass may keep anyway.
        read: other tensors that the loss is computed from.
        stays: outputs of the step before, and gradients of them, which are still there in the forward pass.
        waiting_backward: what it holds in the backward pass of another: where one pass is that of all, the gradients of
            its outputs.
        inputs: of all calls whose backward passes come together; None where that was not seen.
        between: what the loop does between the calls of a step, where it makes several; None for one.
        more: of what the loop keeps of the step before, what is not counted as it was seen in steps with less output.
    """

    workspace: int
    left: int
    waiting: int
    excess: int = 0
    forward: int = 0
    let_go: frozenset[tuple[int, int]] = frozenset()
    at_once: frozenset[tuple[int, int]] = frozenset()
    waited: frozenset[tuple[int, int]] = frozenset()
    read: int = 0
    stays: int = 0
    waiting_backward: int = 0
    inputs: int | None = None
    between: Between | None = None
    more: int = 0


def outside_loss(request: Request, graph: TrainingGraph) -> CountedLoss:
    """The loss of a captured step, by what was seen of the loop; ops that were not seen are measured where they run."""
    loop, captured = request.loop, graph.loss
    held: Collection[int] = _held(loop, graph)
    if request.occupancy is not None and request.occupancy.sent:
        held = ()
    if _apart(request, graph):
        held = {*held}.difference(loop.outputs_late)
    let_go = frozenset(graph.outputs) - {graph.outputs[at] for at in held if at < len(graph.outputs)} - {None}
    gone = frozenset(result for result in let_go if result is not None)
    results = {result for result in graph.outputs if result is not None}
    given = results | _aside(graph, links_seen(loop, graph))
    tangents = _tangents(graph, given)
    if loop.loss is None:
        here, progress = request.measure_on, request.options.progress
        outside = measure(captured.calls, here, progress=progress) if here is not None else {}
        excess = sum(a.excess for a in outside.values())
        waits, left = captured.waiting + excess, captured.held + excess
        if request.in_flight > 1 and request.occupancy is None:  # names hold outputs and losses to the end
            kept = sum(_bytes_out(graph, *result) for result in {*graph.outputs} - gone if result is not None)
            excess += kept + captured.loss
        workspace = max(captured.workspace, captured.sums - sum(tangents.values()))
        return CountedLoss(workspace, left, waits, excess, let_go=gone, waiting_backward=waits)
    seen = loop.loss.of(graph.output_bytes)
    late = _late(graph, tangents, seen.tangents)
    arriving = sum(nbytes for (r, _), nbytes in tangents.items() if r >= sum(n for n, _ in graph.calls[:late]))
    several, seen = _apart(request, graph), seen if graph.calls else _as_one(seen)
    waited = _waited(loop, graph, gone) if several and seen.waiting else _NONE
    together = several and seen.together
    if together:  # in whose place gradients of waiting calls come is there still: these come later, one after another
        seen = replace(seen, left=seen.left + seen.parts)
    forward, backward = seen.forward, seen.backward
    if loop.gradients == "cleared late":  # until the backward pass of the loss begins, the last step's gradients stay
        used = trained_bytes(request.model) if loop.late is None else loop.late
        # of several calls, outputs of one are there when those of another have gone
        computed = max(seen.computed, seen.computed_later) if graph.calls else seen.computed
        forward, backward = max(computed, forward - used), max(seen.computed_later + used, backward)
    others = max(0, seen.tangents - arriving) if loop.in_flight > 1 else 0
    # gradients that the loop gave in the step before are there until the new ones are
    forward, backward = forward + seen.given, backward + seen.given
    workspace = max(0, max(backward - seen.left, captured.sums) - arriving - others)
    kept = sum(_bytes_out(graph, r, at) for r, at in results - gone)
    held_waiting = kept + sum(_bytes_out(graph, r, at) for r, at in waited)
    waits = max(0, seen.waiting - held_waiting)
    each = -(-others // (loop.in_flight - 1)) if others else waits  # else each call has a backward pass of its own
    named = max(0, seen.later - held_waiting * (loop.in_flight - 1)) if together else 0
    # a plan may recompute from inputs that nothing held; calls of which each has what another one gave add gradients up
    dropped = _dropped(request, seen) if several else 0
    # but for those that are outputs of earlier calls, as far as these count
    handed_on = min(seen.handed_on, (held_waiting + waits) * (loop.in_flight - 1))
    inputs = -(-max(0, dropped - handed_on) // max(1, loop.in_flight - 1))
    # one that has run waits no more, but for what it adds to the gradients of the next
    summed = max(0, _summed(request, seen) - max(0, seen.waiting - kept) - seen.made - inputs) if several else 0
    return CountedLoss(
        workspace,
        seen.left + named + summed + (seen.output_bytes if dropped else 0),
        waits + seen.made + inputs,
        excess=kept if loop.in_flight > 1 and not graph.calls else 0,  # names hold the outputs after each backward pass
        forward=forward,
        let_go=gone,
        at_once=gone & _at_once(loop, graph),
        waited=waited,
        read=seen.read,
        stays=seen.stays + seen.given,
        waiting_backward=each + inputs,
        inputs=_inputs(request, seen) if request.occupancy is None and (loop.in_flight > 1 or graph.calls) else None,
        between=_between(graph, seen, results - gone, late, workspace) if graph.calls else None,
        more=max(0, seen.kept - loop.loss.kept),
    )


def _apart(request: Request, graph: TrainingGraph) -> bool:
    """Whether calls of the model wait together for backward passes, and each has a plan of its own."""
    return request.occupancy is None and request.loop.in_flight > 1 and not graph.calls


def links_seen(loop: Loop, graph: TrainingGraph) -> tuple[Link, ...]:
    """The links of a step: the loop holds those that it computes its loss from, as attributes of modules."""
    return tuple(replace(link, held=link.held or link.aside in loop.aside) for link in graph.links)


def _aside(graph: TrainingGraph, links: Sequence[Link]) -> set[tuple[int, int]]:
    """The results that no other graph takes, some of which code of the loop's own has: what forward hooks keep."""
    taken = {link.producer for link in links if not link.held}
    every = {(r, at) for r, region in enumerate(graph.regions) for at in range(len(region.fwd_outputs))}
    return every - taken


def _tangents(graph: TrainingGraph, given: Collection[tuple[int, int]]) -> dict[tuple[int, int], int]:
    """The gradients that the loss makes of results that it is given: for each (region, value), its bytes."""
    linked = [(link.producer, link.sums.outputs) for link in graph.links if link.producer and link.sums is not None]
    of_views = {each: outputs for of, outputs in linked for each in _tangent_of(graph, *of)}
    own = {each for r, at in given for each in _tangent_of(graph, r, at)}
    return {each: of_views.get(each, _bytes_of(graph, each)) for each in own}


def _tangent_of(graph: TrainingGraph, region: int, at: int) -> tuple[tuple[int, int], ...]:
    of = graph.regions[region]
    return tuple((region, v) for v in _values(of, of.tangent_at(at)))


def with_least_loss(graph: TrainingGraph) -> TrainingGraph | None:
    """The step if its loss, which is not known, held nothing but the gradients of outputs; None where it is known."""
    if graph.loss.source != "unknown":
        return None
    return replace(graph, loss=replace(graph.loss, workspace=0, held=0, waiting=0))


def _as_one(seen: LossSeen) -> LossSeen:
    """The loss as if what the loop does between its calls came after the last of them."""
    return replace(
        seen,
        forward=max(seen.forward, seen.between),
        computed=max(seen.computed, seen.between),
        backward=max(seen.backward, seen.between_later),
        computed_later=max(seen.computed_later, seen.between_later),
    )


def _held(loop: Loop, graph: TrainingGraph) -> Collection[int]:
    """Of the leaves of the outputs of all calls, those that the loop holds when the backward pass begins."""
    first = graph.calls[0][1] if graph.calls else len(graph.outputs)
    own = range(first) if loop.outputs_held is None else loop.outputs_held
    later = range(len(graph.outputs) - first) if loop.later_held is None else loop.later_held
    return {*own, *(first + at for at in later)}


def _waited(loop: Loop, graph: TrainingGraph, gone: frozenset[tuple[int, int]]) -> frozenset[tuple[int, int]]:
    """Of the outputs let go of, those that a waiting call holds until its backward pass, or that this pass reads."""
    late = {graph.outputs[at] for at in loop.outputs_late if at < len(graph.outputs)}
    return frozenset(result for result in gone if result in late or _is_saved(graph, *result))


def _at_once(loop: Loop, graph: TrainingGraph) -> set[tuple[int, int] | None]:
    """The outputs that the loop lets go of before it computes anything, where it makes one call of the model."""
    alone = not graph.calls and loop.in_flight == 1
    return {graph.outputs[at] for at in loop.at_once if alone and at < len(graph.outputs)}


def _late(graph: TrainingGraph, tangents: Mapping[tuple[int, int], int], there: int) -> int:
    """Of how many of the first calls of a step the gradients of outputs come later than those of the last, of which so
    many bytes were there as the backward pass began.
    """
    late, last = 0, sum(n for n, _ in graph.calls)
    for call, (regions, _) in reversed(list(enumerate(graph.calls))):
        there -= sum(nbytes for (r, _), nbytes in tangents.items() if last - regions <= r < last)
        if there < 0 and call < len(graph.calls) - 1:
            late = call + 1
            break
        last -= regions
    return late


def _between(
    graph: TrainingGraph,
    seen: LossSeen,
    kept: Collection[tuple[int, int]],
    late: int,
    workspace: int,
) -> Between:
    earlier, last = len(graph.calls) - 1, len(graph.regions) - graph.calls[-1][0]
    stays = sum(_bytes_out(graph, r, at) for r, at in kept if r < last)
    return Between(
        tuple(regions for regions, _ in graph.calls),
        seen.made * earlier,
        seen.waiting * earlier <= stays,
        late,
        max(seen.between, seen.between_later),
        workspace,
    )


def _summed(request: Request, seen: LossSeen) -> int:
    """Bytes of the gradients of inputs that calls have in common, which their backward passes add up one by one."""
    graded = (t for t in batch_tensors(*batch_of(request), request.model_device) if t.requires_grad)
    return min(storage_bytes(graded), seen.given_again // (request.loop.in_flight - 1))


def _dropped(request: Request, seen: LossSeen) -> int:
    """Bytes of inputs of calls that wait together which were gone before the last of them came; where the request has
    no batch, of as large ones as were seen.
    """
    one = bytes_of_elements(batch_tensors(*batch_of(request), request.model_device)) or seen.first_input
    return max(0, request.loop.in_flight * one - seen.given_again - seen.inputs)


def _inputs(request: Request, seen: LossSeen) -> int | None:
    one = storage_bytes(batch_tensors(*batch_of(request), request.model_device))
    return max(one, seen.inputs, -(-seen.inputs * one // seen.first_input)) if seen.first_input else None


def pinned_tangents(request: Request, graph: TrainingGraph) -> Literal["all", "loss", "none"]:
    """The gradients that come into the graphs and that others hold, by the loss's `source` and what was seen of it.

    `loss.backward()` holds that of the model's own loss, a pipeline's schedule each that it receives, a loop those that
    it gives itself, as in `output.backward(gradient)`, and autograd one that another node gets as well.
    """
    source, seen = graph.loss.source, request.loop.loss
    if source == "received" or not TANGENTS_FREED or (seen is not None and seen.holds_tangents):
        return "all"
    if seen is not None and seen.together and _apart(request, graph) and 2 * seen.held > seen.output_bytes:
        return "all"
    return "loss" if source == "model" else "none"


def more_of_loss(request: Request, seen: Loop, graph: TrainingGraph) -> list[int]:
    """Bytes by which the parts of the loss as it was seen take more than a plan for the request counts; or less."""
    now, then = outside_loss(request, graph), outside_loss(replace(request, loop=seen), graph)
    sizes = [(now.left, then.left), (now.read, then.read), (now.stays, then.stays)]
    others = (now.let_go ^ then.let_go) | (now.at_once ^ then.at_once)
    sizes.append((0, sum(graph.regions[r].values[v].nbytes for r, at in others for v in _values_out(graph, r, at))))
    # inputs of other calls are there as such, or wait with these
    calls, inputs = (request.loop.in_flight - 1, seen.in_flight - 1), (now.inputs or 0, then.inputs or 0)
    sizes.append((inputs[0] + calls[0] * now.waiting, inputs[1] + calls[1] * then.waiting))
    sizes.append((inputs[0] + calls[0] * now.waiting_backward, inputs[1] + calls[1] * then.waiting_backward))
    sizes.append((_most_at_once(now), _most_at_once(then)))
    return [b - a for a, b in sizes]


def _most_at_once(loss: CountedLoss) -> int:
    return max(loss.workspace, loss.forward if loss.let_go else 0)


def _bytes_of(graph: TrainingGraph, value: tuple[int, int]) -> int:
    region, v = value
    return graph.regions[region].values[v].nbytes


def _bytes_out(graph: TrainingGraph, region: int, at: int) -> int:
    return sum(_bytes_of(graph, (region, v)) for v in _values_out(graph, region, at))


def _is_saved(graph: TrainingGraph, region: int, at: int) -> bool:
    """Whether the backward pass of its graph reads a result."""
    of, values = graph.regions[region], {*_values_out(graph, region, at)}
    return any(values.intersection(op.reads) for op in of.ops[of.boundary :])


def _values_out(graph: TrainingGraph, region: int, at: int) -> tuple[int, ...]:
    return _values(graph.regions[region], graph.regions[region].output_at(at))


def _values(region: Region, node: object) -> tuple[int, ...]:
    return region.values_in([node]) if node is not None else ()
