"""Runs one training step on fake tensors and records it, with a choice of modules checkpointed as they will be."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from planner.capture.provenance import line_at
from planner.capture.trace.as_if_real import as_if_real
from planner.capture.trace.data_dependent import Answers
from planner.capture.trace.loss_trace import LossFn
from planner.capture.trace.module_state import containers_kept
from planner.compat.fake import FakeTensorMode
from planner.compat.modules import buffers_of, parameters_of
from planner.core.attributes import attributes_staying, kept_as_attributes
from planner.core.call import storages
from planner.core.computed import as_computed
from planner.core.loop import Loop, LossSeen
from planner.core.objects import with_tensors
from planner.core.recipe import Choice
from planner.devices.accelerator import random_state_kept
from planner.eager.checkpointing import checkpointed
from planner.eager.loss import differentiate, held, wait
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

    def let_go(self) -> None:
        """Free what its frames hold, the batch among it: some of torch's refer to the error, in cycles."""
        error: BaseException | None = self
        while error is not None:
            traceback.clear_frames(error.__traceback__)
            error = error.__cause__


def trace_step(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    mode: FakeTensorMode,
    answers: Answers,
    loss_fn: LossFn | None,
    choice: Choice | None = None,
    accumulate: bool = False,
    shard: int = 1,
    detailed: bool = False,
    loop: Loop = Loop(),  # noqa: B008 (it is frozen)
    calls: int = 1,
    left: int = 0,
) -> Trace:
    """Run one step as a training loop does: the output is held until the backward pass has ended.

    Args:
        model: on fake tensors; its attributes are as before afterwards.
        args: positional arguments, fake.
        kwargs: keyword arguments, fake.
        mode: the fake tensors' mode.
        answers: what the step is told of values.
        loss_fn: as in `plan()`.
        choice: what is checkpointed.
        accumulate: whether gradients are there already.
        shard: how many devices share each gradient, once it is made.
        detailed: record what autograd saves, and source lines.
        loop: what the training loop was seen to do with the output, and to make for the loss.
        calls: of the model, all of which wait for one backward pass.
        left: bytes that the last step's outputs, which the loop holds, keep in their graphs.

    Raises:
        StepFailed: the step raised.
        BatchError: the loss function does not suit the output.
    """
    recorder, attributes, kept = Recorder(mode, answers, detailed), dict[str, int](), kept_as_attributes(model)
    shards: list[torch.Tensor] = []
    still, elements = 0, 0

    def keep_share(p: torch.Tensor) -> None:
        if p.grad is not None:
            shards.append(torch.empty(-(-p.grad.numel() // shard), dtype=p.grad.dtype, device=p.grad.device))
            p.grad = None

    with ExitStack() as stack:
        stack.enter_context(_unchanged(model))
        stack.enter_context(containers_kept(model))
        for device in {p.device for p in model.parameters()}:
            stack.enter_context(random_state_kept(device))
        stack.enter_context(as_if_real())
        stack.enter_context(torch.enable_grad())
        torch.clear_autocast_cache()
        args, kwargs = _made_before(args, kwargs)
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
            with checkpointed(model, choice or Choice()) as given, recorder, hooks:
                there = sum(storages(parameters).values()) if loop.late is None else loop.late
                earlier = held(there) if loop.gradients == "cleared late" else []
                seen = loop.loss or LossSeen(0, 0, 0, 0, 0)
                named, gradients = held(seen.stays + left), held(seen.given)
                outputs: list[Any] = []
                losses: list[torch.Tensor] = []
                made: list[torch.Tensor] = []
                for _ in range(calls - 1):
                    outputs.append(model(*args, **kwargs))
                    wait(outputs, losses, made, loss_fn, loop)
                outputs.append(model(*args, **kwargs))
                attributes, elements = attributes_staying(model, kept), given.elements // calls
                named.clear()  # the names of the last step's outputs are taken over
                recorder.phase = "loss"
                differentiate(outputs, losses, loss_fn, recorder, loop, earlier, gradients, parameters)
                still = _let_go((outputs, losses), recorder) if seen.stays or seen.kept else 0
        except Exception as e:
            if recorder.phase == "loss":
                raise
            raise StepFailed(recorder.failed or "", _place(e)) from e
        finally:
            trace = replace(recorder.finished(), attributes=attributes, left=still, elements=elements)
            for p in parameters:
                p.grad = None
    return trace


def _let_go(results: Sequence[list[Any]], recorder: Recorder) -> int:
    """Let go of outputs and losses; the bytes that this frees beside their own: parts of the graph without a gradient,
    and what hooks and functions of the graph keep by themselves.
    """
    before, own = recorder.alive(), storages(results).keys()
    for each in results:
        each.clear()
    return sum(before[key] for key in before.keys() - recorder.alive().keys() - own)


def _made_before(args: Any, kwargs: Any) -> Any:
    """A call whose tensors that the loop has computed, with a gradient to get, get one: torch's fake ones refuse it."""
    memo = dict[int, Any]()

    def made(_: str, t: torch.Tensor) -> Any:
        if t.is_leaf:
            return t
        if id(t) not in memo:
            memo[id(t)] = as_computed(t)
        return memo[id(t)]

    return with_tensors(args, kwargs, made)


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
