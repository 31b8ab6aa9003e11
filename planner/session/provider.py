"""Provides the plan for each kind of step of a model: made before, from a file, agreed on by the ranks, or new."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from torch import nn, optim

from planner.capture.trace.step import TrainingGraph
from planner.core.loop import Loop, same_facts
from planner.core.plan import PlanRecord
from planner.core.recipe import Choice
from planner.core.surroundings import surroundings_of, under
from planner.costs.account import counts_optimizers, more_of_optimizers
from planner.errors import ApplyError, InfeasibleBudgetError, PlannerError
from planner.parallel.buckets import buckets_of
from planner.parallel.group import refuse_verification
from planner.planning.outside import more_of_loss
from planner.planning.pipeline import make_plan
from planner.planning.uncompiled import checkpointed, fits_uncompiled
from planner.planning.unreached import beside_loss, given_aside, worth_leaving_out, worth_not_counting
from planner.requests.check import with_batch
from planner.requests.optimizers import Found, optimizers_of, weakly
from planner.requests.planned import Known, Planned
from planner.requests.request import Request
from planner.runtime.events import Call, Caller
from planner.runtime.signature import Role, Signature, call_signature, role_of
from planner.session.agreement import agreed
from planner.session.announce import announce, note_waiting, warn_over, warn_unplanned, why_anew
from planner.session.binding import Awaited
from planner.session.counted import counted, with_buckets
from planner.session.forgotten import free_others
from planner.session.growth import Growth
from planner.session.lean import HARDLY, leanest, over_budget
from planner.session.several import Several
from planner.session.uncounted import adds_up, gradients_warned, unreduced_warned, waiting_warned
from solvers import BRIEF

TOLERANCE = 1000  # plans are made anew for what is more than this part of the budget
EARLY = 4  # calls, in which what a loop shows ends a training that does not fit
NEW_KIND = "this kind of step (its shapes, dtypes and modes) comes for the first time"
Judge = Callable[[Planned], Planned]


class Provider:
    """Provides plans for a model and its copies, by one request.

    Args:
        model: the model that the plans were asked for.
        request: what was asked for; its batch is not used.
        known: a plan whose schedule is taken where it is for the step that comes.
        ready: a plan for the model that has its batch, for the first call of that kind.
        awaited: a plan for the model whose batch is known by its shapes alone.
        judge: sees each plan that does not count what the loop was seen to do, and may give another one.
        check: the same for every plan.

    Attributes:
        loop: what the training loop does, as far as plans are made for it, where calls have no role of their own.
        loops: the same for each role that calls are in.
    """

    def __init__(
        self,
        model: nn.Module,
        request: Request,
        *,
        known: Known | None = None,
        ready: Planned | None = None,
        awaited: Awaited | None = None,
        judge: Judge | None = None,
        check: Judge | None = None,
    ) -> None:
        if known is not None:  # its schedule is for the loop that it was made for
            request = replace(request, loop=known.record.step.loop)
        self.model, self.request = model, request
        self.known, self.awaited, self.judge, self.check = known, awaited, judge, check
        self.loop = request.loop
        self.loops: dict[Role, Loop] = {}
        self.accepted: dict[Role, Loop] = {}  # what was seen, for which the plans are good enough
        self.answered: dict[Role, tuple[Loop, list[weakref.ref[optim.Optimizer]]]] = {}  # the latest of that, as told
        self.why = ""  # plans are made anew for the loop
        self.heard = self.calls = 0  # how often the loop was looked at; training calls since there was something to see
        self.uncompiled: set[Role] = set()  # of whose steps it is known whether they run without torch.compile
        self.again = False  # the next plan is for a step that was captured, and another loop
        self.brief: set[Role] = set()  # whose plan was searched for briefly, until the loop is known
        self.stepped: list[weakref.ref[optim.Optimizer]] = []  # that were seen to step the model's parameters
        self.counted: dict[Role, Found] = {}  # the optimizers in the plans
        self.records: dict[Role, PlanRecord] = {}  # the latest of the plans
        # of each role, the latest step that was captured, and its peak with everything kept, in bytes
        self.captured: dict[Role, tuple[Signature, TrainingGraph, int]] = {}
        self.peaks: dict[Role, int] = {}  # the highest of the plans for it
        self.warned = False  # that there is no plan
        self.own: list[Planned] = []  # whose schedules may serve other sizes
        self.before: list[Planned] = []  # the same, until plans were last made anew
        self.growth = Growth()
        self.several, self.together = Several(), tuple[Signature, ...]()  # calls of a step that are planned together
        self.early: dict[Signature, Planned] = {}  # for the ranks to agree on
        if ready is not None:
            self.own.append(ready.without_batch())
            kind = _kind(ready.request)
            self.early[kind], self.loops[role_of(kind)] = ready, self.loop
            self.records[role_of(kind)] = self.records[()] = ready.record
            self._keep(ready)
        if awaited is not None:
            self.own.append(awaited.planned)
        self.ready = dict(self.early) if judge or check else {}  # else they serve without being asked for

    def on_missing_plan(self, caller: Caller, call: Call) -> Planned:
        """See `PlanProvider`; waits for the other processes where they agree on it."""
        model = caller.model
        self.answered.clear()  # as other plans may leave less
        if call.refused:
            self._do_without_compile(model, call.refused)
        free_others(model)
        request = with_batch(replace(self.request, runs=True), model, call.args, call.kwargs, call.maxima)
        median, now = call.assume_median_branch, surroundings_of(model)
        request = replace(request, assume_median_branch=median, surroundings=now, brief=self._may_be_brief(caller))
        request = with_buckets(self._with_loop(request), buckets_of(model))
        before = self.known is not None and isinstance(self.known.record.recipe, Choice)  # it was so in another run
        loop_known = before or (self.heard > 0 and role_of(_kind(request)) in self.captured)
        request = replace(request, uncompiled=loop_known and model is self.model and not caller.agrees)
        if self.judge is not None:
            refuse_verification(model)
        if not call.compiled:
            planned = make_plan(replace(request, options=replace(request.options, mode="eager")))
            planned = replace(planned, record=replace(planned.record, options=request.options))  # it is not asked for
            return planned if self.judge is None else self.judge(planned)
        if caller.agrees:
            self.ready.update(self.early)
            mine = self.early.get(_kind(request)) if model is self.model else None
            planned = agreed(request, self._plan, mine)
            self.ready.clear()
        else:
            self.together = caller.together if model is self.model else ()
            planned = self._plan(request)
        self.records[role_of(_kind(request))] = self.records[()] = planned.record
        self.own.append(planned.without_batch())
        self._keep(planned)
        return planned

    def _do_without_compile(self, model: nn.Module, refused: str) -> None:
        """Checkpoint modules from now on; ApplyError, in these words, where that cannot be."""
        instead = checkpointed(self.request, refused) if model is self.model else None
        if instead is None:
            raise ApplyError(refused)
        self.request, self.own = instead, []
        self.captured.clear()
        self.several.forget()

    def _may_be_brief(self, caller: Caller) -> bool:
        """Whether a plan is the first, for the steps until the loop is known, when there will be another one."""
        given = self.known or self.judge or self.check or self.request.occupancy or self.records
        return not given and self.heard == 0 and caller.learns and not caller.agrees and caller.model is self.model

    def _with_loop(self, request: Request) -> Request:
        """The request for what is known of the loop, and with the optimizers that there are now."""
        role = role_of(_kind(request))
        request = replace(request, loop=self.loops.setdefault(role, self.loop))
        if request.optimizer is not None:
            return request
        stepped = [optimizer for ref in self.stepped if (optimizer := ref()) is not None]
        self.counted[role] = self.counted[()] = weakly(optimizers_of(request.model, stepped))
        return replace(request, found=self.counted[role])

    def _keep(self, planned: Planned) -> None:
        if planned.captured is not None and planned.request.model is self.model:
            kind = _kind(planned.request)
            self.captured[role_of(kind)] = kind, planned.captured, planned.record.baseline_peak_bytes
            self.several.keep(kind, planned)

    def _plan(self, request: Request) -> Planned:
        """The plan for a request, without other processes."""
        own, planned = request.model is self.model, None
        if own and request.maxima == self.request.maxima:
            planned = self.ready.pop(_kind(request), None)
            planned = planned and replace(planned, request=replace(planned.request, batch=request.batch))
        if own and self.awaited is not None:
            planned = self.awaited.take(request)
        kind = _kind(request)
        planned = planned or self.several.take(kind, request, self.together)
        if planned is None:
            before = self.captured.get(role_of(kind)) if self.again and own else None
            captured = before[1] if before is not None and before[0] == kind else None
            self.again, start = False, time.perf_counter()
            planned = self.several.plan(kind, request, self.together, self._made)
            planned = planned or self._made(request, captured, before and before[1])
            if planned.request.instead not in ("", self.request.instead):  # torch.compile does not serve the model
                options, instead = planned.request.options, planned.request.instead
                self.request = replace(self.request, options=options, instead=instead)
                gc.collect()  # the error is in reference cycles of frames, up to the one that will have the output
            given, guessed = request.loop, planned.request.loop
            if (guessed.unreached, guessed.stateless) != (given.unreached, given.stateless):
                self.loops[role_of(kind)] = guessed
            announce(planned, time.perf_counter() - start, self.why or (NEW_KIND if self.own else ""))
            self.why = ""
            if request.uncompiled:
                self.uncompiled.add(role_of(kind))
            self.peaks[role_of(kind)] = max(planned.record.peak_bytes, self.peaks.get(role_of(kind), 0))
        if planned.record.solver == BRIEF:
            self.brief.add(role_of(kind))
        planned = counted(planned, request)
        judges = [self.check, self.judge if request.loop == self.request.loop else None]
        for judge in filter(None, judges):
            planned = judge(planned)
            # with what a real step was found to take
            self.request = replace(self.request, options=planned.request.options)
        return planned

    def _made(self, request: Request, captured: TrainingGraph | None, earlier: TrainingGraph | None = None) -> Planned:
        """A new plan.

        What the first steps show ends a training that cannot fit as it would have ended before; what shows later does
        not, nor does what only just does not fit.
        """
        make = partial(make_plan, others=self.own, captured=captured, earlier=earlier)
        try:
            return leanest(make, request) if request.loop.unused else make(request, known=self.known)
        except InfeasibleBudgetError as e:
            loop, least, (now_least, gb_needed) = request.loop, e.minimum_bytes, (e.minimum_bytes, e.minimum_gb)
            for now in self.growth.lesser(role := role_of(_kind(request)), loop, least - self.budget_bytes):
                try:
                    planned = make(replace(request, loop=now), known=self.known)
                except InfeasibleBudgetError as without:  # an error that is kept would hold the batch
                    now_least, gb_needed = without.minimum_bytes, without.minimum_gb
                else:
                    self._make_for(now, role)
                    return planned
            late = self.heard > 1 and self.calls > EARLY and captured is not None
            hardly = loop != self.request.loop and (late or least <= request.budget_bytes * (1 + HARDLY))
            # what does not fit without what other models take, either, is an error
            if not hardly and least - loop.around > request.budget_bytes:
                note_waiting(e, loop.in_flight)
                raise
        planned, least = over_budget(make, request, least)
        warn_over(min(least, now_least), request.budget_bytes, gb_needed)
        return planned

    def on_loop_seen(
        self, seen: Loop, stepped: Sequence[optim.Optimizer], role: Role = (), spare: int = 0, ended: bool = False
    ) -> bool:
        """See `PlanProvider`."""
        if self.request.occupancy is not None:  # the schedule of a pipeline says it all
            return False
        self.calls += 1
        told, by = self.answered.get(role, (None, []))
        if told is seen and by == [*map(weakref.ref, stepped)]:
            return False
        given = seen
        if self.request.options.accumulate:  # they are counted
            seen = replace(seen, gradients=self.loops.get(role, self.loop).gradients)
        seen = self._as_planned(seen, role)
        found = [] if self.request.optimizer is not None else stepped
        if role and self.loops and role not in self.loops:  # there is no plan yet
            self.loops[role], self.stepped = seen, [weakref.ref(o) for o in found]
            return False
        before, counted = self.loops.get(role, self.loop), self.counted.get(role, self.request.found)
        seen = self.growth.counted(role, seen, before)
        others = [optimizer for optimizer in found if weakref.ref(optimizer) not in counted]
        if others and self._counts(found, role):
            others = []
        inside = spare and not others and self._fits(seen, before, role, max(self._tolerance, self._room(role)) + spare)
        there = counted or self.request.optimizer is not None
        first = there and not (stepped or ended or self.heard)  # the first step, and its optimizer is there
        if inside or (first and adds_up(given, self.model, self.request.budget_bytes)):
            return False  # more will be seen before the rest is there
        self.heard += 1
        free = max(self._tolerance, self._room(role) if self.heard > 1 else 0)  # later, whatever plans leave
        if not others and (seen in (before, self.accepted.get(role)) or self._fits(seen, before, role, free)):
            self.accepted[role] = seen
            if role in self.brief:
                self.why = "the training loop is known now"
            elif role in self.uncompiled or not self._fits_uncompiled(seen, role):
                self.answered[role] = given, [*map(weakref.ref, stepped)]
                return False
            else:
                self.why = "its step fits the budget in eager mode"
        else:
            self.why = why_anew(before, seen, others)
            if self.heard > 2 and not others:
                seen = self.growth.foreseen(role, seen, before, self.request.budget_bytes)
        self.again = True
        self.brief.discard(role)
        self.stepped = [weakref.ref(o) for o in stepped]
        self._make_for(seen, role)
        # a schedule that recomputes nothing stays the best where it fits; another one may recompute too much now
        own, again = [planned for planned in self.own if not planned.record.overhead], seen.in_flight < before.in_flight
        own += [planned for planned in self.before if again and planned.request.loop == seen]
        self.before, self.own = self.own, own
        self.awaited, self.early = None, {}
        self.several.forget()
        return True

    def _make_for(self, loop: Loop, role: Role) -> None:
        """Make plans anew, for that loop."""
        if role:
            self.loops[role] = loop
            self.peaks.pop(role, None)
        else:
            self.loop, self.loops = loop, {}
            self.peaks.clear()

    def _as_planned(self, seen: Loop, role: Role) -> Loop:
        """The loop as plans are made for it, which may leave out what no gradient came to."""
        fused = self.request.options.mode == "inductor"  # one that does not arrive takes all of the fusion
        graph = self._captured(role)
        beside = beside_loss(graph, seen, self.loops.get(role, self.loop))
        return replace(
            seen,
            beside_loss=beside,
            unreached=seen.unreached if fused or beside else worth_leaving_out(graph, seen, self._tolerance),
            aside=given_aside(graph, seen),
            stateless=worth_not_counting(graph, seen, self.model, self._tolerance),
        )

    def _counts(self, stepped: Sequence[optim.Optimizer], role: Role) -> bool:
        """Whether plans count what the model's optimizers take now, as where one has come in the place of another."""
        own, record = weakly(optimizers_of(self.model, stepped)), self.records.get(role)
        if record is None or not {*weakly(stepped)}.issubset(own):
            return False
        loop = replace(self.request.loop, stateless=record.step.loop.stateless)
        if not counts_optimizers(record, replace(self.request, found=own, loop=loop)):
            return False
        self.counted[role], self.stepped = own, [*weakly(stepped)]
        return True

    def _fits_uncompiled(self, seen: Loop, role: Role) -> bool:
        """Whether the latest step in a role need not be compiled, now that the loop is known; asked once."""
        self.uncompiled.add(role)
        if role not in self.captured:
            return False
        _, graph, everything = self.captured[role]
        return fits_uncompiled(replace(self.request, loop=seen), graph, lambda: everything)

    def _captured(self, role: Role) -> TrainingGraph | None:
        found = self.captured.get(role, next(iter(self.captured.values()), None))
        return None if found is None else found[1]

    @property
    def budget_bytes(self) -> int:
        """See `PlanProvider`."""
        return self.request.budget_bytes

    @property
    def _tolerance(self) -> int:
        """Bytes that plans are not made anew for."""
        return self.budget_bytes // TOLERANCE

    def _room(self, role: Role) -> int:
        return self.budget_bytes - self.peaks.get(role, max(self.peaks.values(), default=self.budget_bytes))

    def _fits(self, seen: Loop, before: Loop, role: Role, free: int) -> bool:
        """Whether plans count what was seen of the loop, where it may take so many bytes more than they count."""
        stepping = replace(self.request, found=self.counted.get(role, self.request.found), loop=before)
        over = seen.between_steps - max(before.between_steps, self.request.budget_bytes - self._room(role))
        if max(over, more_of_optimizers(stepping, seen)) > free or not same_facts(seen, before, free):
            return False
        record = self.records.get(role)
        if record is not None and isinstance(record.recipe, Choice) and not {*seen.without} <= {(), *before.without}:
            return False
        if seen.loss is None or (captured := self._captured(role)) is None:
            return (seen.outputs_held, seen.loss) == (before.outputs_held, before.loss)
        more = more_of_loss(replace(self.request, loop=before), seen, captured)
        added = sum(max(0, each) for each in (*more, seen.more_than(before)))
        if all(abs(each) <= self._tolerance for each in more):
            return self.heard > 1 or added <= self._room(role)  # a plan that is made now counts all of it
        return free > self._tolerance and added <= free

    def on_no_plan(self, model: nn.Module, error: PlannerError) -> bool:
        """See `PlanProvider`; warns once where the user asked for that, whatever number of kinds of calls there is."""
        if self.request.options.on_failure == "raise":
            return False
        if not self.warned:
            self.warned = True
            warn_unplanned(model, error)
        return True

    def on_step_begin(self, model: nn.Module, record: PlanRecord, waits: bool) -> bool:
        """Warn where tensors that a plan does not count leave too little room: gradients, and an earlier forward pass
        that waits for its backward pass.
        """
        return (
            gradients_warned(model, record, False) or unreduced_warned(model, record) or waiting_warned(record, waits)
        )

    def on_backward_begin(self, model: nn.Module, record: PlanRecord) -> bool:
        """Warn of gradients that are there and not counted."""
        return gradients_warned(model, record, True)


def _kind(request: Request) -> Signature:
    """The kind of call that a request is for."""
    with under(request.surroundings, request.model):
        signature = call_signature(request.model, request.args or (), request.kwargs, request.maxima)
    loop, median = request.loop, request.assume_median_branch
    return (*signature, median, loop.only_loss, loop.beside_loss, loop.unreached, loop.laid_out)
