"""Runs one training step on fake tensors and records it, with a choice of modules checkpointed as they will be."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from planner.capture.provenance import line_at
from planner.capture.trace.loss_trace import LossFn, checked_loss, differentiable, find_loss, probable_loss
from planner.compat.fake import FakeTensorMode
from planner.compat.modules import buffers_of, parameters_of
from planner.core.call import bytes_of_elements, storages
from planner.core.layout import Order, memory_order, strides_in
from planner.core.loop import Loop
from planner.core.objects import leaves
from planner.core.recipe import Choice
from planner.devices.accelerator import random_state_kept
from planner.eager.checkpointing import checkpointed
from planner.eager.record import Recorder
from planner.eager.trace import Trace
from planner.errors import NOT_THE_USERS


class StepFailed(Exception):
    """A step that raised; the cause is what it raised.

    Attributes:
        module: path of the innermost module that was running.
        place: the user's line, where known.
    """

    def __init__(self, module: str, place: str) -> None:
        super().__init__(module, place)
        self.module = module
        self.place = place


def trace_step(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    mode: FakeTensorMode,
    loss_fn: LossFn | None,
    choice: Choice | None = None,
    accumulate: bool = False,
    shard: int = 1,
    detailed: bool = False,
    loop: Loop = Loop(),  # noqa: B008 (it is frozen)
) -> Trace:
    """Run one step as a training loop does: the output is held until the backward pass has ended.

    Args:
        model: on fake tensors; its attributes are as before afterwards.
        args: positional arguments, fake.
        kwargs: keyword arguments, fake.
        mode: the fake tensors' mode.
        loss_fn: as in `plan()`.
        choice: what is checkpointed.
        accumulate: whether gradients are there already.
        shard: how many devices share each gradient, once it is made.
        detailed: record what autograd saves, and source lines.
        loop: what the training loop was seen to do with the output, and to make for the loss.

    Raises:
        StepFailed: the step raised.
        BatchError: the loss function does not suit the output.
    """
    recorder = Recorder(mode, detailed)
    shards: list[torch.Tensor] = []

    def keep_share(p: torch.Tensor) -> None:
        if p.grad is not None:
            shards.append(torch.empty(-(-p.grad.numel() // shard), dtype=p.grad.dtype, device=p.grad.device))
            p.grad = None

    with ExitStack() as stack:
        stack.enter_context(_unchanged(model))
        for device in {p.device for p in model.parameters()}:
            stack.enter_context(random_state_kept(device))
        stack.enter_context(torch.enable_grad())
        torch.clear_autocast_cache()
        parameters = [p for p in model.parameters() if p.requires_grad]
        for p in parameters:
            p.grad = torch.zeros_like(p) if accumulate else None
            if shard > 1 and not accumulate:
                hook = p.register_post_accumulate_grad_hook(keep_share)  # type: ignore[no-untyped-call]
                stack.callback(hook.remove)
        for path, module in model.named_modules():
            vars(module)["forward"] = recorder.marked(path, module)
        hooks = saved_tensors_hooks(recorder.pack, recorder.unpack) if detailed else nullcontext()
        try:
            with checkpointed(model, choice or Choice()), recorder, hooks:
                late = loop.gradients == "cleared late"
                earlier = [_allocate(sum(storages(parameters).values()))] if late else []
                named, given = ([], []) if loop.loss is None else map(_held, (loop.loss.stays, loop.loss.given))
                outputs = [model(*args, **kwargs)]
                named.clear()  # the names of the last step's outputs are taken over
                recorder.phase = "loss"
                _differentiate(outputs, loss_fn, recorder, loop, earlier, given)
        except Exception as e:
            if recorder.phase == "loss":
                raise
            raise StepFailed(recorder.failed or "", _place(e)) from e
        finally:
            trace = recorder.finished()
            for p in parameters:
                p.grad = None
    return trace


def _differentiate(
    outputs: list[Any],
    loss_fn: LossFn | None,
    recorder: Recorder,
    loop: Loop,
    earlier: list[torch.Tensor],
    given: list[torch.Tensor],
) -> None:
    """The loss and the backward pass from the only one of the outputs, which goes as the loop lets go of it; gradients
    of earlier steps go when the loss is there, those that the loop gave when it has others.
    """
    ends = leaves(outputs[0])
    size = recorder.output_bytes = bytes_of_elements(ends)
    seen = None if loop.loss is None else loop.loss.of(size)
    if loss_fn is None:
        loss = _own_loss(outputs[0], loop)
    else:
        loss = checked_loss(loss_fn, outputs[0]) if seen is None else None
    results = [t for at, t in enumerate(ends) if differentiable(t) and at not in loop.unreached]
    orders = {id(ends[at]): order for at, order in loop.laid_out if at < len(ends)}
    if seen is not None and earlier:
        _allocate(max(seen.computed, seen.computed_later))
    earlier.clear()
    if seen is not None:
        _allocate(seen.forward)
    if loop.outputs_held is not None:
        outputs[:] = [t for at, t in enumerate(ends) if at in loop.outputs_held]
    ends.clear()
    if loss is not None:
        results.clear()
        given.clear()
        kept = None if seen is None else _allocate(seen.left)
        recorder.phase = "backward"
        loss.backward()  # type: ignore[no-untyped-call]
        del kept
        return
    size = sum(storages(results).values())
    # every output may get a gradient; a loss may hold as much, and need as much again for a moment
    left, most = (size + 16, 3 * size + 16) if seen is None else (seen.left, seen.backward)
    held, pinned = [_allocate(left)], seen is None or seen.holds_tangents
    shapes = [(t.shape, _strides(t, orders.get(id(t))), t.dtype, t.device) for t in results]

    def differentiated() -> tuple[torch.Tensor, ...]:
        gradients = tuple(torch.empty_strided(*like, dtype=dtype, device=d) for *like, dtype, d in shapes)
        _allocate(most - left - sum(storages(gradients).values()))
        given.clear()
        recorder.phase = "backward"
        held.extend(gradients if pinned else ())
        return gradients

    loss = _Outside.apply(differentiated, *results)  # type: ignore[no-untyped-call]
    results.clear()
    torch.autograd.backward(loss, loss.detach())


def _own_loss(output: Any, loop: Loop) -> torch.Tensor | None:
    """The model's own loss; None where it has none, or other outputs get gradients as well."""
    found = probable_loss(output) if loop.only_loss else None
    return find_loss(output) if found is None else found[2]


def _strides(t: torch.Tensor, order: Order | None) -> list[int]:
    """Those of a gradient of an output, in the layout that it came in, else in the output's own."""
    own = memory_order(t)
    whole = len(own) == sum(n > 1 for n in t.shape)
    return strides_in(order if order is not None else own if whole else range(t.dim()), t.shape)


class _Outside(torch.autograd.Function):
    """A loss outside the model, of no bytes, which holds none of the gradients that it makes."""

    @staticmethod
    def forward(ctx: Any, differentiated: Callable[[], tuple[torch.Tensor, ...]], *results: torch.Tensor) -> Any:
        ctx.differentiated = differentiated
        return results[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return (None, *ctx.differentiated())


def _held(nbytes: int) -> list[torch.Tensor]:
    return [_allocate(nbytes)] if nbytes else []


def _allocate(nbytes: int) -> torch.Tensor:
    return torch.empty(max(0, nbytes), dtype=torch.float8_e5m2)  # small tensors of integers would be real


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Puts the attributes of all modules back, as far as they were set."""
    modules = [m for m in model.modules() if not isinstance(m, torch.jit.ScriptModule)]
    tables = [t for m in modules for t in (vars(m), buffers_of(m), parameters_of(m))]
    before = [dict(t) for t in tables]
    try:
        yield
    finally:
        for table, saved in zip(tables, before, strict=True):
            table.clear()
            table.update(saved)


def _place(error: Exception) -> str:
    own = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(NOT_THE_USERS)]
    return line_at(own[-1].filename, own[-1].lineno or 0) if own else ""
