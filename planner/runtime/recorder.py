"""Records the tensors that a training loop makes and uses outside the planned graphs, from one call to the next.

The recorder is a dispatch mode that stays on from the end of a forward pass to the next training call of the model. The
planned graphs themselves run without it. It keeps no tensor alive: it knows storages by identity and a finalizer.
"""

from __future__ import annotations

import inspect
import logging
import os
import weakref
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from threading import get_ident
from typing import Any, Literal

import torch
from torch import nn

from planner.compat.autograd import adds_to_gradient, graph_is_kept, in_backward, when_backward_ends
from planner.compat.dispatch import LastingMode, finds_ops, written
from planner.compat.tensors import dense_parts, is_batched, is_traceable_wrapper_subclass, storage_key
from planner.core.attributes import shaped_as, state_of
from planner.core.call import Call, gradient_of, parts_in, storages, takes_over, tensors_in
from planner.core.gradient_sums import as_without_modes, last_references
from planner.core.layout import Order, memory_order
from planner.runtime.between import Between
from planner.runtime.events import PlannedModel
from planner.runtime.holders import Held, Pass, Path, held_in, paths_to
from planner.runtime.made import (
    Event,
    GoneInto,
    LossEvents,
    Made,
    MadeStorages,
    Used,
    UsedStorages,
    call_of,
    takes_memory,
    weak,
)
from planner.runtime.outputs import Unasking
from planner.runtime.planned_gradients import PlannedGradients
from planner.runtime.rebound import places_of
from planner.runtime.results import Results

MOST_OPS = 200_000  # between two calls of the model: no more are recorded

log = logging.getLogger("planner")


class Recorder(LastingMode):
    """The dispatch mode.

    Args:
        model: the planned model, of whose parameters, buffers and gradients the account has lines.
        device: tensors elsewhere are not counted.
        batch: what the model was called with.
        outputs: the leaves of what it returned.
        aside: tensors that its graphs made for code of the loop's own, such as a forward hook that keeps what it sees.
        earlier: the recorder of the calls just before.

    Attributes:
        model: the planned one, weakly.
        losses: what was recorded before each backward pass of the planned graphs.
        calls: the distinct ops that ran.
        results: the outputs of the first call.
        made: the tensors that were made and are alive.
        arrived: gradients of outputs, for each backward pass: storage -> as it was made, or 0 and its bytes.
        given: of the same, those that are alive.
        held: the most bytes of these that were still there when the planned graphs had used them.
        added: what the parameters' gradients were as a backward pass ended, but for `gradients`, as far as it is alive.
        budget: of the plan, in bytes.
        between: the bytes of what was made, and of `inputs`, `returned` and gradients, at once, for each op since the
            latest backward pass began, if one has; with those of `older` where half of the budget is not enough.
        returned: outputs of calls that are alive.
        aside: what the planned graphs of the first call have returned beside them, as attributes of the model, weakly.
        inputs, inputs_at_once: what the calls were given that is alive; its bytes when one was called, at most.
        first_input, given_again, handed_on: bytes of what the first was given; of what others were given and earlier
            ones had been given, too, or had returned.
        later: bytes of what calls after the first were given and that was there before the first.
        others, passing: other planned models that ran before the backward pass, and after it.
        held_then: what the loop's variables held as the first backward pass of these recorders began.
        bound: the paths that led then to outputs, and to what was made since.
        passes: the backward passes of the planned graphs.
        later_held: of the leaves of the outputs of later calls, those that were there when a backward pass began.
        later_outputs: their bytes, at most.
        reached_calls: the numbers of the calls to whose outputs gradients came.
        stepping: whether an optimizer of the model steps.
        of_optimizer, by_optimizer: the numbers of what it has made; the same of this recorder and of those before.
        waiting: bytes of the outputs of earlier calls, and of what was made of them, while another one ran, at most.
        older: what earlier recorders have seen to be made, and what their calls took and gave.
        used_before: what earlier recorders have seen to be used: heads of a model may take turns.
        undecided: what their calls were given, where the loop had not been seen to make a batch.
        before: of `older`, by storage, what was alive when a backward pass began.
        spent: bytes of the gradients of an earlier step, outside the model, that a backward pass finds, at most.
        kept: the storages of what was made before a backward pass and is alive as the next step begins.
        kept_before, returned_before: of the recorder before, the same, and those of outputs.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        batch: Any,
        outputs: Sequence[Any],
        aside: Sequence[Any] = (),
        earlier: Recorder | None = None,
    ) -> None:
        super().__init__()
        last_references()  # no mode is called yet
        self.device, self.process, self.thread = device, os.getpid(), get_ident()
        self.phase: Literal["loss", "backward"] = "loss"
        self.known = {*storages(state := state_of(model))}
        self._know([[*map(gradient_of, model.parameters())], batch, [*outputs, *aside]])
        self.made, self.used, self.used_before = MadeStorages(), UsedStorages(), list[UsedStorages]()
        self.events, self.calls, self.losses = list[Event](), dict[str, Call](), list[LossEvents]()
        self.arrived, self.passes, self._kept_for = list[dict[int, Made]](), list[Pass](), shaped_as(model.parameters())
        self.model, self.results = weakref.ref(model), Results(outputs, self.events, aside)
        self.others, self.passing = weakref.WeakSet[PlannedModel](), weakref.WeakSet[PlannedModel]()
        self.in_loss: set[int] = set()  # numbers of tensors that a backward pass made before it came to an output
        self.gradients, self.given = PlannedGradients(), MadeStorages()  # by the planned graphs; of outputs
        self.held = self.inputs_at_once = self.later = self._called = self.spent = self.given_again = self.handed_on = 0
        self.later_outputs, self.reached_calls = 0, set[int]()
        self.budget, self.before, self.between = 0, dict[int, int](), Between()
        self._own = self.between.follow(parts_in(state))
        self.returned, self.inputs, self.added = MadeStorages(), MadeStorages(), MadeStorages()
        self._counted = self.inputs, self.returned, self.added, self.gradients
        self.gone_into = GoneInto(self.used, self.made, (self.known, self.gradients.made, self.added.made))
        self.waiting, self.stepping, self.makes_batches, self.of_optimizer = (0, 0), False, False, set[int]()
        self.by_optimizer: MadeStorages = MadeStorages() if earlier is None else earlier.by_optimizer
        self.batches, self.passed = MadeStorages(), MadeStorages()  # inputs with gradients; what calls took and gave
        self.older: list[MadeStorages] = [] if earlier is None else earlier.left()
        self.undecided: list[MadeStorages] = [] if earlier is None else earlier.unknown()
        self.returned_before = {*(older := MadeStorages() if earlier is None else earlier.returned).made}
        self._older_outputs = older
        self.held_then: Held | None = None if earlier is None else earlier.held_then
        self.bound, self._spent = set[Path](), list[weakref.ref[Any]]()
        self.kept, self.kept_before = set[int](), set[int]() if earlier is None else earlier.kept
        seen = self._seen_made()
        for key in self.known.copy():
            self._drop_older(key)
        self._enter(outputs, self.passed, self.returned)
        self._enter([t for t in tensors_in(batch) if storage_key(t) in seen], self.passed)
        self._returned, self._hooks, self.later_held = [list(map(weak, outputs))], list[Any](), set[int]()
        self._given(batch)
        self.first_input = self.inputs.live
        self.aside = list(map(weak, aside))
        self._hook([*outputs, *aside])

    def knows(self, made: Sequence[MadeStorages], used: Sequence[UsedStorages], spent: list[weakref.ref[Any]]) -> None:
        """What was made and used before the first call, and is not its own; and gradients that optimizers have used."""
        self.older += [each for each in made if each.made]
        self._spent = spent
        self.used_before += [each for each in used if each]

    def _know(self, tree: Any) -> set[int]:
        """The account has lines for these storages."""
        self.known.update(found := {*storages(tree)})
        return found

    def _seen_made(self) -> set[int]:
        """What was seen to be made: a batch that was not is part of the loop's data."""
        return {key for each in (*self.older, self.made, self.passed) for key in list(each.made)}

    def _drop_older(self, key: int) -> None:
        for older in self.older:
            older.drop(key)

    def _enter(self, tensors: Any, *into: MadeStorages) -> None:
        for t in tensors_in(tensors):
            if t.device == self.device:
                for each in into:
                    each.add(t.untyped_storage(), storage_key(t))

    def _given(self, batch: Any) -> None:
        self.given_again += sum(nbytes for key, nbytes in storages(batch).items() if key in self.inputs.made)
        self._enter(batch, self.inputs)
        self._enter([t for t in tensors_in(batch) if t.requires_grad], self.batches)
        self.inputs_at_once = max(self.inputs_at_once, self.inputs.live)

    def _hook(self, outputs: Sequence[Any]) -> None:
        for at, t in enumerate(outputs):
            if isinstance(t, torch.Tensor) and t.requires_grad:
                arrives = Unasking(partial(self._gradient_arrives, self.calls_made, at, memory_order(t)))
                self._hooks.append(t.register_hook(arrives))  # type: ignore[no-untyped-call]
                self.results.awaiting.add(at)

    def broken_off(self) -> bool:
        """Whether an error has ended the latest backward pass."""
        return self.phase == "backward" and not in_backward()

    @property
    def calls_made(self) -> int:
        """How many calls of the model came before the backward pass."""
        return len(self._returned)

    def expect(self, batch: Any, outputs: Sequence[Any], aside: Sequence[Any] = ()) -> None:
        """Another call of the model, with this batch, has returned these before the backward pass of the first."""
        self._called = len(self.events)
        returned = storages([t for call in self._returned for ref in call if (t := ref()) is not None])
        before = storages([t for t in tensors_in(batch) if t.device == self.device])
        self.later += sum(n for key, n in before.items() if key not in self.known and key not in self.made.made)
        self.handed_on += sum(nbytes for key, nbytes in before.items() if key in returned)
        seen = self._seen_made()
        for key in self._know([batch, *outputs, *aside]):
            self.used.pop(key, None)
            self.made.drop(key)
            self._drop_older(key)
        self.waiting = max(self.waiting[0], sum(returned.values())), max(self.waiting[1], self.made.live)
        self._returned.append(list(map(weak, outputs)))
        self.results.last = self._returned[-1]
        self._given([t for t in tensors_in(batch) if storage_key(t) not in returned])
        self._enter(outputs, self.passed, self.returned)
        self._enter([t for t in tensors_in(batch) if storage_key(t) in seen], self.passed)
        self._hook([*outputs, *aside])

    def left(self) -> list[MadeStorages]:
        """What was made, but not by the model's optimizer, and what calls took and gave, as far as it is alive."""
        for key, (number, _) in list(self.made.made.items()):
            if number in self.of_optimizer:
                self.made.drop(key)
        given = [self.inputs, *self.undecided] if self.makes_batches else []
        return [each for each in (*self.older, self.made, self.passed, self.gradients, *given) if each.made]

    def unknown(self) -> list[MadeStorages]:
        """What calls were given and is alive, of which nobody knows whether it is part of the loop's data."""
        return [] if self.makes_batches else [each for each in (*self.undecided, self.inputs) if each.made]

    def is_new(self, batch: Any) -> bool:
        """Whether the loop was seen to make a batch: so it makes each, and holds none as a part of its data."""
        return bool(there := storages(batch).keys()) and there <= self._seen_made()

    def runs_planned(self, other: PlannedModel, batch: Any, taken: int, forward: int) -> None:
        """Another planned model runs a training step, which takes so many bytes beside what stays allocated and what is
        saved for the backward passes of others, and its forward pass so many of them.
        """
        later = taken - forward
        taken += sum(each.waiting_bytes() for each in self.others if each is not other)
        (self.passing if self.losses else self.others).add(other)
        self._note_inputs(parts_in(batch), set())
        live = self.made.live + self._older_outputs.live + taken
        self.events.append(Event(live, "", False, others=taken, later=later, model=id(other)))

    def planned_results(self, results: Any) -> None:
        """The planned graphs have made these gradients."""
        arrived = self.arrived[-1] if self.arrived else {}
        self.held = max(self.held, sum(nbytes for key, (_, nbytes) in arrived.items() if key in self.given.made))
        self.gradients.come(results, self.device)

    @property
    def came_round(self) -> bool:
        """Whether the loop has come to the end of its first step, as far as the planned models in it show: none has run
        whose results are gone, and that is trained later on.
        """
        return all(other.waiting() or other.was_trained() for other in self.passing)

    def end(self) -> None:
        """Record no more, and hold nothing of what was."""
        self.over = True
        self.events.clear()
        self.losses.clear()
        self.calls.clear()
        for hook in self._hooks:
            hook.remove()
        for own in self._own:
            own.detach()
        self._hooks.clear()
        self._own.clear()
        self.gradients.end()

    def _gradient_arrives(self, call: int, at: int, expected: Order, gradient: torch.Tensor | None) -> None:
        """A gradient of an output is there: the planned backward pass begins, if it has not begun."""
        if self.over or gradient is None or is_batched(gradient):
            return
        if not finds_ops():  # nor did it see the loss
            self.over = True
            return
        self.results.arrives(at, memory_order(gradient), expected)
        if self.phase == "loss":
            self.phase = "backward"
            self.gradients.enter_whole()
            now = held_in(self.thread)
            self.held_then = self.held_then or now
            if not self.losses:
                self.bound = paths_to(now, {*self.returned.made.copy(), *self.made.made.copy()})
            self.losses.append(self._loss_events(now.paths.keys() & {*self.returned.made.copy()}))
            adds = (model := self.model()) is not None and any(map(adds_to_gradient, model.parameters()))
            left = dict(self.gradients.made)
            self.passes.append(Pass(graph_is_kept(), adds, left, {key: now.paths.get(key, set()) for key in left}))
            self.between.begin()
            own = storages([other.tensors() for other in {*self.others, *self.passing}] if self.older else [])
            alive = {key: n for older in self.older for key, (_, n) in older.made.items() if key not in own}
            self.before = max(self.before, alive, key=lambda each: sum(each.values()))
            self.spent = max(self.spent, sum(storages([ref() for ref in self._spent]).values()))
            self.arrived.append({})
            self.results.reached_by.append(set())
            self._called = 0
            self.events.clear()
            self.in_loss.clear()
            when_backward_ends(self._backward_ended)
        self.results.reached_by[-1].add(at)
        self.reached_calls.add(call)
        if call == 1:
            self.results.own_pass_begins()
        arrived = self.arrived[-1]
        for key, nbytes in storages(gradient).items():
            arrived[key] = self.made.made.get(key, (0, nbytes))
        for t in tensors_in(gradient):
            self.given.add(t.untyped_storage(), storage_key(t))

    def _backward_ended(self) -> None:
        self.phase = "loss"
        if (model := self.model()) is not None:
            self.gradients.enter_whole()
            parts = [t for outer in tensors_in([*map(gradient_of, model.parameters())]) for t in dense_parts(outer)]
            self._enter([t for t in parts if storage_key(t) not in self.gradients.made], self.added)

    def _loss_events(self, named: Collection[int]) -> LossEvents:
        """The loss; variables hold outputs, or views of them, of these storages."""
        held = self.results.held(named)
        let_go = max((n for at, n in self.results.let_go.items() if at not in held), default=0)
        waiting = [o for o in self.others if o.waiting_bytes() and not any(map(adds_to_gradient, o.trained()))]
        others = [other.tensors() for other in {*self.others, *self.passing}]  # whose backward passes may be eager's
        own = {*self.gradients.made, *storages(others), *(key for other in waiting for key in other.outputs())}
        read = {key: used.nbytes for key, used in self.used.items() if not used.stays and key not in own}
        made = dict(self.made.made)
        parts = frozenset(key for key, (number, _) in made.items() if number in self.in_loss)
        later = [ref() for call in self._returned[1:] for ref in call]
        self.later_held.update(at for at, t in enumerate(later) if t is not None)
        self.later_outputs = max(self.later_outputs, sum(storages(later).values()))
        waits = {id(o): o.waiting_bytes() for o in waiting}
        rest = self._older_outputs.live  # it is beside the step
        events = tuple(replace(e, live=e.live - rest) for e in self.events) if rest else tuple(self.events)
        return LossEvents(events, let_go, held, made, parts, read, self._called, waits)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, func = kwargs or {}, as_without_modes(func, args)
        if self.over or self.phase == "backward" or os.getpid() != self.process:
            return func(*args, **kwargs)
        if any(map(is_traceable_wrapper_subclass, tensors_in((args, kwargs)))):
            return NotImplemented  # the wrapper's own ops on the tensors inside it come here
        result = func(*args, **kwargs)
        try:
            self._note(func, args, kwargs, result)
        except Exception as e:  # whatever an op of the loop's own returns, the loop goes on
            log.debug("the ops between two calls of the model were not recorded: %s: %s", type(e).__name__, e)
            self.over = True
        return result

    def _note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        into = {storage_key(t) for t in parts_in(written(func, args, kwargs))}
        fresh = takes_over(func, result) and (key := storage_key(result)) not in self.known and not self._entered(key)
        given, backward = [] if fresh else parts_in((args, kwargs)), in_backward()
        self.results.reads(func, given)
        inputs = self._note_inputs(given, into)
        made: dict[int, int] = {}
        for t in parts_in(result):
            if takes_memory(t, self.device) and (key := storage_key(t)) not in inputs and key not in self.made.made:
                self.made.add(t.untyped_storage(), key)
                made[key] = self.made.number
                if backward:
                    self.in_loss.add(self.made.number)
                elif self.stepping and self.losses:
                    self.of_optimizer.add(self.made.number)
                    self.by_optimizer.add(t.untyped_storage(), key)
        self.gone_into.note(inputs, made, into, between=bool(self.losses))
        call = call_of(func, args, kwargs, result)
        name = "" if call is None else self.calls.setdefault(call.key, call).key
        places = () if backward else places_of(inspect.currentframe())
        self.events.append(Event(self.made.live + self._older_outputs.live, name, backward, places, (*made.values(),)))
        self.between.note(name, (self.made, *self._counted), self.older, self.budget)
        self.over |= len(self.events) > MOST_OPS

    def _entered(self, key: int) -> bool:
        """Whether a storage is counted that no op was seen to make in this recording."""
        return any(key in each.made for each in (*self._counted, *self.older))

    def _note_inputs(self, given: Sequence[torch.Tensor], into: set[int]) -> set[int]:
        """Enter tensors that existed before and are used, and storages that are written into; returns all storages."""
        inputs = set()
        for t in given:
            if not takes_memory(t, self.device):
                continue
            key = storage_key(t)
            inputs.add(key)
            if key in self.known or key in self.made.made:
                continue
            if (used := self.used.get(key)) is None:
                storage, since = t.untyped_storage(), None if self._entered(key) else self.between.ops
                used = self.used[key] = Used(storage.nbytes(), since=since)
                weakref.finalize(storage, self.between.ends, self.used, key).atexit = False
            used.in_step |= not self.losses
            used.stays |= isinstance(t, nn.Parameter) or key in into
            used.shaped |= self._kept_for(t)
            if isinstance(t, nn.Parameter) and t.requires_grad and torch.is_grad_enabled():
                used.trained, self.between.trains = weakref.ref(t), True
        return inputs
