"""The loss of a traced step, by what was seen of the loop, and the backward pass: ops that allocate as much."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from planner.capture.trace.loss_trace import LossFn, checked_loss, differentiable, find_loss, probable_loss, trains_less
from planner.core.call import bytes_of_elements, storages
from planner.core.layout import Order, memory_order, strides_in
from planner.core.loop import Loop
from planner.core.objects import leaves
from planner.eager.record import Recorder
from planner.errors import ModelError


def wait(
    outputs: list[Any], losses: list[torch.Tensor], made: list[torch.Tensor], loss_fn: LossFn | None, loop: Loop
) -> None:
    """The last of the outputs is of a call that waits while others of the step run.

    Its loss, where it has one by then, takes its place among the losses; enters what the loop has made of it.
    """
    seen = loop.loss
    loss = _own_loss(outputs[-1], loss_fn, loop)
    if seen is not None:
        allocate(max(seen.between, seen.between_later))
        made += held(seen.made)
    if loss is None and seen is not None and not seen.waiting:
        results, shapes = _reached(outputs[-1:], loop)
        loss = _Outside.apply(lambda: _gradients(shapes), *results)  # type: ignore[no-untyped-call]
    if loss is not None:
        outputs.pop()
        losses.append(loss)


def differentiate(
    outputs: list[Any],
    losses: list[torch.Tensor],
    loss_fn: LossFn | None,
    recorder: Recorder,
    loop: Loop,
    earlier: list[torch.Tensor],
    given: list[torch.Tensor],
    parameters: Sequence[torch.Tensor],
) -> None:
    """The loss and the backward pass; where the loop keeps graphs, the one of its passes that holds most, and the last.

    Args:
        outputs: of the last call, and of earlier ones that have no loss of their own; they go as the loop lets go of
            them.
        losses: of other calls.
        loss_fn: as in `plan()`.
        recorder: of the step.
        loop: what was seen of it.
        earlier: gradients of earlier steps, which go when the loss is there, or a backward pass adds to `.grad`.
        given: those that the loop gave in the step before, which go when it has others.
        parameters: those that are trained, whose gradients are no `.grad` where `torch.autograd.grad` returns them.
    """
    recorder.output_bytes = bytes_of_elements(leaves(outputs[-1]))
    seen, loss = loop.loss, _own_loss(outputs[-1], loss_fn, loop)
    if seen is not None and len(outputs) + len(losses) == 1:  # else it was recorded with the outputs of the first call
        seen = seen.of(recorder.output_bytes)
    results, shapes = _reached(outputs, loop) if loss is None else ([], [])
    if loss is None and not results:
        raise ModelError("no output of the model depends on a parameter that needs a gradient")
    if seen is not None and earlier:
        allocate(max(seen.computed, seen.computed_later))
    if not loop.asks_first:
        earlier.clear()
    if seen is not None:
        allocate(seen.forward)
    if loop.outputs_held is not None:
        outputs[:] = [t for each in outputs for at, t in enumerate(leaves(each)) if at in loop.outputs_held]
    if loss is not None:
        given.clear()
        left = [] if seen is None else [allocate(seen.left)]
        recorder.phase = "backward"
    else:
        size = sum(storages(results).values())
        # every output may get a gradient; a loss may hold as much, and need as much again for a moment
        after, most = (size + 16, 3 * size + 16) if seen is None else (seen.left, seen.backward)
        left, pinned = [allocate(after)], seen is None or seen.holds_tangents

        def differentiated() -> tuple[torch.Tensor, ...]:
            gradients = _gradients(shapes)
            allocate(most - after - sum(storages(gradients).values()))
            given.clear()
            recorder.phase = "backward"
            left[1:] = gradients if pinned else ()
            return gradients

        loss = _Outside.apply(differentiated, *results)  # type: ignore[no-untyped-call]
        results.clear()
    losses.append(loss)
    with torch.autograd.set_detect_anomaly(False):  # gradients without values have any
        asked = loop.graph_retained and loop.asks_first  # other gradients than those in `.grad`, which passes add to
        for keeps in (True, False) if loop.graph_retained else (False,):
            if not keeps:
                earlier.clear()
            beside = held((loop.kept_beside if keeps else loop.freed_beside or 0) if asked else 0)
            others = parameters if asked and keeps else ()
            before = [p.grad for p in others]
            torch.autograd.backward(losses, list(map(torch.ones_like, losses)), retain_graph=keeps)
            beside.clear()
            for p, gradient in zip(others, before, strict=True):
                p.grad = gradient
            before.clear()


class _Outside(torch.autograd.Function):
    """A loss outside the model, of no bytes, which holds none of the gradients that it makes."""

    @staticmethod
    def forward(ctx: Any, differentiated: Callable[[], tuple[torch.Tensor, ...]], *results: torch.Tensor) -> Any:
        ctx.differentiated = differentiated
        return results[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return (None, *ctx.differentiated())


def _own_loss(output: Any, loss_fn: LossFn | None, loop: Loop) -> torch.Tensor | None:
    """The model's own loss, or that of a function until the loop's was seen; None where other outputs get gradients."""
    if loss_fn is not None:
        return checked_loss(loss_fn, output) if loop.loss is None else None
    found = probable_loss(output) if loop.only_loss else None
    if found is not None:
        return found[2]
    loss = find_loss(output)
    return None if loss is None or loop.beside_loss or trains_less(loss, output) else loss


_Shape = tuple[torch.Size, list[int], torch.dtype, torch.device]


def _reached(outputs: list[Any], loop: Loop) -> tuple[list[torch.Tensor], list[_Shape]]:
    """The outputs that get a gradient, and how that is laid out: as it came, else as the output is."""
    results, orders = [], dict(loop.laid_out)
    shapes: list[_Shape] = []
    for each in outputs:
        for at, t in enumerate(leaves(each)):
            if differentiable(t) and at not in loop.unreached:
                results.append(t)
                shapes.append((t.shape, _strides(t, orders.get(at)), t.dtype, t.device))
    return results, shapes


def _strides(t: torch.Tensor, order: Order | None) -> list[int]:
    own = memory_order(t)
    whole = len(own) == sum(n > 1 for n in t.shape)
    return strides_in(order if order is not None else own if whole else range(t.dim()), t.shape)


def _gradients(shapes: list[_Shape]) -> tuple[torch.Tensor, ...]:
    return tuple(torch.empty_strided(n, strides, dtype=dtype, device=d) for n, strides, dtype, d in shapes)


def held(nbytes: int) -> list[torch.Tensor]:
    """So many bytes, where there are any."""
    return [allocate(nbytes)] if nbytes else []


def allocate(nbytes: int) -> torch.Tensor:
    """A tensor of so many bytes."""
    return torch.empty(max(0, nbytes), dtype=torch.float8_e5m2)  # small tensors of integers would be real
