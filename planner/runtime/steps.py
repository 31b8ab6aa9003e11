"""Runs a model that a loop trains by its methods, or by modules in it: one plan for all of a step's calls."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from planner.capture.trace.dynamo import make_backend, op_by_op
from planner.capture.trace.layers import helpers
from planner.compat.autograd import saving_aliases
from planner.compat.dispatch import lasting_modes_off
from planner.compat.dynamo import compile_call
from planner.compat.modules import modules_in
from planner.core.loop import Loop
from planner.core.options import Checkpoints
from planner.core.plan import PlanRecord
from planner.core.recipe import Choice, Recipe
from planner.eager.checkpointing import checkpointed
from planner.errors import UNPLANNABLE, InfeasibleBudgetError, warn
from planner.offload.store import Store
from planner.parallel.group import together
from planner.parallel.sharded import parameters_among
from planner.runtime.bypassed import Handle
from planner.runtime.cuda_graphs import captures, refuse_captured_parts
from planner.runtime.entries import Entry, EntryPoint, entries_of, leave, outermost, put_all
from planner.runtime.events import Call, PlanProvider
from planner.runtime.families import GraphChanged, recipe_of
from planner.runtime.fates import warn_retained
from planner.runtime.interception import Applied, attached, put
from planner.runtime.made import MadeStorages
from planner.runtime.modes import redirected, refuse_transformed, trains, unguarded
from planner.runtime.peaks import when_begun
from planner.runtime.regions import Regions
from planner.runtime.signature import ModelState, Signature, call_signature, model_state
from planner.runtime.step_calls import CallsSeen, EntryCall, StepCalls, step_model
from planner.runtime.unread import unread
from planner.runtime.watch import Watch
from planner.runtime.ways import WARN_PLANS

ITSELF = Entry("")


@dataclass(eq=False)
class _Kind:
    """A kind of step. It asks for its plan as a `Caller`.

    Attributes:
        step: its calls.
        model: makes them in one call.
        provider: gives its plan.
        state: of the model in the last of them, in which it is planned.
        retains: whether the last of them may have left a graph that the step of a new plan finds.
        record: its plan; None while there is none.
        hopeless: whether there can be none.
        learns: no, as there is a plan once the loop is known.
        trains_at_times: yes, as a step that trains nothing has no plan.
    """

    step: StepCalls
    model: nn.Module
    provider: PlanProvider
    state: ModelState | None
    retains: bool = False
    record: PlanRecord | None = None
    hopeless: bool = False
    agrees: bool = False
    learns: bool = False
    trains_at_times: bool = True
    together: tuple[Signature, ...] = ()


def _named(kind: _Kind) -> str:
    return ", ".join(dict.fromkeys(str(call.entry) for call in kind.step.calls))


class StepRuntime(Applied):
    """Sees which methods of a model, and which modules in it, a loop calls in its first step, and plans for them.

    The first step of a kind runs as without a plan. It takes the place of the model's own runtime once there is a plan.

    Args:
        model: the model.
        provider: that of the model's own call.
        provider_of: gives a provider of plans for a module that makes all calls of a step, in a loop that is known.
        checkpoints: as in `plan()`.
        store: where values go that leave the device; None where they stay.
    """

    def __init__(
        self,
        model: nn.Module,
        provider: PlanProvider,
        provider_of: Callable[[nn.Module, Loop], PlanProvider],
        checkpoints: Checkpoints,
        store: Store | None = None,
    ) -> None:
        super().__init__(model, provider)
        self.provider_of, self.checkpoints = provider_of, checkpoints
        self.points = [EntryPoint(model, entry, self.call) for entry in entries_of(model)]
        self.seen = CallsSeen()
        self.kinds: list[_Kind] = []  # the latest last
        self.numbered = set[object]()  # kinds of steps, but for numbers, that new ones do not end of
        self.present: _Kind | None = None  # by which the present step runs
        self.inside = self.failed = False  # whether what a plan that failed has left is still there
        self.warns: Handle | None = None  # while it is not known whether the loop calls the model
        self.regions = Regions(model, store)
        self.compiled: dict[Entry, Callable[..., Any]] = {}
        self.unguarded: object = None

    def planned_calls(self) -> str:
        """The calls that the newest plan is for, in words; none for the model's own."""
        planned = [kind for kind in self.kinds if kind.record is not None]
        others = bool(planned) and any(call.entry != ITSELF for call in planned[-1].step.calls)
        return _named(planned[-1]) if others else ""

    def saw_calls(self) -> bool:
        """Whether the loop has made calls in the present step; one that has not returned may hold a loop itself."""
        return bool(self.seen.calls) and not self.inside

    def remove(self) -> None:
        """The loop calls the model itself: see no more calls."""
        if self.warns is not None:
            self.warns.remove()
            self.warns = None
        if self.watch is not None:
            self.watch.stop()
        leave(self.points)
        self.points = []  # else a method that called the model would be seen again when it has returned

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy of the model has no plan."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(ITSELF, args, kwargs)

    def call(self, entry: Entry, args: Any, kwargs: Any) -> Any:
        """A call of the loop's, or one inside of these."""
        module, function = entry.of(self.model)
        if (
            self.inside
            or not self.points  # `model.head(model(x))` looks the method up before it calls the model
            or redirected(self.model)
            or not trains(self.model, args, kwargs)
            or (not self._started and together(self.model))
        ):
            return function(module, *args, **kwargs)
        if captures(self.model):
            refuse_captured_parts(self.model)
        made = None if self.watch is None else self.watch.goes_between((args, kwargs))
        with self.lock, lasting_modes_off(), self._points_off():
            try:
                result = self._called(entry, args, kwargs, made)
            except BaseException:  # the next call begins another step
                self.seen = CallsSeen()
                raise
        if self.failed and gc.isenabled():  # in reference cycles of frames
            self.failed = False
            gc.collect()
        assert self.watch is not None
        if self.points:
            planned = None if self.present is None else self.present.step.outputs
            self.watch.step_goes_on(self.seen.batch(), self.seen.outputs(planned))
        return result

    @contextmanager
    def _points_off(self) -> Iterator[None]:
        """A call, in which the model is as its author wrote it."""
        self.inside = True
        leave(self.points)
        try:
            yield
        finally:
            self.inside = False
            put_all(self.points)

    def _called(self, entry: Entry, args: Any, kwargs: Any, made: MadeStorages | None) -> Any:
        modules = modules_in(self.model)
        parameters = parameters_among(modules)
        refuse_transformed(self.model, parameters, args, kwargs)
        before = self.state
        self.state = model_state(modules, parameters, before)
        if not self._started:
            self._started, self.watch = True, Watch(self.model, self.provider.loop)
        if self.seen.over:
            self._step_begins(parameters, (args, kwargs), before)
        if not self.seen.calls:
            self._plan_kinds()
        signature = call_signature(self.model, args, kwargs, state=self.state)
        module, function = entry.of(self.model)
        ignored = unread(module, function if entry.method else None, args, kwargs)
        call = self.seen.describe(entry, args, kwargs, signature, ignored)
        if made is not None:
            self.seen.made_between(made)
        self._follow(call)
        result = self._run(entry, args, kwargs)
        self.seen.returned(result)
        when_begun(result, self.seen.end)
        return result

    def _step_begins(self, parameters: Sequence[nn.Parameter], batch: Any, before: ModelState | None) -> None:
        """See what kind of step has ended, as one to come will be like it; the model was in that state."""
        assert self.watch is not None
        seen, self.seen, self.present = self.seen, CallsSeen(), None
        if self.watch.recorder is not None:
            seen.leave_out(self.watch.recorder.results.leaves_out())
        step = seen.steps()
        self.watch.between = step.stays
        self.watch.budget = next((kind.record.budget_bytes for kind in self.kinds if kind.record is not None), None)
        loop = self.watch.call_begins(parameters, batch, self.waiting_calls())
        if seen.why:
            self._warn(seen.why)
            return
        kind = next((kind for kind in self.kinds if kind.step == step), None)
        if kind is None:
            if self._given_other_numbers(step):
                return
            model = step_model(self.model, step)
            kind = _Kind(step, model, self.provider_of(model, loop), before)
        else:
            self.kinds.remove(kind)
        self.kinds.append(kind)
        learns = kind.record is not None and self.watch.settled
        if learns and kind.provider.on_loop_seen(loop, self.watch.optimizers()):
            kind.record = None
        kind.state, kind.retains = before, loop.graph_retained and not learns

    def _plan_kinds(self) -> None:
        """Plan the kinds of steps that have no plan, and in whose state the model is.

        Where its parts are frozen in turn, as those of a GAN, a step of another kind comes after one of a kind.
        """
        for kind in [*self.kinds]:
            if kind.record is None and not kind.hopeless and kind.state == self.state:
                self._plan(kind)
                if kind.retains and kind.record is not None:
                    warn_retained(kind.record)

    def _given_other_numbers(self, step: StepCalls) -> bool:
        """Whether a step differs in numbers alone from as many that were planned as are enough; warns once."""
        kind = step.but_for_numbers
        if kind not in self.numbered and sum(each.step.but_for_numbers == kind for each in self.kinds) == WARN_PLANS:
            self.numbered.add(kind)
            self._warn("they are given other numbers in each step. Give them tensors, as torch.tensor(0.5)")
        return kind in self.numbered

    def _plan(self, kind: _Kind) -> None:
        try:
            planned = kind.provider.on_missing_plan(kind, Call(tuple(t.stand_in() for t in kind.step.given), {}))
        except InfeasibleBudgetError as e:
            kind.hopeless = self.provider.on_no_plan(self.model, e)
            if kind.hopeless:
                return
            e.add_note(
                f"The loop calls {_named(kind)}, and not the {type(self.model).__name__} itself: values are recomputed "
                "from what each of these is given. A loop that calls the model, as model(batch), leaves more room"
            )
            raise
        except UNPLANNABLE as e:
            kind.hopeless = True
            self._warn(str(e))
            return
        if planned.request.batch is not None:
            planned.request.batch.release()
        self.newest, kind.record = planned.without_batch().of(self.model), planned.record
        if attached(self.model) is not self:
            if self.warns is not None:
                self.warns.remove()
            called = {call.entry for call in kind.step.calls}
            kept = set(outermost(point.entry for point in self.points)) | called
            self.points = [point for point in self.points if point.entry in kept]
            put(self.model, self)
            leave(self.points)  # until the call has returned

    def _warn(self, why: str) -> None:
        self.failed = True
        warn(
            f"{type(self.model).__name__} trains without a plan. The loop does not call it, but methods of it, or "
            f"modules in it, and no plan can be made of these calls: {why}. Let forward() do what the loop does"
        )

    def _follow(self, call: EntryCall) -> None:
        """Find the kind of step that a call belongs to."""
        at = len(self.seen.calls) - 1
        if self.present is not None and at and call in self.present.step.calls[at : at + 1]:
            return
        fits = [kind for kind in self.kinds if kind.step.calls[0] == call]
        planned = [kind for kind in fits if kind.record is not None]
        first = planned[-1] if planned and (at == 0 or self.present is not None) else None
        if first is not None:  # or a step was left without a backward pass
            self.seen.only_latest()
            self.present = first
            self.regions.call_begins()
        elif self.present is not None or (at == 0 and not fits and any(kind.record is not None for kind in self.kinds)):
            self.present = None
            warn(
                f"the calls that this step makes of {type(self.model).__name__} are not those that were planned "
                f"({call.entry} comes as call {at + 1}): the rest of it runs as without a plan"
            )

    def waiting_calls(self) -> frozenset[int]:
        return self.regions.waiting()

    def _run(self, entry: Entry, args: Any, kwargs: Any) -> Any:
        module, function = entry.of(self.model)
        record = self.present.record if self.present is not None else None
        if record is None:
            with saving_aliases():  # else what is saved of the loop's tensors would look like tensors that it holds
                return function(module, *args, **kwargs)
        if isinstance(record.recipe, Choice):
            with checkpointed(self.model, record.recipe):
                return function(module, *args, **kwargs)
        assert self.state is not None
        if (found := unguarded(self.state.classes)) != self.unguarded:
            self.unguarded = found
            self._compile_anew()
        if entry not in self.compiled:
            self.compiled[entry] = self._compiled(entry)
        ran = self.regions.ran
        try:
            with self.regions.running(record), helpers():
                return self.compiled[entry](*args, **kwargs)
        except BaseException as e:  # an interruption, too
            if self.regions.compiling or not isinstance(e, GraphChanged):
                self._compile_anew()
            if not isinstance(e, GraphChanged) or self.regions.ran > ran:
                raise
        self._changed()
        return function(module, *args, **kwargs)

    def _changed(self) -> None:
        """A graph is not the one that was planned: this step goes on without a plan."""
        assert self.present is not None
        self.present.record, self.present.hopeless = None, True
        self.present = None
        self._warn("a graph of theirs differs from the one that was planned")

    def _compile_anew(self) -> None:
        self.regions.forget()
        self.compiled.clear()

    def _compiled(self, entry: Entry) -> Callable[..., Any]:
        own = cast(StepRuntime, weakref.proxy(self))  # torch holds what it compiled until the model is gone

        def recipe() -> Recipe:
            assert own.present is not None
            assert own.present.record is not None
            return recipe_of(own.present.record)

        module, function = entry.of(self.model)
        backend = make_backend(self.regions.serving(recipe), op_by_op(self.checkpoints))
        return compile_call(module, backend, lambda: own.regions.settings(), function=function)
