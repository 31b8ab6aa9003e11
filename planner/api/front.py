"""The front door: `plan()`, and what puts a plan on a model, takes it off, and repairs it."""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from planner.capture.passes.checkpoints import Checkpoints
from planner.capture.shapes import Maxima
from planner.core.account import UNREDUCED
from planner.core.identity import difference, identity
from planner.core.plan import PendingPlan, Plan
from planner.costs.static_memory import storage_bytes
from planner.errors import (
    ApplyError,
    BatchError,
    CaptureError,
    PlanWarning,
    VerificationError,
    gb,
)
from planner.lowering.microbatches import USED
from planner.parallel.buckets import buckets_of
from planner.parallel.group import refuse_verification
from planner.parallel.sharded import unreduced_bytes
from planner.planfile.files import FromFile
from planner.planning.pipeline import make_plan
from planner.requests.request import (
    GB,
    Costs,
    Dynamic,
    Mode,
    Request,
    arguments,
    check,
    check_mode,
    maxima_of,
    named_maxima,
    refuse_wrapped,
    with_batch,
)
from planner.runtime.compiled import Runtime
from planner.runtime.eager import EagerRuntime
from planner.runtime.families import Shapes
from planner.runtime.interception import Applied, attach, attached, call_signature, detach, without_batch
from planner.runtime.verify import FOUND
from planner.runtime.verify import verify as verify_plan
from planner.session.agreement import agreed
from planner.session.binding import Awaited, bound, known_plan
from planner.session.counted import counted

# Share of the budget taken off where a step ran out of memory and so could not say by how much.
OUT_OF_MEMORY = 0.05


def plan(
    model: nn.Module,
    batch: Any = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    budget_gb: float | str | None = None,
    solver: str = "auto",
    optimizer: torch.optim.Optimizer | str | None = None,
    loss_fn: Callable[[Any], torch.Tensor] | None = None,
    device: str | torch.device | None = None,
    accumulate: bool = False,
    shard: int = 1,
    checkpoints: Checkpoints = "replace",
    costs: Costs | None = None,
    account_gb: Mapping[str, float] | None = None,
    time_limit: float | None = None,
    progress: bool | None = None,
    dynamic: Dynamic = False,
    mode: Mode = "compiled",
    in_flight: int = 1,
    known: Plan | str | os.PathLike[str] | None = None,
) -> Plan:
    """Decide, for every activation of a training step, whether to keep or recompute it, within a memory budget.

    It waits for no other process. What several train together, under DistributedDataParallel or with parameters that
    are spread over them, has one plan: at the first training step after `apply()` that of the first rank, made then or
    before, goes to all, with DDP's gradient buckets counted. Plans for other shapes are made by each rank for itself.

    Args:
        model: the module to train, in the mode (`train()` or `eval()`) in which it will run. It is not changed.
        batch: a tensor (`model(batch)`), a tuple or list (`model(*batch)`) or a mapping (`model(**batch)`). Without
            one, the model's `dummy_inputs` or `example_input_array`; without those, or where they do not suit the
            model, the plan is made at the first training step after `apply()`.
        kwargs: further keyword arguments for the model.
        budget_gb: memory that parameters, buffers, batch, optimizer state and everything the step allocates may take
            together, in GB of 2**30 bytes; or a share of the device's memory as "80%"; None for what the GPU has free.
        solver: "auto" (the default), "chen" (sqrt(L) segments) or "ilp" (exact on small graphs).
        optimizer: an optimizer or its name, to count its state and the temporaries of its step; None counts none.
        loss_fn: model output -> scalar loss, where the loss is not among the model's outputs.
        device: a device to plan for, here or not ("h100", "rtx4090", ...); None for where the model is. The model may
            be on `meta` or on fake tensors.
        accumulate: whether gradients of earlier microbatches are there when the step begins (gradient accumulation, or
            `zero_grad(set_to_none=False)`): they are then held beside the new ones.
        shard: how many devices share parameters, gradients and optimizer state, as FSDP does.
        checkpoints: what becomes of calls that the model itself checkpoints (`torch.utils.checkpoint`): "replace"
            plans them like the rest; "keep" recomputes them as their author asked, and plans around them.
        costs: what times are taken from: "roofline" (the device's datasheet), "measured" (each distinct op run on the
            device, kept on disk), or None: measured on a GPU that is here.
        account_gb: lines of `Plan.account` to set by hand, in GB, as {"CUDA context": 0.6, "fragmentation margin": 0};
            a new name adds a line for what else is on the device.
        time_limit: seconds for the solver; None for its default, which for "auto" is a count of steps and no clock.
        progress: show progress bars; None for only where a terminal is watching.
        dynamic: True where any size in the batch may be smaller at another step; or the largest sizes, by argument and
            dimension, as in `{"input_ids": {0: 8, 1: 2048}}` (by position, as in `{0: {0: 8}}`, for a positional
            batch): these may then be more than those of the batch. The plan is made for the largest, and holds for all.
        mode: "compiled" (torch.compile's graphs, rewritten), or "eager": whole modules checkpointed, with some of
            their results kept, for code that cannot or shall not be compiled. It has a search of its own: `solver` and
            `time_limit` do not count.
        in_flight: how many forward passes wait for their backward pass at once, the one that runs counted: microbatches
            of a pipeline, or of a loop that calls the model several times before `backward()`. What each of them keeps
            is counted, and part of what is decided. Without `accumulate`, so many forward passes run, then as many
            backward passes; with it, gradients are there already while as many wait.
        known: an earlier plan, or its file: where the step and the budget turn out to be those that it was made for,
            its schedule is taken and no solver runs; the note says which it was.

    Returns:
        The plan; `apply()` puts it on the model.

    Raises:
        ModelError, BudgetError, BatchError, OptionError: an argument that cannot be used, named with its value.
        InfeasibleBudgetError: nothing fits; it carries the smallest budget that does.
        CaptureError: the model cannot be captured.
        PlanFileError: the file of a known plan cannot be read.
        RankError: at the first training step, on every rank, where one of them cannot train by the plan; it says why.

    Examples:
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
        >>> p = plan(model, torch.zeros(32, 64), budget_gb=1, loss_fn=torch.Tensor.mean)
        >>> p.overhead, p.peak_bytes <= p.budget_bytes
        (0.0, True)
    """
    request = check(
        model,
        batch,
        kwargs,
        budget_gb=budget_gb,
        solver=solver,
        optimizer=optimizer,
        loss_fn=loss_fn,
        device=device,
        accumulate=accumulate,
        shard=shard,
        checkpoints=checkpoints,
        costs=costs,
        account_gb=account_gb,
        time_limit=time_limit,
        progress=progress,
        dynamic=dynamic,
        mode=mode,
        in_flight=in_flight,
    )
    request = replace(request, known=known_plan(known))
    if request.args is not None:
        try:
            return make_plan(request)
        except (BatchError, CaptureError):
            # transformers gives every model, of vision too, token ids for its dummy inputs
            if batch is not None or kwargs:
                raise
    pending = replace(request, args=None, kwargs={}, maxima=None)
    return PendingPlan(pending, lambda: applied_plan(pending.model))


def apply(plan: Plan, model: nn.Module | None = None, *, verify: bool = False, mode: Mode | None = None) -> nn.Module:
    """Put a plan on its model, or on another one of the same kind; see `Plan.apply`."""
    refuse_wrapped(model)
    if isinstance(plan.request, FromFile):
        plan = bound(plan, model)
    if mode is not None:
        check_mode(mode, plan.request.in_flight)
        if mode != plan.request.mode:
            plan = in_mode(plan, mode)
    request = plan.request
    target = request.model if model is None else model
    if not isinstance(target, nn.Module):
        raise ApplyError(f"apply() needs a torch.nn.Module; it was given {target!r} of type {type(target).__name__}")
    if target is not request.model:
        here, there = identity(target), identity(request.model)
        if found := difference(here, there):
            raise ApplyError(f"this plan was made for {there}; this is {here}: {found}. Plan that model instead")

    ready: dict[tuple[object, ...], Plan] = {}
    known: list[Plan] = []
    awaited: Awaited | None = None
    if isinstance(plan, PendingPlan):
        pass
    elif request.args is None:
        own = replace(plan, request=replace(request, model_ref=weakref.ref(target)))
        awaited = Awaited(own)
        known.append(own)
    else:
        batch = (request.args or (), request.kwargs, request.maxima)
        own = plan if target is request.model else replace(plan, request=with_batch(request, target, *batch))
        ready[call_signature(target, *batch)] = own
        known.append(own)

    def plan_here(asked: Request) -> Plan:
        same = asked.model is target and asked.maxima == request.maxima
        made = ready.pop(call_signature(asked.model, asked.args, asked.kwargs, asked.maxima), None) if same else None
        if awaited is not None and asked.model is target:
            made = awaited.take(asked)
        made = counted(made or make_plan(asked, known), asked)
        return repair(made) if verify else made

    def make(
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        maxima: Maxima | None,
        *,
        likely: bool = True,
    ) -> Plan:
        asked = replace(with_batch(request, model, args, kwargs, maxima), likely=likely, buckets=buckets_of(model))
        if verify:
            refuse_verification(model)
        calling = attached(model)
        if calling is not None and calling.agrees:
            ready.update(early)
            mine = early.get(call_signature(model, args, kwargs, maxima)) if model is target else None
            made = agreed(asked, plan_here, mine)
            calling.agrees = False
            ready.clear()
        else:
            made = plan_here(asked)
        known.append(without_batch(made))
        return made

    runtime: Applied
    if request.mode == "eager":
        runtime = EagerRuntime(target, make, _warn)
    else:
        shapes = Shapes(request.dynamic is True, named_maxima(request.dynamic))
        if request.maxima is not None:
            shapes.limit(request.maxima)
        runtime = Runtime(target, make, _warn, shapes, request.checkpoints)
    early = dict(ready)
    if ready and not verify:
        _, made = ready.popitem()
        runtime.add(request.args or (), request.kwargs, made, request.maxima)
    if awaited is not None:
        runtime.newest = awaited.plan
    attach(target, runtime)
    return target


def in_mode(plan: Plan, mode: Mode) -> Plan:
    """A plan for the same request in another mode; its note says what each of the two predicts."""
    request = replace(plan.request, mode=mode)
    if isinstance(plan, PendingPlan) or request.args is None:
        return PendingPlan(replace(request, batch=None), lambda: applied_plan(request.model))
    made = make_plan(request, [plan])
    other = f"The {plan.request.mode} plan: peak {gb(plan.peak_bytes)}, {plan.overhead:.1%} more time, estimated."
    return replace(made, note=f"{made.note} {other}".strip())


def _warn(model: nn.Module, plan: Plan, earlier: bool, begun: bool) -> bool:
    """Say so where what a plan does not count leaves too little room: gradients, and an earlier forward pass that waits
    for its backward pass. False while there is nothing to say.
    """
    room = plan.budget_bytes - plan.peak_bytes
    if held := uncounted(model, plan, begun):
        warnings.warn(
            f"{gb(held)} of gradients are there already, which this plan does not count: the step may take "
            f"{gb(most_held(plan, begun) + held)} of {gb(plan.budget_bytes)}. Plan with accumulate=True, or clear them "
            "with zero_grad(set_to_none=True)",
            PlanWarning,
            stacklevel=5,
        )
        return True
    late = unreduced_bytes(model) - plan.account.get(UNREDUCED, 0)
    if late > room:
        warnings.warn(
            f"fully_shard keeps {gb(late)} of gradients whole until a later microbatch reduces them "
            f"(set_requires_gradient_sync(False)), which this plan does not count: the step may take "
            f"{gb(plan.peak_bytes + late)} of {gb(plan.budget_bytes)}. Count them with "
            f"account_gb={{{UNREDUCED!r}: {late / GB:.3g}}}, or plan without a batch: then the first step shows them",
            PlanWarning,
            stacklevel=5,
        )
        return True
    kept = [m.held_bytes for m in plan.timeline if m.phase == "forward"][-1] - plan.resident_bytes
    waiting = kept if earlier and plan.request.in_flight == 1 else 0
    if waiting > room:
        warnings.warn(
            f"the model runs forward again before the backward pass of an earlier call, whose activations "
            f"({gb(waiting)}) this plan does not count: the step may take {gb(plan.peak_bytes + waiting)} of "
            f"{gb(plan.budget_bytes)}. Count them with in_flight=2, or as many as there are at once, "
            "or call backward() after each",
            PlanWarning,
            stacklevel=5,
        )
    return waiting > room


def uncounted(model: nn.Module, plan: Plan, begun: bool) -> int:
    """Bytes of gradients that are there, that a plan does not count, and for which it leaves no room; else 0.

    Args:
        model: whose gradients.
        plan: that it trains by.
        begun: whether to look for room in the backward pass, which begins, or before it, as in `most_held`.
    """
    if plan.request.gradients_copied or (not begun and plan.request.flight == USED):
        return 0
    held = storage_bytes(p.grad for p in model.parameters() if p.grad is not None)
    return held if held > plan.budget_bytes - most_held(plan, begun) else 0


def most_held(plan: Plan, begun: bool) -> int:
    """The peak of a step from the beginning of its backward pass on, or before it, in bytes."""
    return max(m.held_bytes for m in plan.timeline if (m.phase in ("forward", "loss")) != begun)


def remove(plan: Plan, model: nn.Module | None = None) -> nn.Module:
    """Take a plan off its model; see `Plan.remove`."""
    target = plan.request.model if model is None else model
    detach(target)
    return target


def applied_plan(model: nn.Module) -> Plan | None:
    """The plan that a model runs under, the newest where it has several; None where there is none (yet)."""
    runtime = attached(model)
    newest = runtime.newest if runtime else None
    return newest if isinstance(newest, Plan) else None


def repair(plan: Plan, batch: Any = None, kwargs: Mapping[str, Any] | None = None, *, attempts: int = 3) -> Plan:
    """Measure a real step, and plan again with what it showed where it took more than the budget; see `Plan.repair`."""
    request = plan.request
    if batch is not None or kwargs is not None:
        args, extra = arguments(request.model, batch, kwargs)
        request = with_batch(request, request.model, args or (), extra, maxima_of(request.dynamic, args, extra))
        plan = make_plan(request)
    found = 0
    learnt: list[str] = []
    while True:
        try:
            seen = verify_plan(plan)
        except torch.OutOfMemoryError:
            missing = round(OUT_OF_MEMORY * request.budget_bytes)
            learnt.append(f"A real step ran out of memory: planned again with {gb(missing)} taken off.")
        else:
            if seen.gradients_agree is False:
                warnings.warn(f"gradients differ from those without a plan: {seen}", PlanWarning, stacklevel=3)
            if seen.within_budget:
                return replace(plan, note=" ".join([plan.note, *learnt]).strip(), verification=seen)
            missing = seen.measured_bytes - seen.predicted_bytes
            learnt.append(f"A real step took {gb(missing)} more than predicted: planned again with that taken off.")
        if len(learnt) > attempts:
            raise VerificationError(
                f"after {attempts} repairs a real step still takes more than budget_gb={request.budget_gb!r}. "
                f"{' '.join(learnt)} Give a larger budget, or a smaller batch"
            )
        found += missing
        request = replace(request, account_gb={**request.account_gb, FOUND: found / GB})
        plan = make_plan(request)


__all__ = ["applied_plan", "apply", "plan", "remove", "repair"]
