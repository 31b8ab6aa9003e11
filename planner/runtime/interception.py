"""Puts plans on a model and takes them off: what stands in for its call, and goes with it into its copies."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn

from planner.capture.trace.quiet import collector_paused
from planner.compat.autograd import adds_to_gradient
from planner.compat.dispatch import lasting_modes_off
from planner.compat.dynamo import through
from planner.compat.modules import call_of, replace_call, replaced_call
from planner.core.maxima import Maxima
from planner.errors import UNPLANNABLE, ApplyError, BatchError, ModelError
from planner.parallel.group import together
from planner.requests.planned import Planned
from planner.runtime.account import Holder
from planner.runtime.as_compiled import FUSES, Compiled, call_as_compiled, calls_back, warn_not_fused
from planner.runtime.attributes import Attributes
from planner.runtime.bypassed import Bypassed, Handle
from planner.runtime.compile_refused import COMPILE, CompileRefused
from planner.runtime.copied import CopiedCall, note_copy, own_call
from planner.runtime.cuda_graphs import captures, is_graphed, refuse_uncapturable
from planner.runtime.entries import EntryPoint, leave, put_all
from planner.runtime.events import Call, PlanProvider
from planner.runtime.modes import may_record, redirected, refuse_compiled, refuse_transformed, trains
from planner.runtime.optimizer_steps import listen
from planner.runtime.own_parameters import OwnParameters
from planner.runtime.peaks import Peaks, when_begun
from planner.runtime.recorder import Recorder
from planner.runtime.signature import ModelState, Role, Signature, Walk, role_of, walk
from planner.runtime.together import BackwardPasses
from planner.runtime.unread import signature_of
from planner.runtime.used_gradients import There, gradients_there, still_there
from planner.runtime.watch import Watch
from planner.stepping.step import Stepping

# Where a model keeps its runtime beside `_compiled_call_impl`, which its copies lose. Python calls the class's
# `__call__`; torch.compile, around a planned model, goes past the plan unless the object has one as well.
CARRIER = "__call__"


class Applied(Holder):
    """Stands in for the model's call while plans are applied.

    Args:
        model: whose calls.
        provider: gives plans, and hears what happens.
        alone: whether the plans are for this process alone, whatever others train the model with it.

    Attributes:
        unplanned: kinds of calls that run as without a plan, as there is none for them.
        state: that of the model in its latest training call.
        aside: what `compile()` put in the place of calls of the model and its modules: it comes back after the plan.
        fused: whether its plans are of kernels that torch.compile fuses, or their user knows that they are not.
    """

    aside: Compiled = ()

    def __init__(self, model: nn.Module, provider: PlanProvider, *, alone: bool = False) -> None:
        super().__init__(model)
        self.provider = provider
        self.unplanned: set[Signature] = set()
        self.state: ModelState | None = None
        self.attributes = Attributes()
        self.walked: Walk | None = None
        self.fused = alone  # a step of our own tells its user nothing
        self.agrees = False  # whether the plan of the next call is still to be agreed on with other processes
        self._started, self._passes = alone, BackwardPasses()
        self._listened, self.peaks = alone, Peaks(reported=alone)  # the first: whether the provider has heard enough
        self.watched: Handle | None = None  # warns where the model trains and is not called
        self.bypassed = Bypassed(model)  # and where it is not called any more
        self.points: list[EntryPoint] = []  # that see where the loop goes into the model without calling it
        self.stepping: Stepping | None = None  # steps the model's parameters in the backward pass
        self.lock = threading.RLock()  # threads take turns in the forward pass
        self.call_eagerly = call_of(model)
        self.own = OwnParameters(model)
        listen()

    def __deepcopy__(self, memo: dict[int, Any]) -> CopiedCall | None:
        """The model's copy trains by the same plans; a runtime that is copied without its model is nothing."""
        if (model := memo.get(id(self.model))) is None:
            return None
        note_copy(self.model, model)
        return CopiedCall(model, self._put_like, CARRIER).put()

    def _put_like(self, model: nn.Module) -> Applied:
        put(model, copied := self.like(model))
        return copied

    def __reduce__(self) -> Any:
        """In a pickle, the model's own call: it loads without a plan, and where this package is not."""
        return own_call(self.model, CARRIER)

    def like(self, model: nn.Module) -> Applied:
        """The same for a copy of the model."""
        copied = type(self)(model, self.provider)
        copied.plans = dict(self.plans)
        copied.newest = self.newest and self.newest.of(model)
        return copied

    def provide(
        self,
        args: Any,
        kwargs: Any,
        maxima: Maxima | None = None,
        *,
        median: bool = True,
        compiled: bool = True,
        refused: str = "",
    ) -> Planned:
        """A plan of the provider for such a call."""
        planned = self.provider.on_missing_plan(self, Call(args, kwargs, maxima, median, compiled, refused))
        self.agrees = False
        return planned

    def add(self, args: Any, kwargs: Any, planned: Planned, maxima: Maxima | None = None) -> None:
        """Let a plan serve such calls; where it was made for maxima, smaller ones too."""
        self.newest = planned
        self.peaks.plan_made()
        self.plans[signature := signature_of(self.model, args, kwargs)] = planned.record
        if self.watch is not None:
            self.watch.together.plans[signature] = planned.record, *planned.repeats

    def forget(self, role: Role | None = None) -> None:
        """Forget plans: other ranks may have others, or the loop is not as they count it; of one role, or all."""
        for signature in [s for s in self.plans if role in (None, role_of(s))]:
            del self.plans[signature]

    # a compiled model around this one would have it in its own graph, without the plan
    @torch.compiler.disable(  # type: ignore[untyped-decorator, no-untyped-call]
        reason="the model runs by its plan, which torch.compile(fullgraph=True) does not take: plan what it returns"
    )
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.bypassed.called()
        if redirected(self.model) or is_graphed(self.model):
            return self.call_eagerly(*args, **kwargs)
        if not trains(self.model, args, kwargs):
            return self._evaluate(args, kwargs)
        if captures(self.model):
            return self._captured(args, kwargs)
        self.unwatch()
        if not self.fused and (by := through(self.model)) is not None and by.backend == FUSES:
            self.fused = True
            warn_not_fused(self.model)
        result = self._train(args, kwargs)
        if self.watch is not None:
            self.watch.call_ended(args, kwargs, result, self.made)
        return result

    def _unplanned_call(self) -> Callable[..., Any]:
        """The model's call without a plan, compiled where its user has compiled it and calls it so."""
        if (by := through(self.model)) is not None:
            return by.compiled
        return partial(call_as_compiled, self.model, self.aside) if self.aside else self.call_eagerly

    def _evaluate(self, args: Any, kwargs: Any) -> Any:
        """A call that trains nothing."""
        watch = self.watch = self.watch or (None if self._started else Watch(self.model, self.provider.loop))
        if torch.is_grad_enabled() or watch is None:
            return self._unplanned_call()(*args, **kwargs)
        others = self.newest.record.step.loop.others if self.newest else None
        call, step = self._unplanned_call(), (self.model, others, self.provider.budget_bytes)
        return watch.evaluations.run(call, (args, kwargs), *step, self.tensors, may_record)

    def _captured(self, args: Any, kwargs: Any) -> Any:
        """A training call while a CUDA graph is captured."""
        with self.lock, lasting_modes_off():
            if self.watch is not None:
                self.watch.stop()
            self.walked, modules, parameters = walk(self.model, self.walked)
            refuse_compiled(self.model, self, modules)
            refuse_transformed(self.model, parameters, args, kwargs)
            self.state = self.walked.state
            signature = signature_of(self.model, args, kwargs, state=self.state)
            if signature in self.unplanned:
                return self.call_eagerly(*args, **kwargs)
            plan = self.plans.get(signature) if self.has_run(signature) else None
            refuse_uncapturable(self.model, plan, [] if plan is None else self.drawn_again(signature))
            return self.run(signature, args, kwargs)

    def has_run(self, signature: Signature) -> bool:
        """Whether calls of a kind have run by the plan that they have now, so that nothing is left to compile."""
        return signature in self.plans

    def drawn_again(self, signature: Signature) -> list[str]:
        """The names of random ops that a call by its plan runs again, under the saved state of the generator."""
        return []

    def _train(self, args: Any, kwargs: Any) -> Any:
        """A training call."""
        with self.lock, lasting_modes_off() as others, ExitStack() as call:
            self.walked, modules, parameters = walk(self.model, self.walked)
            refuse_compiled(self.model, self, modules)
            if not self._started:
                self._started, self.agrees = True, together(self.model)
                self._begins_training()
            refuse_transformed(self.model, parameters, args, kwargs)
            self.state = self.walked.state
            signature = signature_of(self.model, args, kwargs, state=self.state)
            trained = self.own.beneath(parameters)
            if self.watch is not None and self._learns(self.watch, trained, (args, kwargs), signature):
                self.forget(role_of(signature))
            if not self._has_plan(signature, modules, (args, kwargs), call):
                return self._unplanned_call()(*args, **kwargs)
            if self.watch is not None:
                self.plans[signature] = self.watch.together.plan(signature, self.plans[signature])
            for recorder in others:
                if isinstance(recorder, Recorder) and not (self.watch and self.watch.recorder is recorder):
                    recorder.runs_planned(self, (args, kwargs), *self.takes(self.plans[signature]))
            if self.watch is None and not self._listened:
                self._listened = self.provider.on_step_begin(self.model, self.plans[signature], self.waiting() > 0)
                if self._listened and attached(self.model) is not self:  # it was planned anew
                    return self.model(*args, **kwargs)
            first = not self.peaks.reported and not self.awaits_gradients(signature)
            self._passes.end()
            report = self.peaks.call_begins(self.model, self.plans[signature], first=first)
            result = self.run(signature, args, kwargs)
            if self.watch is not None and (number := self.call_number()) is not None and signature in self.plans:
                self.watch.called(number, self.plans[signature], result, self.made)
            if self.newest is not None and self.newest.request.batch is not None:
                self.newest.request.batch.release()
            if there := gradients_there(trained):
                when_begun(result, partial(self._backward_begins, signature, there))
            report(result, self.plans.get(signature))
            return result

    def _begins_training(self) -> None:
        """The first training call: plans of before are forgotten where several processes agree on one."""
        self.watch = self.watch or Watch(self.model, self.provider.loop)  # evaluations may have come before
        if self.agrees:
            self.watch.evaluations.end()
            self.watch = None
            self.forget()

    def _learns(self, watch: Watch, parameters: Sequence[nn.Parameter], batch: Any, signature: Signature) -> bool:
        """Whether plans for calls in a role have to be made anew, for what the loop was seen to do."""
        watch.budget = None if self.newest is None else self.newest.record.budget_bytes
        role, again = role_of(signature), signature in self.plans
        seen = watch.call_begins(parameters, batch, self.waiting_calls(), role, again=again)
        for number in watch.doubted:
            self.when_used(number, watch.used(number))
        other = watch.together.call_begins(signature, first=watch.first)
        if not (watch.settled or watch.fresh or (self.newest and self.peaks.overdue(self.newest.record))):
            return other
        ended = watch.stepped.any_at_all
        anew = self.provider.on_loop_seen(seen, watch.optimizers(), role, watch.spare(), ended) or other
        if not anew and again and seen.between_steps <= (watch.budget or 0):
            self.count_between(signature, seen.between_steps)
        return anew

    @property
    def learns(self) -> bool:
        """Whether the loop is watched, and the provider will be told what it does."""
        return self.watch is not None

    @property
    def together(self) -> tuple[Signature, ...]:
        """The kinds of calls that are planned together."""
        return () if self.watch is None else self.watch.together.kinds

    def _backward_begins(self, signature: Signature, there: There) -> None:
        """Gradients that were there in the forward pass are there still, if they are; a loss may have made others."""
        if not self._passes.begins():  # another call's part of it, which came before, has made some
            return
        if self.watch is not None and any(map(adds_to_gradient, self.watch.gradients.taken(still_there(there)))):
            if self.watch.loop.gradients != "accumulated" and signature in self.plans:  # from the next step on, it is
                self.provider.on_backward_begin(self.model, self.plans[signature])
            self.watch.backward_begins()
        elif self.watch is None and not self._listened and signature in self.plans:
            self._listened = self.provider.on_backward_begin(self.model, self.plans[signature])

    def unwatch(self) -> None:
        """The model is called, or goes without its plan: warn no more, nor look for other calls."""
        if self.watched is not None:
            self.watched.remove()
            leave(self.points)
            self.watched, self.points = None, []

    def awaits_gradients(self, signature: Signature) -> bool:
        """Whether the plan counts gradients of earlier microbatches, and there are none yet."""
        trained = self.own.beneath(list(self.model.parameters()))
        return self.plans[signature].options.accumulate and all(p.grad is None for p in trained)

    def _has_plan(self, signature: Signature, modules: Sequence[nn.Module], batch: Any, call: ExitStack) -> bool:
        """Whether a call has a plan, which is made where there is none for the model as it is now."""
        suits = partial(self.attributes.suit, self.plans, signature, modules)
        found = partial(self._found, signature, batch, call)
        return (signature in self.plans or found()) and (suits() or (found() and suits()))

    def _found(self, signature: Signature, batch: Any, call: ExitStack) -> bool:
        """Whether there is a plan for a kind of call now; False where it is to run as without one."""
        if signature in self.unplanned:
            return False
        call.enter_context(collector_paused())
        try:
            self.find(signature, *batch)
        except BatchError as e:
            if e.of_model is None:
                raise
            # as without a plan, and with all that it changes: a loop may leave a batch out
            self.call_eagerly(*batch[0], **batch[1])
            raise e.of_model from None
        except ModelError:
            if not self.trains_at_times:
                raise
            self.unplanned.add(signature)  # it trains nothing, as while another part is trained, whose input it makes
            return False
        except UNPLANNABLE as e:
            if not self.provider.on_no_plan(self.model, e):
                raise
            self.unplanned.add(signature)
            return False
        return True

    @property
    def trains_at_times(self) -> bool:
        """Whether a call that trains nothing is no mistake: others were planned, or parameters are frozen."""
        return self.newest is not None or not all(p.requires_grad for p in self.model.parameters())

    def find(self, signature: Signature, args: Any, kwargs: Any) -> None:
        """Find a plan for a kind of call that comes for the first time, or make one."""
        self.add(args, kwargs, self.provide(args, kwargs))

    def made(self) -> list[torch.Tensor]:
        """The tensors that planned graphs returned in the latest call, as far as they are alive."""
        return []

    def call_number(self) -> int | None:
        """The number of the latest call, where it is known which of them wait."""
        return None

    def run(self, signature: Signature, args: Any, kwargs: Any) -> Any:
        """Call the model under its plan."""
        raise NotImplementedError


def attach(model: nn.Module, runtime: Applied) -> None:
    """Put a runtime on a model, in place: the object, its parameters' names and its `state_dict` stay.

    It takes the place of one that has no plan yet, such as one whose budget was too small.

    Raises:
        ApplyError: the model, or a module in it, already runs under a plan, or is compiled.
    """
    if (before := attached(model)) is not None and before.newest is not None:
        raise ApplyError(f"a plan is already applied to this {type(model).__name__}: applied_plan(model).remove() it")
    if before is not None:
        detach(model)
    refuse_compiled(model, None)
    put(model, runtime)


def attached(model: nn.Module) -> Applied | None:
    """The runtime that a model runs under, or None."""
    current = replaced_call(model)
    if isinstance(current, CopiedCall):
        current = current.become()
    return current if isinstance(current, Applied) else None


def detach(model: nn.Module) -> None:
    """Take the plan off; raises ApplyError where there is none."""
    runtime = attached(model) or vars(model).get(CARRIER)  # that of a copy begins here
    if not isinstance(runtime, Applied):
        raise ApplyError(f"no plan is applied to this {type(model).__name__}")
    runtime.unwatch()
    runtime.bypassed.end()
    if runtime.stepping is not None:
        runtime.stepping.end()
    put(model, None)
    calls_back(runtime.aside)


def put(model: nn.Module, runtime: Applied | None) -> None:
    """Have a model be called through a runtime, or as it is."""
    if (before := attached(model)) is not None and before is not runtime:
        leave(before.points)
        if before.watch is not None:
            before.watch.stop()
            before.watch.evaluations.end()
    own = vars(model)
    if runtime is not None:
        put_all(runtime.points)
        replace_call(model, runtime)
        own[CARRIER] = runtime
        if type(model).compile is nn.Module.compile:
            own[COMPILE] = CompileRefused(runtime)
        return
    if attached(model) is not None:
        replace_call(model, None)
    own.pop(CARRIER, None)
    if isinstance(own.get(COMPILE), CompileRefused):
        del own[COMPILE]
