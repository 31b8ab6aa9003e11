"""Puts plans on models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from planner.compat.dynamo import call_past_wrappers, compile_wrapped
from planner.compat.self_check import check_torch
from planner.core.identity import difference, identity
from planner.core.options import OLD_MODES, Mode, check_values
from planner.errors import ApplyError, gb
from planner.planning.pipeline import make_plan
from planner.requests.check import check_mode, refuse_wrapped
from planner.requests.compiled import without_compile
from planner.requests.inductor import refuse_inductor
from planner.requests.planned import Filed, Known, Pending, Planned, Unplanned
from planner.requests.request import Request
from planner.requests.step_in_backward import refuse_step_in_backward, refuse_trial_step
from planner.runtime.as_compiled import fused_parts, warn_not_fused
from planner.runtime.aside import compiled_aside
from planner.runtime.interception import attached, detach
from planner.session.attach import Around, as_it_is, put_on
from planner.session.binding import bound
from planner.session.repair import repaired
from planner.session.trust import trusting


def apply(
    source: Planned | Filed | Pending | Unplanned,
    model: Any = None,
    *,
    verify: bool = False,
    mode: Mode | None = None,
    around: Around = as_it_is,
    alone: bool = False,
) -> nn.Module:
    """Put a plan on its model, or on another one of the same kind; see `Plan.apply`.

    Args:
        source: the plan.
        model: as for `Plan.apply`.
        verify: as for `Plan.apply`.
        mode: as for `Plan.apply`.
        around: wraps the provider of plans, to hear what happens and to decide otherwise.
        alone: whether plans are for this process alone, whatever others train the model with it.
    """
    check_torch()
    refuse_wrapped(without_compile(model))
    if isinstance(source, Unplanned):  # its user was warned
        return _target(source.request, model)
    known: Known | None = source if isinstance(source, Filed) else source.known
    filed = isinstance(source, Filed)  # whoever applies it may not have chosen its mode
    if isinstance(source, Filed):
        source = bound(source, without_compile(model))
    if mode is not None:
        source = in_mode(source, mode)
    target = _target(source.request, model)
    if verify:
        refuse_trial_step(source.request.options)
    judge = repaired if verify else None
    check = trusting() if source.request.options.mode == "inductor" else None
    parts = fused_parts(target)
    with compiled_aside(target):
        put_on(source, target, known=known, judge=judge, check=check, around=around, alone=alone)
    call_past_wrappers(target)
    request, runtime = source.request, attached(target)
    if runtime is not None:
        any_mode = request.any_mode or (filed and mode is None)
        runtime.fused = request.options.mode == "inductor" or bool(request.instead) or not any_mode
        if parts and not runtime.fused:
            runtime.fused = True
            warn_not_fused(target, parts[0])
    return target


def remove(model: nn.Module) -> nn.Module:
    """Take the plan off a model, which is then compiled as it was before; ApplyError where no plan is on."""
    if not isinstance(model := without_compile(model), nn.Module):
        raise ApplyError(f"remove() needs a torch.nn.Module; it was given {model!r} of type {type(model).__name__}")
    detach(model)
    compile_wrapped(model)
    return model


def _target(request: Request, model: Any) -> nn.Module:
    """The model that a plan goes on; ApplyError where it is not the one that the plan was made for."""
    target = request.model if model is None else without_compile(model)
    if not isinstance(target, nn.Module):
        raise ApplyError(f"apply() needs a torch.nn.Module; it was given {target!r} of type {type(target).__name__}")
    if target is not request.model:
        here, there = identity(target), identity(request.model)
        if differs := difference(here, there):
            raise ApplyError(f"this plan was made for {there}; this is {here}: {differs}. Plan that model instead")
    return target


def in_mode(source: Planned | Pending, mode: Mode) -> Planned | Pending:
    """A plan for the same request in another mode; its note says what each of the two predicts."""
    mode = OLD_MODES.get(mode, mode) if isinstance(mode, str) else mode
    options = replace(source.request.options, mode=mode)
    check_values(options)
    check_mode(mode, options.in_flight)
    refuse_step_in_backward(options, source.request.optimizer, source.request.model)
    refuse_inductor(options, source.request.model, source.request.device)
    if mode == source.request.options.mode:
        return source
    request = replace(source.request, options=options)
    if isinstance(source, Pending) or request.args is None:
        return Pending(replace(request, batch=None, kinds=None, surroundings=None), source.known)
    planned = make_plan(request, [source])
    before = source.record
    other = f"The {before.options.mode} plan: peak {gb(before.peak_bytes)}, {before.overhead:.1%} more time, estimated."
    return replace(planned, record=replace(planned.record, note=f"{planned.record.note} {other}".strip()))
