"""One real step with a plan and one without, measured by torch's own allocator."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from planner.capture.trace.layers import rnns_in_parts
from planner.capture.trace.loss_trace import checked_loss, differentiable, find_loss, probable_loss
from planner.capture.trace.state_guard import ModelSnapshot
from planner.capture.trace.step import TrainingGraph, given
from planner.compat.autograd import post_accumulate_hooks
from planner.core.call import tensors_in
from planner.core.computed import as_computed
from planner.core.host import moved_aside
from planner.core.objects import leaves, with_tensors
from planner.core.options import GB
from planner.core.plan import PlanRecord
from planner.core.surroundings import under
from planner.core.verification import FOUND, Verification
from planner.devices.accelerator import Accelerator, accelerator_of
from planner.devices.meter import record_allocations
from planner.errors import ApplyError, BatchError, PlannerError
from planner.lowering.margin import MARGIN
from planner.planning.pipeline import make_plan
from planner.planning.recipe import in_parts
from planner.requests.batch import Batch, arguments
from planner.requests.planned import Pending, Planned
from planner.requests.request import Request
from planner.requests.step_in_backward import refuse_trial_step
from planner.runtime.aside import taken_off
from planner.runtime.compiled import Runtime
from planner.runtime.interception import attached, detach
from planner.runtime.steps import StepRuntime
from planner.runtime.unread import signature_of
from planner.session.attach import put_on
from planner.session.gradients import Gradients, compare, gradients_on_host, nudge, shaken
from planner.session.twice import ops_unlike_again


def verify(planned: Planned | Pending, batch: Any = None, kwargs: Mapping[str, Any] | None = None) -> Verification:
    """Run the model for real, under the plan and without it; see `Plan.verify`.

    Raises:
        ApplyError: the plan is for calls of the model's methods, or of modules in it.
        BatchError: no batch is known, its output holds nothing to differentiate, or a step without the plan fails.
        torch.OutOfMemoryError: the planned step does not fit the device.
    """
    request = planned.request
    model = request.model
    refuse_trial_step(request.options)
    if isinstance(runtime := attached(model), StepRuntime) and (calls := runtime.planned_calls()):
        raise ApplyError(
            f"verify() runs model(batch), and this {type(model).__name__} is planned for a loop that calls {calls}: "
            "let forward() do what the loop does, and call the model, for a plan that verify() can check"
        )
    args, extra = (
        (request.args, request.kwargs) if batch is None and kwargs is None else arguments(model, batch, kwargs)
    )
    if args is None:
        raise BatchError(
            "verify() needs a batch: a plan keeps none alive, and its own is gone or was never given. Pass one"
        )

    unknown: list[Any] = []
    step = partial(_step, request, args, extra, unknown)

    def by(plan: Planned | Pending) -> tuple[_Measured, PlanRecord]:
        put_on(plan, model, known=planned.known, alone=True)
        runtime = attached(model)
        assert runtime is not None
        try:
            measured = _measure(model, step, again)
            with under(request.surroundings, model):
                used = runtime.plans[signature_of(model, args, extra)]
            return _held_to(request.budget_bytes - _with_blocks(used), measured, model, step, again), used
        finally:
            detach(model)

    with (
        taken_off(model),  # first: inference_mode() restores which dispatch modes were on
        torch.inference_mode(False),
        torch.enable_grad(),
        _untouched(model, request.gradients_copied, (args, dict(extra))) as again,
    ):
        unplanned = _without_plan(model, step, again, given(tensors_in((args, dict(extra)))))
        measured, used = by(planned)
        error, agree = (None, None) if unplanned is None else compare(measured.gradients, unplanned.gradients)
        graph = None
        if isinstance(planned, Planned) and used is planned.record and batch is None and kwargs is None:
            graph = planned.captured
        whole = replace(request, batch=Batch(args, extra))
        captured = _captured(measured, whole, used, by, graph) if error else None
        own, alike = (None, None) if captured is None else compare(measured.gradients, captured)
        draws = any(r.draws for r in used.recipe.fused)
        if draws and alike is not None:
            agree = alike
        elif agree is False and alike and unplanned is not None:  # the plan's own part is right: is the compiler's?
            off = shaken(model, step, again)
            agree = compare(measured.gradients, unplanned.gradients, nudged=off, nudges=1)[1]
        unlike = _unlike(request, args, extra, again) if error and used.overhead and own != 0 else ()
    resident = used.resident_bytes - used.account.get(FOUND, 0)
    return Verification(
        predicted_bytes=used.passes_peak_bytes,
        measured_bytes=_sum(resident, measured.peak),
        unplanned_bytes=None if unplanned is None else _sum(resident, unplanned.peak),
        reserved_bytes=_sum(_with_blocks(used), measured.taken),
        budget_bytes=request.budget_bytes,
        gradient_error=error,
        gradients_agree=agree,
        planned_seconds=measured.seconds,
        unplanned_seconds=None if unplanned is None else unplanned.seconds,
        capture_error=None if captured is None or unplanned is None else compare(captured, unplanned.gradients)[0],
        plan_error=own,
        draws=draws,
        unlike=unlike,
        loss_left_out=bool(unknown),
    )


def _without_plan(
    model: nn.Module, step: Callable[[], None], again: Callable[[], None], batch: str
) -> _Measured | None:
    """The step without the plan, of a batch in words; None where it does not fit the device."""
    try:
        return _measure(model, step, again)
    except torch.OutOfMemoryError:
        return None
    except PlannerError:
        raise
    except Exception as e:
        what = f"a step of {type(model).__name__} without the plan fails with the batch ({batch})"
        raise BatchError(f"{what}: {type(e).__name__}: {e}", of_model=e) from e


def _step(
    request: Request,
    args: Any,
    extra: Mapping[str, Any],
    unknown: list[Any] | None = None,
    *,
    alone: bool = False,
    zeros: Collection[int] = (),
) -> None:
    """The forward and backward passes of a training step of the request's model; no gradient comes to the batch, nor to
    what it was computed from.

    Args:
        request: whose model it is.
        args: positional arguments of the model.
        extra: keyword arguments.
        unknown: takes an entry where the loss is one outside the model, and nothing tells which.
        alone: a single call, whose outputs are not held.
        zeros: positions of outputs beside the loss that get gradients, of zeros.
    """
    model = request.model
    if any(t.requires_grad for t in tensors_in((args, extra))):
        args, extra = with_tensors(args, extra, lambda _, t: _apart(t))
    outputs = []  # held to the end, as a training loop holds them
    losses = []
    with under(request.surroundings, model):
        for _ in range(1 if alone else request.in_flight):
            output = model(*args, **extra)
            losses.append([_loss(request, output, [] if unknown is None else unknown)])
            losses[-1] += [t for at, t in enumerate(leaves(output)) if at in zeros and differentiable(t)]
            held = () if alone else request.loop.outputs_held
            outputs.append([t for at, t in enumerate(leaves(output)) if held is None or at in held])
            del output
    for loss, *others in losses:  # outside autocast
        torch.autograd.backward([loss, *others], [None, *map(torch.zeros_like, others)])


def _apart(t: torch.Tensor) -> torch.Tensor:
    """The same tensor, without what it was computed from and without its `.grad`."""
    if t.requires_grad and not t.is_leaf:  # the model may write into it
        return as_computed(t)
    return (nn.Parameter if isinstance(t, nn.Parameter) else torch.Tensor.requires_grad_)(t.detach(), t.requires_grad)


def gradients_of(
    planned: Planned, request: Request, *, nudged: bool = False, zeros: Collection[int] = (), kept: bool = False
) -> Gradients:
    """The gradients of one real step under a plan, by the names of parameters; on the CPU.

    The model, which may run under another plan, its gradients and the states of its optimizers are left as they were;
    these are not on the device meanwhile.

    Args:
        planned: the plan.
        request: whose batch and loss the step is of; a plan for less than was asked for may be one for other gradients.
        nudged: whether each number of the parameters is off by `NUDGE` units in the last place, up or down.
        zeros: positions of outputs that the loss is not computed from, and that get gradients of zeros by the plan.
        kept: whether the model goes on to run by this plan: what is compiled for it then serves.
    """
    model = request.model
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    with (
        taken_off(model) as own,
        torch.inference_mode(False),
        torch.enable_grad(),
        moved_aside([*gradients, *([] if own is None else own.states())]),
        _untouched(model, request.gradients_copied, (request.args, request.kwargs)),
    ):
        put_on(planned, model, alone=True)
        try:
            if nudged:
                nudge(model)
            # the outputs of a loop's step before are there still, in whose place those of a step come; and the other
            # plan may be one for fewer calls at once
            _step(request, request.args or (), request.kwargs, alone=True, zeros=zeros)
            aside = attached(model)
            if kept and isinstance(own, Runtime) and isinstance(aside, Runtime):
                own.regions.take_over(aside.regions)
            return gradients_on_host(model)
        finally:
            detach(model)


def _unlike(request: Request, args: Any, extra: Mapping[str, Any], again: Callable[[], None]) -> tuple[str, ...]:
    """The custom ops that do not give the same again; none where this cannot be told for lack of memory."""
    model = request.model

    def forward() -> None:
        with under(request.surroundings, model):
            model(*args, **extra)

    try:
        return ops_unlike_again(forward, next(model.parameters()).device)
    except torch.OutOfMemoryError:
        return ()
    finally:
        again()


def _captured(
    measured: _Measured,
    request: Request,
    used: PlanRecord,
    by: Callable[[Planned], tuple[_Measured, PlanRecord]],
    graph: TrainingGraph | None,
) -> dict[str, torch.Tensor] | None:
    """The gradients of a step whose graphs are captured like the planned ones, and recompute nothing.

    None where there are no graphs, or such a step does not fit the device. `graph` is the step where it is captured.
    """
    if used.options.mode == "eager":
        return None
    if not used.overhead and all(r.own for r in used.recipe.fused):
        return measured.gradients
    roomy = 2 * used.baseline_peak_bytes / GB
    try:
        options = replace(request.options, budget_gb=roomy)
        with rnns_in_parts(on=in_parts(used.recipe)):
            whole = make_plan(replace(request, options=options, budget_gb=roomy), captured=graph)
        return by(whole)[0].gradients
    except torch.OutOfMemoryError:
        return None


@dataclass(frozen=True, slots=True)
class _Measured:
    """A step: the bytes asked of the allocator beside those that were there, the bytes that it took of the device
    beside these (both None where no peak is kept), its time and gradients.
    """

    peak: int | None
    taken: int | None
    seconds: float
    gradients: dict[str, torch.Tensor]


def _loss(request: Request, output: Any, unknown: list[Any]) -> torch.Tensor:
    if request.loss_fn is not None:
        return checked_loss(request.loss_fn, output)
    if (loss := find_loss(output)) is not None and not request.loop.beside_loss:
        return loss
    if request.loop.only_loss and (found := probable_loss(output)) is not None:
        return found[2]
    unknown.append(None)
    parts = {at: t.mean() for at, t in enumerate(leaves(output)) if isinstance(t, torch.Tensor) and t.requires_grad}
    if not parts:
        raise BatchError("the model's output holds nothing that needs a gradient")
    reached = [t for at, t in parts.items() if at not in request.loop.unreached]
    return torch.stack(reached or [*parts.values()]).sum()


def _with_blocks(used: PlanRecord) -> int:
    """What a plan counts as resident, without the room between the allocator's blocks."""
    return used.resident_bytes - used.account.get(FOUND, 0) - used.account.get(MARGIN, 0)


def _held_to(
    allowed: int, measured: _Measured, model: nn.Module, step: Callable[[], None], again: Callable[[], None]
) -> _Measured:
    """A step whose allocator took more of the device than is allowed beside what was there, run again held to that.

    An allocator that is free to grow takes a new segment sooner than it gives back those that it caches. As measured
    before where the step then runs out of memory.
    """
    device = next(model.parameters()).device
    accelerator = accelerator_of(device)
    if accelerator is None or measured.taken is None or measured.taken <= allowed:
        return measured
    accelerator.empty_cache(device)
    limit = max(accelerator.allocated(device) + allowed, accelerator.reserved(device))
    try:
        with accelerator.limited(device, limit):
            return replace(measured, taken=_peaks(step, device, accelerator)[1])
    except torch.OutOfMemoryError:
        return measured
    finally:
        again()


def _peaks(step: Callable[[], None], device: torch.device, accelerator: Accelerator) -> tuple[int | None, int | None]:
    """The bytes that a step asks of the allocator, and those that this takes of the device, beside the ones before."""
    before = accelerator.allocated(device)
    accelerator.reset_peak(device)
    step()
    accelerator.synchronize(device)
    return _sum(-before, accelerator.peak(device)), _sum(-before, accelerator.reserved_peak(device))


def _sum(resident: int, beside: int | None) -> int | None:
    return None if beside is None else resident + beside


def _measure(model: nn.Module, step: Callable[[], None], again: Callable[[], None]) -> _Measured:
    device = next(model.parameters()).device
    accelerator = accelerator_of(device)
    if accelerator is not None:
        accelerator.empty_cache(device)  # the blocks of one step would be another's fragmentation
    try:
        return _measured(model, step, again, device, accelerator)
    except torch.OutOfMemoryError:
        again()  # gradients of some parameters, and buffers that this step has changed
        raise


def _measured(
    model: nn.Module,
    step: Callable[[], None],
    again: Callable[[], None],
    device: torch.device,
    accelerator: Accelerator | None,
) -> _Measured:
    step()  # compiles, and warms caches
    again()
    if accelerator is not None:
        accelerator.synchronize(device)
    start = time.perf_counter()
    step()
    if accelerator is not None:
        accelerator.synchronize(device)
    seconds = time.perf_counter() - start
    again()
    if accelerator is not None:
        peak, taken = _peaks(step, device, accelerator)
    else:
        peak, taken = record_allocations(step).peak(), None
    gradients = gradients_on_host(model)
    again()
    return _Measured(peak, taken, seconds, gradients)


@contextmanager
def _untouched(model: nn.Module, accumulate: bool, arguments: tuple[Any, ...]) -> Iterator[Callable[[], None]]:
    """Gives a function that puts gradients, the model's state and the arguments back; leaves them as they were.

    Where gradients accumulate, each step begins with gradients of zero.
    """
    parameters = list(model.parameters())
    # an optimizer that steps in the backward pass must not
    hooks = [(h, dict(h)) for p in parameters if (h := post_accumulate_hooks(p))]
    gradients = [p.grad for p in parameters]
    state = ModelSnapshot(model, parameters=[name for name, _ in model.named_parameters()], arguments=arguments)

    def again() -> None:
        for p in parameters:
            p.grad = torch.zeros_like(p) if accumulate and p.requires_grad else None
        state.restore()

    try:
        for table, _ in hooks:
            table.clear()
        again()
        yield again
    finally:
        again()
        for p, g in zip(parameters, gradients, strict=True):
            p.grad = g
        for table, saved in hooks:
            table.update(saved)
