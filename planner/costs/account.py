"""The lines of the budget that are held all the time, as a request has them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn, optim

from planner.capture.shapes import enlarged
from planner.compat.fake import FakeTensorMode
from planner.compat.tensors import storage_key
from planner.core.account import ATTRIBUTES, BATCH, FROZEN_NOW
from planner.core.call import storages
from planner.core.loop import Loop
from planner.core.options import GB
from planner.core.plan import EARLIER, PlannedStep, PlanRecord
from planner.costs.optimizer import OptimizerMemory, optimizer_memory
from planner.costs.static_memory import account, batch_tensors, storage_bytes
from planner.errors import OptionError
from planner.parallel.group import communication_buffers, world_size
from planner.parallel.sharded import parameters_of
from planner.requests.optimizers import trained_by
from planner.requests.request import Request

OPTIMIZER_STATE = "optimizer state"
OPTIMIZER_STEP = "optimizer step"  # a line that can be set, and is not held all the time
FROZEN = "gradients of parameters that are trained no longer"
INDEX = 8  # bytes of an entry's index
OTHERS = "other tensors of the training loop"


def account_of(request: Request) -> tuple[dict[str, int], int | None]:
    """The lines, fragmentation apart: name -> bytes; bytes of the optimizer's step, None where it is not counted."""
    given = _given(request)
    state, step = optimizers_take(request)
    args, kwargs = batch_of(request)
    lines = account(
        request.model,
        args,
        kwargs,
        request.device,
        optimizer_state=state,
        accumulate=request.accumulates and not request.gradients_viewed,
        shard=request.options.shard,
    )
    if EARLIER in lines:
        lines[EARLIER] += sum(n * (p.nbytes // len(p) + INDEX) - p.nbytes for p, n in _sparse(request))
    if request.occupancy is None and request.in_flight > 1:
        lines[BATCH] = _batches(args, kwargs, request)
    lines |= request.beside
    if frozen := _of_frozen(request):
        lines[FROZEN] = frozen
    if frozen := _of_frozen(request, cleared=True):
        lines[FROZEN_NOW] = frozen
    if buffers := communication_buffers(request.model_device):
        lines["NCCL buffers"] = buffers
    if others := request.loop.others:
        lines[OTHERS] = others
    given.pop(OPTIMIZER_STEP, None)
    return {**lines, **given}, step


def attributes_line(attributes: Mapping[str, int], replaced: Mapping[str, int], loop: Loop) -> dict[str, int]:
    """The line of tensors that modules keep as attributes, by name, without those that the loop's part has.

    Those that are replaced are in it: a plan may hold them longer than the loop was seen to.
    """
    of_loop = dict(loop.attributes)
    nbytes = sum(size for name, size in attributes.items() if name not in of_loop) + sum(replaced.values())
    return {ATTRIBUTES: nbytes} if nbytes else {}


def optimizers_take(request: Request) -> tuple[int, int | None]:
    """Bytes of the optimizers' state, and those of a step beside it, None where that is not counted."""
    given, takes = _given(request), _optimizers(request)
    state, step = (-(-size // request.options.shard) for size in (takes.state, takes.step))
    # in the backward pass, each parameter's step is an op of its own
    counted = OPTIMIZER_STEP in given or (bool(request.optimizers) and not request.options.step_in_backward)
    return given.get(OPTIMIZER_STATE, state), given.get(OPTIMIZER_STEP, step) if counted else None


def counts_optimizers(plan: PlanRecord, request: Request) -> bool:
    """Whether a plan counts what the optimizers of a request take: state, steps, gradients that they would clear."""
    counted = plan.account.get(OPTIMIZER_STATE, 0), plan.step.optimizer_step
    return counted == optimizers_take(request) and plan.account.get(FROZEN, 0) == _of_frozen(request)


def more_of_optimizers(request: Request, seen: Loop) -> int:
    """Bytes that the optimizers take in a loop with other sparse gradients than the request's, and not in that."""
    if seen.sparse == request.loop.sparse:
        return 0
    then = replace(request, loop=replace(request.loop, sparse=seen.sparse))
    more, before = (state + (step or 0) for state, step in map(optimizers_take, (then, request)))
    return more - before


def _given(request: Request) -> dict[str, int]:
    return {name: round(size * GB) for name, size in request.options.account_gb.items()}


def _optimizers(request: Request) -> OptimizerMemory:
    """The memory of all optimizers of the model, which step one after another; the model runs in their closures."""
    cuda = request.device.caches  # foreach is the default there
    takes, idle = [], set(request.loop.stateless)
    without = {id(p) for name, p in request.model.named_parameters() if name in idle} if idle else ()
    sparse = {id(p): entries for p, entries in _sparse(request)}
    for each in request.optimizers:
        try:
            memory = optimizer_memory(parameters_of(request.model), each, cuda=cuda, without=without, sparse=sparse)
            takes.append(_with_others(memory, request, each))
        except OptionError:
            if request.optimizer is not None:
                raise  # one that was found is counted from the step on in which it has a state
    state = sum(each.state for each in takes) + max((each.closure for each in takes), default=0)
    return OptimizerMemory(state, max((each.step for each in takes), default=0))


def _sparse(request: Request) -> list[tuple[nn.Parameter, int]]:
    """The parameters whose gradients are sparse in their rows, each with the number of entries."""
    entries = dict(request.loop.sparse)
    return [(p, entries[name]) for name, p in request.model.named_parameters() if name in entries] if entries else []


def _with_others(memory: OptimizerMemory, request: Request, optimizer: optim.Optimizer | str) -> OptimizerMemory:
    """The memory of an optimizer with the gradients that it steps other models by.

    What else the loop was seen to hold beside the step, but for their parameters, is taken to be what their passes
    need: it has gone by then. Where microbatches add to the gradients, these are beside the step all the time, and new
    ones, which a backward pass makes after the planned graphs, have gone by the step.
    """
    if isinstance(optimizer, str) or not request.loop.beside:
        return memory
    own = {id(p) for p in request.model.parameters()}
    stepped = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in own]
    there, adds_up = storage_bytes(p for p in stepped if p.requires_grad), request.loop.gradients == "accumulated"
    gradients = max(0, there - max(0, request.loop.others - (1 + adds_up) * there))
    return replace(memory, step=max(memory.step, gradients) if adds_up else memory.step + gradients)


def _of_frozen(request: Request, *, cleared: bool = False) -> int:
    """Bytes of the gradients that frozen parameters have which no optimizer is there to clear, or which one is."""
    optimizers = [each for each in request.optimizers if not isinstance(each, str)]
    stepped = {at for optimizer in optimizers for at in trained_by(optimizer)}
    frozen = [p for p in parameters_of(request.model) if not p.requires_grad and (id(p) in stepped) is cleared]
    return storage_bytes(p.grad for p in frozen if p.grad is not None)


def planned_step(request: Request, optimizer_state: int, optimizer_step: int | None) -> PlannedStep:
    """The step of a request, as a plan for it keeps it; the bytes of its optimizer as in `account_of`."""
    return PlannedStep(
        card=request.device,
        where=str(request.model_device),
        batch=request.batch_kinds,
        maxima=request.maxima,
        costs=request.costs,
        occupancy=request.occupancy,
        gradients_copied=request.gradients_copied,
        optimizer_state=optimizer_state,
        optimizer_step=optimizer_step,
        has_loss_fn=request.loss_fn is not None,
        ranks=world_size(),
        torch_version=torch.__version__,
        loop=request.loop,
    )


def batch_of(request: Request) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """What the model is called with; at the largest sizes, where they may be smaller."""
    args, kwargs = request.args or (), request.kwargs
    if request.maxima is not None:
        args, kwargs = enlarged(args, kwargs, request.maxima, FakeTensorMode(allow_non_fake_inputs=True))
    return args, kwargs


def _batches(args: Sequence[Any], kwargs: Mapping[str, Any], request: Request) -> int:
    """Bytes of the batches that are in flight: each apart, or all of them parts of one tensor."""
    tensors = batch_tensors(args, kwargs, request.model_device)
    used: Counter[int] = Counter()
    for t in tensors:
        used[storage_key(t)] += t.nbytes
    return sum(max(whole, request.in_flight * used[key]) for key, whole in storages(tensors).items())
