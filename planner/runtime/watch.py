"""Watches what a training loop does around a planned model in its first steps, until a plan can be made for that."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn, optim
from torch.optim.optimizer import register_optimizer_step_post_hook

from planner.capture.trace.loss_trace import find_loss, leaves, probable_loss
from planner.compat.autograd import in_backward
from planner.compat.dispatch import LastingMode, lasting_modes_off, modes_here, switch_off, switch_on
from planner.compat.tensors import storage_key, version_of
from planner.core.call import storages
from planner.core.loop import Gradients, Loop, most_of
from planner.costs.measured_ops import measure
from planner.requests.optimizers import trained_by
from planner.runtime.recorded import loss_seen, stays
from planner.runtime.recorder import Recorder
from planner.stepping.spent import SpentGradient

TRIES = 3  # steps in which nothing could be recorded, before no more are tried

_watches: weakref.WeakSet[Watch] = weakref.WeakSet()
_handles: list[Any] = []


class Watch:
    """What the loop around one model was seen to do.

    Attributes:
        loop: so far.
        stepped: the optimizers that stepped parameters of the model.
        seen: those that stepped any.
        recorder: of what runs between two calls of the model, while it is on.
        settled: whether nothing more is to be learnt but what each call tells by itself. What a step holds may change
            later (weights are averaged from some step on, another loss is added), so that after 2, 4, 8, ... more steps
            another one is recorded.
    """

    def __init__(self, model: nn.Module, loop: Loop) -> None:
        self._model = weakref.ref(model)
        self.loop = loop
        self.stepped: list[weakref.ref[optim.Optimizer]] = []
        self.seen: weakref.WeakSet[optim.Optimizer] = weakref.WeakSet()
        self.settled = False
        self.recorder: Recorder | None = None
        self._workspaces: dict[str, int] = {}
        self.between = 0  # bytes that the loop made between the calls of a step, and that stayed
        self._loss_at = -1  # of what may be the loss, or not, its position among the leaves of the output
        self._tries = 0
        self._steps, self._next = 0, 2  # since it settled, and after how many another one is recorded
        self._again = False  # it is the present one
        self._first = True  # whether no earlier call waited when the latest one began
        self._used: dict[torch.Tensor, int] = {}  # parameter -> version of its gradient when an optimizer had used it
        _watches.add(self)
        if not _handles:
            _handles.append(register_optimizer_step_post_hook(_stepped))

    def optimizers(self) -> list[optim.Optimizer]:
        """Those that stepped parameters of the model, and still exist."""
        return [optimizer for ref in self.stepped if (optimizer := ref()) is not None]

    def call_begins(self, parameters: Sequence[nn.Parameter], batch: Any, waiting: int) -> Loop:
        """What was seen of the loop when another training call begins.

        Args:
            parameters: of the model.
            batch: that it is called with.
            waiting: earlier calls that wait for their backward pass.
        """
        self._first = not waiting
        if self._first and self.settled:
            self._steps += 1
            self._again = self._steps == self._next
            self._next *= 1 + self._again
        loop = replace(self.loop, in_flight=max(self.loop.in_flight, waiting + 1))
        if self.loop.gradients != "accumulated" and (gradients := self._gradients(parameters)) is not None:
            loop = replace(loop, gradients=gradients)
        recorder = self.recorder
        if recorder is not None and (recorder.losses or recorder.over):
            loop = self._finished(recorder, loop, [batch, [p.grad for p in parameters]])
        elif recorder is None and self._first and not self.settled:
            self._missed()
        self.loop = loop
        return loop

    def _finished(self, recorder: Recorder, loop: Loop, counted: Any) -> Loop:
        """The loop with what a step's recording has shown; the account has lines for `counted`."""
        self._measure()
        found = stays(recorder, [counted, *(list(o.state.values()) for o in self.optimizers())])
        seen = loss_seen(recorder, self._workspaces, found.left, found.read)
        held = {at for loss in recorder.losses for at in loss.held}
        self.recorder, between, self.between = None, self.between, 0
        recorder.end()
        before = loop if self.settled else None
        if seen is None:
            if before is None:
                self._missed()
            return loop
        self.settled = True
        loop = replace(
            loop,
            outputs_held=None if len(held) == len(recorder.outputs) else tuple(sorted(held)),
            only_loss=recorder.reached == {self._loss_at},
            loss=seen,
            beside=found.beside + between,
            around=found.around,
            graph_retained=recorder.graph_retained or loop.graph_retained,
        )
        return loop if before is None else most_of(before, loop)

    def _missed(self) -> None:
        """A step came of which nothing was recorded."""
        self._tries += 1
        self.settled = self._tries > TRIES

    def call_ended(self, args: Any, kwargs: Any, result: Any, made: Callable[[], Sequence[torch.Tensor]]) -> None:
        """A training call has returned: record what comes until the next one, where that is not known yet.

        Args:
            args: of the call.
            kwargs: of the call.
            result: of the call.
            made: gives the tensors that its planned graphs returned, and that are alive.
        """
        model = self._model()
        if model is None or (self.settled and not self._again):
            return
        outputs = leaves(result)
        loss = probable_loss(result)
        self._loss_at = -1 if loss is None or find_loss(result) is not None else loss[0]
        returned = storages(outputs)
        aside = [t for t in made() if storage_key(t) not in returned]
        if self.recorder is not None:
            self.recorder.expect((args, kwargs), outputs, aside)
        elif self._first:  # from the middle of a step on, it would miss what earlier calls hold
            self._record(model, (args, kwargs), outputs, aside)

    def goes_between(self, given: Any) -> None:
        """Another of a step's calls begins: what the loop has made, beside what it gives, stays."""
        if self.recorder is not None and not self.recorder.losses:
            for key in storages(given):
                self.recorder.made.drop(key)
            self.between += self.recorder.made.live

    def step_goes_on(self, batch: Any, outputs: Sequence[Any]) -> None:
        """One of a step's calls has returned: record what comes after it, in the place of what came before.

        Args:
            batch: that the model was given.
            outputs: of all calls so far, those that are alive; None for others.
        """
        model = self._model()
        if model is None or self.settled:
            return
        self.stop()
        loss = probable_loss(tuple(outputs))
        self._loss_at = -1 if loss is None else loss[0]
        self._record(model, batch, outputs)

    def _record(self, model: nn.Module, batch: Any, outputs: Sequence[Any], aside: Sequence[Any] = ()) -> None:
        if _may_record():
            self.recorder = Recorder(model, next(model.parameters()).device, batch, outputs, aside)
            weakref.finalize(model, self.recorder.end).atexit = False
            switch_on(self.recorder)

    def stop(self) -> None:
        """Record no more."""
        recorder, self.recorder = self.recorder, None
        if recorder is not None:
            recorder.end()
            switch_off(recorder)

    def _gradients(self, parameters: Sequence[nn.Parameter]) -> Gradients | None:
        """What becomes of gradients, where some are there as a forward pass begins; None where there are none.

        Those that an optimizer has used, and that nothing has changed since, are expected to be cleared before the
        backward pass.
        """
        there = [(p, p.grad) for p in parameters if p.grad is not None and not isinstance(p.grad, SpentGradient)]
        if not there:
            self._used.clear()
            return None
        used = all(self._used.get(p) == version_of(gradient) for p, gradient in there)
        return "cleared late" if used else "accumulated"

    def backward_begins(self) -> None:
        """Gradients that were there in the forward pass are still there."""
        self.loop = replace(self.loop, gradients="accumulated")

    def _measure(self) -> None:
        """Measure the workspaces of the ops that were recorded."""
        recorder, model = self.recorder, self._model()
        if recorder is None or model is None:
            return
        ran = {event.call for loss in recorder.losses for event in loss.events} - {""}
        todo = [recorder.calls[key] for key in ran - self._workspaces.keys()]
        with lasting_modes_off():
            found = measure(todo, next(model.parameters()).device, progress=False)
        self._workspaces |= dict.fromkeys((call.key for call in todo), 0)
        self._workspaces |= {key: allocated.workspace for key, allocated in found.items()}

    def optimizer_stepped(self, optimizer: optim.Optimizer) -> None:
        """An optimizer has stepped: whose parameters, and which gradients it has used."""
        model = self._model()
        if model is None:
            return
        self.seen.add(optimizer)
        own = {id(p): p for p in model.parameters()}
        trained = [own[at] for at in trained_by(optimizer) & own.keys()]
        if not trained:
            return
        if all(ref() is not optimizer for ref in self.stepped):
            self.stepped.append(weakref.ref(optimizer))
        self._used |= {p: version_of(p.grad) for p in trained if p.grad is not None}
        self._measure()


def _may_record() -> bool:
    """Whether a mode may stay on: in the main thread, and where neither a mode of the loop's own nor a backward pass
    would end in its place.
    """
    own = all(isinstance(mode, LastingMode) for mode in modes_here())
    return own and not in_backward() and threading.current_thread() is threading.main_thread()


def _stepped(optimizer: optim.Optimizer, *_: Any) -> None:
    """The hook after every optimizer's step."""
    for watch in list(_watches):
        if not watch.settled or watch.loop.gradients != "accumulated" or optimizer not in watch.seen:
            watch.optimizer_stepped(optimizer)
