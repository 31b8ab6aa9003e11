"""Watches what a training loop does around a planned model in its first steps, until a plan can be made for that."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from threading import get_ident
from typing import Any

import torch
from torch import nn, optim

from planner.capture.trace.loss_trace import find_loss, probable_loss
from planner.compat.dispatch import in_compiled_call, switch_off, switch_on
from planner.compat.dynamo import call_past_wrappers
from planner.core.attributes import results_aside
from planner.core.call import storages
from planner.core.loop import Gradients, Loop
from planner.core.objects import dense_tensors, leaves
from planner.core.plan import PlanRecord
from planner.runtime.cuda_graphs import captures
from planner.runtime.evaluations import Evaluations
from planner.runtime.fates import Fates, warn_between, warn_unseen, warn_waiting
from planner.runtime.holders import Path
from planner.runtime.kept import KeptOutputs
from planner.runtime.learnt import Learnt
from planner.runtime.loss_seen import loss_seen
from planner.runtime.made import MadeStorages, UsedStorages
from planner.runtime.modes import may_record
from planner.runtime.optimizer_steps import ModelsOptimizers, tell
from planner.runtime.peaks import when_begun
from planner.runtime.recorded import between_steps, shown_by, stays, trained_outside, workspaces_of
from planner.runtime.recorder import Recorder
from planner.runtime.rounds import Rounds
from planner.runtime.signature import Role
from planner.runtime.stateless import still_without, without_state
from planner.runtime.together import Together
from planner.runtime.used_gradients import UsedGradients

TRIES = 3  # steps in which nothing could be recorded, before no more are tried
VAIN = 100  # the same of steps without a backward pass


class Watch:
    """What the loop around one model was seen to do.

    Attributes:
        recorder: of what runs between two calls of the model, while it is on.
        evaluations: looks at calls of the model without gradients.
        first: whether no earlier call waited when the latest one began.
        doubted: the numbers of those that did, where more waited than ever before: `used` is to be called for them.
        together, stepped: the kinds of calls of a step; the model's optimizers that were seen to step.
    """

    def __init__(self, model: nn.Module, loop: Loop) -> None:
        self._model = weakref.ref(model)
        self._learnt = Learnt(loop)
        self._fates, self.kept, self.evaluations = Fates(), KeptOutputs(), Evaluations()
        self._late: Gradients | None = None  # found where the latest call began; counts if a backward pass comes of it
        self._recorded: dict[Role, None] = {}  # the roles of the calls that the recorder has seen
        self._numbers: list[int | None] = []  # of these calls
        self._later: dict[Role, int] = {}  # bytes that later calls of a step are given, and that are there before it
        self._number: int | None = None  # of the latest call
        self._earlier: Recorder | None = None  # of the calls just before
        self._used: list[UsedStorages] = []  # by the steps that were recorded
        self.stepped = ModelsOptimizers(model)
        self.recorder: Recorder | None = None
        self._workspaces: dict[str, int] = {}
        # bytes that the latest plan counts for states, what of these was not there yet, and that each loss reads anew
        self._state = self._spare = self._targets = 0
        self._bound, self._renewed = set[Path](), 0  # of the latest recording; bytes that its plans count
        self._told: Loop | None = None
        self.budget: int | None = None  # of the newest plan, in bytes
        self._said = False  # that the loop takes more than that between its steps
        self._called_compiled = False  # by a function that torch.compile made, in which ops are not seen
        self.doubted: Sequence[int] = ()
        self.first, self.between = True, 0  # bytes that the loop made between the calls of a step, and that stayed
        self._tries, self._in_vain, self._loss_at = 0, 0, -1  # the position of what may be the loss in the output
        # calls whose only backward pass adds to no gradient (`autograd.grad`); threads, of which several show no loop
        self._asks, self._threads = set[Role](), set[int]()
        self._rounds = Rounds()  # of the calls that began while no other one waited
        self.together, self.gradients = Together(), UsedGradients()
        self.compiled = True  # the latest call
        tell(self)

    def optimizers(self) -> list[optim.Optimizer]:
        """Those that stepped parameters of the model, and still exist."""
        return self.stepped.all()

    @property
    def loop(self) -> Loop:
        """What was seen of the loop around calls in the role of the latest one."""
        return self._learnt.loop

    @property
    def fresh(self) -> bool:
        """Whether the latest call was the first in its role, and others came before in other roles."""
        return self._learnt.fresh

    @property
    def settled(self) -> bool:
        """Whether nothing more is to be learnt of calls in that role but what each tells by itself."""
        return self._learnt.role in self._learnt.settled

    def call_begins(
        self,
        parameters: Sequence[nn.Parameter],
        batch: Any,
        waiting: Collection[int],
        role: Role = (),
        *,
        again: bool = False,
    ) -> Loop:
        """What was seen of the loop when another training call begins.

        Args:
            parameters: of the model.
            batch: that it is called with.
            waiting: the numbers of earlier calls that wait for their backward pass.
            role: of the call.
            again: whether it is like an earlier one, and so trains the same parameters.
        """
        self._threads.add(get_ident())
        if len(self._threads) > 1:
            self.stop()
        self._fates.settle(waiting)
        left_over = self._fates.left_over(waiting)
        self._begin(role, [number for number in waiting if number not in left_over])
        optimizers, recorder = self.optimizers(), self.recorder
        self.gradients.call_begins(parameters, optimizers, recorder, self.loop.gradients)
        left = self.evaluations.end(batch, self._model(), optimizers)
        if recorder is not None and recorder.broken_off():
            self.stop()  # a step that failed shows nothing of those that do not
        elif recorder is not None and (recorder.losses or recorder.over):
            self._finished(recorder, dense_tensors(batch), [(p, p.grad) for p in parameters], again)
        elif recorder is not None and self.first and self._ended(left_over):
            self._came_to_nothing(recorder, [(p, p.grad) for p in parameters])
        elif recorder is None and self.first and not self.settled:
            self._missed()
        left -= min(self.evaluations.renewed(self._bound), self._renewed) if left else 0
        left -= self._targets if self.evaluations.made_batch else 0
        if (more := max(left, 0 if self.loop.stateless else self.stepped.late_state(self._state))) > 0:
            self._learnt.finds(Loop(around=more))
        self._note(parameters, sum(left_over.values()))
        return self.loop

    def _begin(self, role: Role, others: Sequence[int]) -> None:
        """A call begins while others wait for their backward pass."""
        raised = self._learnt.begin(role, {number: self._fates.role(number) for number in others})
        self.first, self.doubted = not others, others if raised else ()
        self._fates.doubt(self.doubted)
        if self.first:
            self._learnt.begins_alone(self._fates.in_vain)
            self.kept.call_begins()
            self._rounds.call_begins(optimizer_seen=self.stepped.any_seen)

    def _ended(self, left_over: Collection[int]) -> bool:
        """Whether no backward pass comes of the calls that the recorder has seen."""
        return bool(self._numbers) and self._fates.without(self._numbers, left_over)

    def _note(self, parameters: Sequence[nn.Parameter], left_over: int) -> None:
        """What the beginning of a call tells by itself: calls that are left over, and gradients that are there."""
        learnt, role, self._late = self._learnt, self._learnt.role, None
        unused, loop = self._fates.unused(role), learnt.loop
        if unused != loop.unused or left_over > loop.left_over:
            learnt.loop = replace(loop, unused=unused, left_over=max(left_over, loop.left_over))
        if loop.stateless and (model := self._model()) is not None:
            without = still_without(model, self.optimizers(), loop.stateless)
            learnt.loop = replace(learnt.loop, stateless=without)
        if self.loop.gradients == "accumulated" or (gradients := self.gradients.fate(parameters)) is None:
            return
        if role in self._asks:  # they need not be cleared before
            gradients = "accumulated"
        if unused or role in self._fates.dropped:
            self._late = gradients
        else:
            learnt.gradients_there(gradients, self.gradients.fewer(parameters))

    def _came_to_nothing(self, recorder: Recorder, counted: Any) -> None:
        """No backward pass comes of the calls that were recorded."""
        self._between(recorder, [[list(o.state.values()) for o in self.optimizers()], counted])
        self._earlier = recorder
        self.stop()
        self._in_vain += 1
        if self._learnt.heard or self._in_vain > VAIN:
            self._learnt.settled.update(role for role in self._recorded if self._fates.unused(role))

    def _finished(self, recorder: Recorder, batch: Any, counted: Any, again: bool) -> None:
        """Enter what a step's recording has shown as a call begins; the account has lines for what it is given."""
        self._measure()
        optimizers = self.optimizers()
        states = [list(o.state.values()) for o in optimizers]
        awaited = max(0, self._state - sum((there := storages(states)).values()))
        there |= {key: nbytes for key, (_, nbytes) in recorder.by_optimizer.made.copy().items()}
        self._spare = self._state - sum(there.values())
        recorder.makes_batches = recorder.is_new(batch)
        comes, roles = self._learnt.role, [*self._recorded]
        later = recorder.later if comes in roles else self._later.get(comes, 0)
        self._later |= dict.fromkeys(roles, recorder.later)
        turns, self._used = comes not in roles, [*recorder.used_before, recorder.used]
        cleared = storages([ref() for ref in self.gradients.spent(trained_outside(recorder.used))])
        given = {"awaited": awaited, "later_inputs": later}
        found = stays(recorder, batch, [counted, states], optimizers, turns=turns, cleared=cleared, **given)
        seen = loss_seen(recorder, self._workspaces, found, cleared, first=not self._learnt.heard)
        recorder.kept.update(found.kept)
        held, self._targets = {at for loss in recorder.losses for at in loss.held}, found.unread
        self._bound, self._renewed = recorder.bound, 0 if seen is None else seen.stays
        own = [states, [p for p, _ in counted] if recorder.passing else counted]
        took = self._between(recorder, own, alone=not (found.around or recorder.between.trains or recorder.passing))
        if recorder.passes and not any(each.adds for each in recorder.passes):
            self._asks.update(roles)
        if self.first:
            self.together.recorded(passes=len(recorder.losses), roles=len(roles))
        self.recorder, self._earlier, between, self.between = None, recorder, self.between, 0
        self._recorded.clear()
        self._numbers.clear()
        recorder.end()
        if seen is None:
            if not self.settled:
                self._missed()
            return
        beside = found.beside + between + self.gradients.untaken_bytes(p for p, _ in counted)
        shown = replace(
            shown_by(recorder, held, only_loss=recorder.results.reached == {self._loss_at}),
            loss=seen,
            beside=beside,
            around=found.around,
            between_steps=took,
            kept_beside=found.kept_passes,
            freed_beside=found.freed_passes,
            stateless=without_state(self._model(), optimizers) if again else (),
            sparse=tuple(self.stepped.entries.items()),
        )
        before, settled = self.loop, self.settled
        self._learnt.enter(
            shown, roles, found.batches, settles=comes in roles or recorder.came_round, compiled=self.compiled
        )
        self._rounds.chosen |= settled and self.loop != before  # the loop does something else by now

    def _between(self, recorder: Recorder, own: Any, *, alone: bool = False) -> int:
        """Bytes that the loop held at once between its steps, where no other model is trained; else warns, once."""
        took = 0 if self.stepped.entries else between_steps(recorder, own)  # not of sparse gradients
        if not alone and self.budget and took > self.budget and not self._said:
            self._said = True
            warn_between(took, self.budget)
        return took if alone else 0

    def spare(self) -> int:
        """Bytes of the optimizers' state that plans count and that is not there yet; 0 once the loop has been seen.

        That is while an optimizer calls the model, in its first step, and each call shows something new.
        """
        inside = not self.stepped.any_seen and self.stepped.step_now()
        before, self._told = self._told, self.loop
        return max(0, self._spare) if inside and before != self.loop else 0

    def _missed(self) -> None:
        """A step came of which nothing was recorded."""
        self._tries += 1
        if self._tries > TRIES:
            self._learnt.settled.add(self._learnt.role)
            if self._called_compiled and (model := self._model()) is not None:
                warn_unseen(type(model).__name__)

    def called(self, number: int, plan: PlanRecord, result: Any, made: Callable[[], Sequence[torch.Tensor]]) -> None:
        """A call by a plan has returned.

        Args:
            number: of the call.
            plan: by which it ran.
            result: of the call.
            made: as in `call_ended`.
        """
        asks = not self.settled or not self._fates.certain(self._learnt.role)
        saved = plan.saved_bytes  # from the whole timeline
        counts_others = max(plan.options.in_flight, plan.step.loop.in_flight) > 1 or plan.step.occupancy is not None
        if (beyond := self._fates.beyond(saved if self.settled or counts_others else 0) - self.loop.left_over) > 0:
            self._learnt.waiting_takes_more(partial(warn_waiting, plan, beyond))
        self._fates.add(number, self._learnt.role, saved)
        if self.settled and self.first and (model := self._model()) is not None:
            self.kept.look(plan, model, result, round_begins=self._rounds.calls == 1)
        self._number = number
        self._state = plan.account.get("optimizer state", 0)
        if asks:
            when_begun((result, made()), self.used(number))

    def was_trained(self) -> bool:
        """Whether a backward pass has come of some call."""
        return bool(self._fates.used) or self._learnt.heard

    def used(self, number: int) -> Callable[[], None]:
        """What is to be called when a backward pass comes to the results of a call."""
        own = weakref.ref(self)
        return lambda: None if (watch := own()) is None else watch.backward_of(number)

    def backward_of(self, number: int) -> None:
        """A backward pass has come to the results of a call."""
        self._fates.use(number)
        if number == self._number and self._late is not None and self.loop.gradients != "accumulated":
            self._learnt.loop = replace(self.loop, gradients=self._late)

    def call_ended(self, args: Any, kwargs: Any, result: Any, made: Callable[[], Sequence[torch.Tensor]]) -> None:
        """A training call has returned: record what comes until the next one, where that is not known yet.

        Args:
            args: of the call.
            kwargs: of the call.
            result: of the call.
            made: gives the tensors that its planned graphs returned, and that are alive.
        """
        if (model := self._model()) is not None:
            self.kept.returned(outputs := leaves(result), (args, kwargs), model)
        if model is None or (self.settled and not self._rounds.chosen):
            self._earlier = None
            return
        batch, loss = dense_tensors((args, kwargs)), probable_loss(result)
        self._loss_at = -1 if loss is None or find_loss(result) is not None else loss[0]
        aside = results_aside(model, outputs, made())
        if self.recorder is not None:
            self.recorder.expect(batch, outputs, aside)
            self._recorded[self._learnt.role] = None
            self._numbers.append(self._number)
        elif self.first:  # from the middle of a step on, it would miss what earlier calls hold
            self._record(model, batch, outputs, aside)

    def goes_between(self, given: Any) -> MadeStorages | None:
        """Another of a step's calls begins: what the loop has made for it, beside what it gives; None if not seen."""
        if self.recorder is None or self.recorder.losses:
            return None
        for key in storages(given):
            self.recorder.made.drop(key)
        return self.recorder.made

    def step_goes_on(self, batch: Any, outputs: Sequence[Any]) -> None:
        """One of a step's calls has returned: record what comes after it, in the place of what came before.

        Args:
            batch: that the model was given.
            outputs: of all calls so far, those that are alive; None for others.
        """
        if (model := self._model()) is None or (self.settled and not self._rounds.chosen):
            return
        self.stop()
        loss = probable_loss(tuple(outputs))
        self._loss_at = -1 if loss is None else loss[0]
        self._record(model, dense_tensors(batch), outputs, results_aside(model, outputs))

    def _record(self, model: nn.Module, batch: Any, outputs: Sequence[Any], aside: Sequence[Any] = ()) -> None:
        earlier, self._earlier, self._called_compiled = self._earlier, None, in_compiled_call()
        if self._called_compiled:  # from the next call on, if it is the model that is compiled
            call_past_wrappers(model)
        elif len(self._threads) <= 1 and may_record():
            self.recorder = Recorder(model, next(model.parameters()).device, batch, outputs, aside, earlier)
            self.recorder.budget = self.budget or 0
            self.recorder.knows(self.evaluations.left, self._used, self.gradients.spent(trained_outside(*self._used)))
            self.evaluations.left = []
            self.recorder.stepping = self.stepped.step_now()
            self._recorded, self._numbers = {self._learnt.role: None}, [self._number]
            weakref.finalize(model, self.recorder.end).atexit = False
            switch_on(self.recorder)

    def stop(self) -> None:
        """Record no more."""
        recorder, self.recorder = self.recorder, None
        if recorder is not None:
            recorder.end()
            switch_off(recorder)

    def backward_begins(self) -> None:
        """Gradients that were there in the forward pass are still there, and are added to."""
        self._learnt.loop = replace(self.loop, gradients="accumulated")

    def _measure(self) -> None:
        """Measure the workspaces of the ops that were recorded."""
        recorder, model = self.recorder, self._model()
        if recorder is not None and model is not None and not captures(model):
            self._workspaces |= workspaces_of(recorder, self._workspaces)

    def optimizer_steps(self, optimizer: optim.Optimizer) -> None:
        """An optimizer is about to step."""
        if self.recorder is not None and self.stepped.has(optimizer):
            self.recorder.stepping = True

    def optimizer_stepped(self, optimizer: optim.Optimizer) -> None:
        """An optimizer has stepped; a round ends if it is one of the model's."""
        known = self.loop.gradients == "accumulated" and self.stepped.knows(optimizer)
        known = known or (self.gradients.never_there and optimizer in self.optimizers())
        if not (self.settled and known and self.recorder is None) and self._model() is not None:
            self.gradients.any_stepped(optimizer)
            if trained := self.stepped.add(optimizer):
                self.gradients.optimizer_stepped(trained)
                self._measure()
        if optimizer in self.optimizers():
            self._rounds.end()
            if self.recorder is not None:
                self.recorder.stepping = False
