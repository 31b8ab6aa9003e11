"""Gives a model a runtime and a provider of plans."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from weakref import WeakKeyDictionary

from torch import nn, optim

from planner.compat.versions import inductor_takes_symbols
from planner.core.loop import Loop
from planner.core.maxima import Maxima
from planner.core.surroundings import under
from planner.core.verification import Verification
from planner.errors import ModelError
from planner.offload.links import store_of
from planner.requests.batch import named_maxima
from planner.requests.check import with_batch
from planner.requests.compiled import without_compile
from planner.requests.planned import Filed, Known, Pending, Planned
from planner.requests.request import Request
from planner.requests.step_in_backward import refuse_step_in_backward
from planner.runtime.bypassed import watch
from planner.runtime.compiled import Runtime
from planner.runtime.eager import EagerRuntime
from planner.runtime.entries import put_all
from planner.runtime.events import PlanProvider
from planner.runtime.families import Shapes
from planner.runtime.interception import Applied, attach, attached, detach
from planner.runtime.learnt_shapes import LearntShapes
from planner.runtime.steps import StepRuntime
from planner.session.binding import Awaited
from planner.session.provider import Judge, Provider
from planner.stepping.step import Stepping

_TRAINED_BY: WeakKeyDictionary[nn.Module, tuple[Planned, ...]] = WeakKeyDictionary()  # until a new plan is applied

Around = Callable[[PlanProvider], PlanProvider]


def as_it_is(provider: PlanProvider) -> PlanProvider:
    """The provider itself."""
    return provider


def put_on(
    source: Planned | Pending,
    target: nn.Module,
    *,
    known: Known | None = None,
    judge: Judge | None = None,
    check: Judge | None = None,
    around: Around = as_it_is,
    alone: bool = False,
) -> None:
    """Have a model train by a plan, which is of that model or of one like it.

    Args:
        source: the plan.
        target: the model.
        known: a plan whose schedule is taken where it is for the step that comes.
        judge: as for `Provider`.
        check: as for `Provider`.
        around: wraps the provider of plans, to hear of events and to decide otherwise.
        alone: whether plans are for this process alone, whatever others train the model with it.
    """
    request = source.request
    refuse_step_in_backward(request.options, request.optimizer, target)
    awaited: Awaited | None = None
    ready: Planned | None = None
    if isinstance(source, Planned) and request.args is None:
        awaited = Awaited(source.of(target), known if isinstance(known, Filed) else None)
    elif isinstance(source, Planned) and target is request.model:
        ready = source
    elif isinstance(source, Planned):
        own = with_batch(request, target, request.args or (), request.kwargs, request.maxima)
        ready = replace(source, request=own)
    provider = Provider(target, request, known=known, ready=ready, awaited=awaited, judge=judge, check=check)
    runtime = _runtime(target, request, around(provider), alone)
    if ready is not None and judge is None and check is None:
        with under(request.surroundings, target):
            runtime.add(request.args or (), request.kwargs, ready, request.maxima)
    if awaited is not None:
        runtime.newest = awaited.planned
    attach(target, runtime)
    _TRAINED_BY.pop(target, None)
    optimizer = request.optimizer
    if isinstance(runtime, Runtime) and runtime.step_in_backward and isinstance(optimizer, optim.Optimizer):
        runtime.stepping = Stepping(target, optimizer, runtime.regions.others_waiting)
        runtime.watched = watch(target, lambda: False)
    elif request.occupancy is None and request.options.in_flight == 1:
        _watch_entries(target, runtime, request, judge, check, around)
    else:
        runtime.watched = watch(target, lambda: False)


def _watch_entries(
    target: nn.Module, runtime: Applied, request: Request, judge: Judge | None, check: Judge | None, around: Around
) -> None:
    """Plan for the calls of the model's methods, or of modules in it, if those are what the loop makes."""
    asked = replace(request, batch=None, kinds=None, maxima=None, surroundings=None, loss_fn=None)

    def provider_of(step: nn.Module, loop: Loop) -> PlanProvider:
        own = replace(asked, model_ref=weakref.ref(step), loop=loop)
        return around(Provider(step, own, judge=judge, check=check))

    store = runtime.regions.store if isinstance(runtime, Runtime) else None
    steps = StepRuntime(target, runtime.provider, provider_of, request.options.checkpoints, store)
    seeing = weakref.ref(steps)  # torch holds the hook of the watch
    steps.warns = watch(target, lambda: (found := seeing()) is not None and found.saw_calls())
    runtime.watched, runtime.points = steps, steps.points
    put_all(runtime.points)


def _runtime(target: nn.Module, request: Request, provider: PlanProvider, alone: bool) -> Applied:
    options = request.options
    if options.mode == "eager":
        return EagerRuntime(target, provider, alone=alone)
    shapes: Shapes
    if options.offload is not None or (options.mode == "inductor" and not inductor_takes_symbols()):
        shapes = Shapes(False, Maxima({}))
    elif options.dynamic is None:
        shapes = LearntShapes(request.maxima or Maxima({}), tells=options.progress is not False)
    else:
        shapes = Shapes(options.dynamic is True, named_maxima(options.dynamic))
        shapes.limit(request.maxima or Maxima({}))
    stores, steps = partial(store_of, options, request.model_device), options.step_in_backward
    return Runtime(target, provider, shapes, options.checkpoints, stores=stores, step_in_backward=steps, alone=alone)


def _module(model: object) -> nn.Module:
    if not isinstance(model := without_compile(model), nn.Module):
        raise ModelError(f"a torch.nn.Module has plans; this is {model!r:.100} of type {type(model).__name__}")
    return model


def applied(model: nn.Module) -> Planned | None:
    """The plan that a model runs under, the newest where it has several, or the first that it was trained by.

    None where there is none (yet).
    """
    model = _module(model)
    runtime = attached(model)
    return runtime.newest if runtime else next(iter(_TRAINED_BY.get(model, ())), None)


def all_applied(model: nn.Module) -> tuple[Planned, ...]:
    """The plans that a model runs under, or was trained by: one for each kind of call, the largest step first."""
    model = _module(model)
    runtime = attached(model)
    if runtime is None:
        return _TRAINED_BY.get(model, ())
    newest = runtime.newest
    if newest is None:
        return ()
    records = {id(record): record for record in (newest.record, *runtime.plans.values())}.values()
    plans = [newest if record is newest.record else Planned(record, newest.request) for record in records]
    return tuple(sorted(plans, key=lambda p: -p.record.baseline_peak_bytes))


def take_off(model: nn.Module) -> None:
    """Take the plan off a model whose training ends; which plans it was trained by stays known."""
    plans = tuple(Planned(p.record, p.without_batch().request) for p in all_applied(model))
    detach(model)
    _TRAINED_BY[model] = plans


def note_verification(planned: Planned, seen: Verification) -> Planned:
    """The plan with what was measured, also where its model runs under it."""
    noted = replace(planned, record=replace(planned.record, verification=seen))
    runtime = attached(planned.request.model)
    if runtime is not None and runtime.newest is planned:
        runtime.newest = noted
    return noted
