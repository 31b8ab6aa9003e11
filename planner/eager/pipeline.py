"""From a checked request to checkpoints: trace, find candidates, search, check by tracing the step that will run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from planner.capture.trace.data_dependent import CHANCES, Answers
from planner.capture.trace.step import blame, learnt, random_drawn
from planner.compat.fake import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from planner.compat.modules import NormBase
from planner.core.loop import Loop
from planner.core.plan import PlanRecord
from planner.core.recipe import Choice
from planner.core.step import Replay, Runs, Step, replay
from planner.costs.account import OTHERS, account_of, attributes_line
from planner.eager.again import modules_unlike_again
from planner.eager.candidates import Candidate, find_candidates
from planner.eager.costs import CostsKnown, OpCost, costs_of
from planner.eager.describe import kept_by, note, runs_under, with_candidates
from planner.eager.groups import choice_of, grouped_problem, state_of
from planner.eager.lower import lower, unseen_bytes
from planner.eager.step import StepFailed, trace_step
from planner.eager.trace import Trace
from planner.eager.values import to_fake_with_integers
from planner.errors import CaptureError, PlannerError, RankError, warn
from planner.lowering.between import add_between
from planner.lowering.keep import places, reasons, refuse_unmatched
from planner.lowering.margin import add_margin
from planner.lowering.microbatches import TARGETS
from planner.parallel.meshes import on_mesh
from planner.requests.planned import Known, source_of
from planner.requests.request import Request
from solvers import every_op_once
from solvers.groups.grouped import State
from solvers.groups.memory_model import memory_model
from solvers.groups.search import search


@dataclass(frozen=True)
class Trial:
    """A choice whose step was traced.

    Attributes:
        choice: what was checkpointed.
        state: the same in numbers of the step without checkpoints.
        step: what ran, with its margin for fragmentation.
        replay: every op of it, once.
    """

    choice: Choice
    state: State
    step: Step = field(repr=False)
    replay: Replay = field(repr=False)

    @property
    def peak(self) -> int:
        """All bytes that the budget counts."""
        return self.replay.timeline.peak

    @property
    def cost(self) -> float:
        """Estimated seconds of the step."""
        return self.replay.timeline.cost


@dataclass(frozen=True)
class Checkpoints:
    """Modules to checkpoint, and the steps that were traced for them.

    Attributes:
        step: the step without checkpoints, with the candidates as its groups.
        runs: what the choice makes of its ops.
        trial: the chosen one; where none is within the budget, the one of the lowest peak.
        note: what the user should know.
    """

    step: Step
    runs: Runs
    trial: Trial
    note: str


def choose(
    request: Request, like: PlanRecord | None, known: Known | None, must_match: bool, traced: Callable[[], None]
) -> Checkpoints:
    """Choose the modules to checkpoint.

    Args:
        request: what to plan.
        like: a plan whose choice is taken where it fits, and the step without any does not.
        known: as for `make_plan()`.
        must_match: as for `make_plan()`.
        traced: called before each step is traced.

    Raises:
        CaptureError: the step cannot be traced.
        RankError: the known plan has to match, and does not.
    """
    tracer = tracer_of(request, traced)
    plain = _plain(tracer)
    asked = tracer.answers.lines()
    baseline, costs = tracer.trial(Choice(), {}, plain)
    if like is None:
        refuse_unmatched(places(baseline.step), request.options.keep, dict(tracer.model.named_modules()))
    candidates, refused = find_candidates(tracer.model, plain, costs)
    candidates = _same_again(tracer, plain, candidates, refused)
    by_path = {candidate.path: candidate for candidate in candidates}
    model = memory_model(grouped_problem(plain, baseline.step, candidates))

    def check(state: State) -> Trial | None:
        if not state:
            return baseline
        choice = choice_of(by_path, plain, state)
        try:
            trace = tracer.trace(choice)
            told = replace(choice, elements=trace.elements if tracer.answers.sized else 0)
            return tracer.trial(told, state, trace)[0]
        except StepFailed as e:  # a module that does something else when it runs again
            e.let_go()
            return None

    same = _same_step(request, known, must_match, baseline.peak)
    if same is None and baseline.peak <= request.budget_bytes:
        like = None  # nothing need be checkpointed, as in a smaller batch than that of the other plan
    recipe = other.recipe if (other := same or like) is not None else None
    state = state_of(by_path, plain, recipe) if isinstance(recipe, Choice) else None
    best = _again(state, check, request.budget_bytes)
    told = f"Taken from {source_of(known)}: the same step and budget. " if known and same and best else ""
    if best is None and must_match:
        raise RankError("its modules run other ops, or more is held beside them")
    if best is None:
        first = kept_by(baseline.step, like) if like is not None else frozenset()
        found, leanest = search(model, check, baseline, request.budget_bytes, first)
        best = found or leanest
    step = with_candidates(baseline.step, model, best.state, refused)
    words = told + note(best.choice, refused, asked, tracer.answers.sized, packed=bool(tracer.answers.packed))
    return Checkpoints(step, runs_under(step, model, best.state), best, words)


def _same_again(tracer: Tracer, plain: Trace, candidates: list[Candidate], refused: dict[str, str]) -> list[Candidate]:
    """The candidates that do the same when they run again; enters the others among those that are refused.

    Each round traces the step with the outermost ones checkpointed; modules in the others come next.
    """
    norms = {path for path, module in tracer.model.named_modules() if isinstance(module, NormBase)}
    known = set[str]()
    while outer := [c for c in _outermost(candidates) if c.path not in known]:
        by_path = {candidate.path: candidate for candidate in outer}
        choice = choice_of(by_path, plain, {c.path: c.forced for c in outer})
        try:
            unlike = modules_unlike_again(tracer.trace(choice), choice, norms)
        except StepFailed as e:
            e.let_go()
            return candidates  # the search sees which
        known |= by_path.keys()
        around = {c.path for c in candidates if any(f"{path}.".startswith(f"{c.path}.") for path in unlike)}
        refused |= dict.fromkeys(around, "it computes otherwise when it runs again")
        candidates = [c for c in candidates if c.path not in around]
    return candidates


def _outermost(candidates: Sequence[Candidate]) -> list[Candidate]:
    found = list[Candidate]()
    for candidate in candidates:  # outer ones come first
        if not any(candidate.calls.start in other.calls for other in found):
            found.append(candidate)
    return found


@dataclass(frozen=True)
class Tracer:
    """A model on fake tensors, whose step can be traced with any choice of checkpoints.

    Attributes:
        request: what is planned.
        mode, model, args, kwargs: the fake tensors' mode, and the model and its arguments on them.
        answers: what the model asked of values of tensors.
        account: lines of the budget that are resident: name -> bytes.
        optimizer_step: bytes of the temporaries of the optimizer's step; None where it is not counted.
        known: costs of ops that were estimated before.
        traced: called before each step is traced.
    """

    request: Request
    mode: FakeTensorMode
    model: nn.Module
    args: Any
    kwargs: Any
    answers: Answers
    account: dict[str, int]
    optimizer_step: int | None
    known: CostsKnown
    traced: Callable[[], None]

    @property
    def granularity(self) -> int:
        """The allocator rounds sizes up to multiples of it, in bytes."""
        return 512 if self.request.device.caches else 1

    def trace(self, choice: Choice, detailed: bool = False) -> Trace:
        """The step with a choice of checkpoints, which makes the most of those that the loop was seen to take; raises
        StepFailed.
        """
        loop = self.request.loop
        loops = [replace(loop, unreached=without) for without in loop.without] or [loop]
        steps = [self._step(choice, each, detailed) for each in loops]
        if left := max(step.left for step in steps):  # in the graphs of the step before
            steps = [self._step(choice, each, detailed, left) for each in loops]
        return max(steps, key=Trace.most)

    def _step(self, choice: Choice, loop: Loop, detailed: bool, left: int = 0) -> Trace:
        self.traced()
        self.answers.begin()
        with random_drawn(self.model, self.answers):
            return trace_step(
                self.model,
                self.args,
                self.kwargs,
                mode=self.mode,
                answers=self.answers,
                loss_fn=self.request.loss_fn,
                choice=choice,
                accumulate=self.request.gradients_copied,
                shard=self.request.options.shard,
                detailed=detailed,
                loop=loop,
                calls=1 if self.request.occupancy is not None else self.request.in_flight,
                left=left,
            )

    def trial(self, choice: Choice, state: State, trace: Trace) -> tuple[Trial, list[OpCost]]:
        """The traced step as a problem, with its margin, replayed; and the costs of its ops."""
        request = self.request
        costs = costs_of(trace, request, self.mode, next(self.model.parameters()).device, self.known)
        asked = reasons(((op.target if op.writes else "", op.module) for op in trace.ops), request.options.keep)
        costs = [replace(c, keep_because=c.keep_because or why) for c, why in zip(costs, asked, strict=True)]
        loss = request.loop.loss
        more = 0 if loss is None or request.in_flight > 1 else loss.more_stays(trace.output_bytes)
        step = lower(
            trace,
            costs,
            self.account
            | ({OTHERS: self.account.get(OTHERS, 0) + more} if more else {})
            | attributes_line(trace.attributes, {}, request.loop),
            optimizer_step=self.optimizer_step,
            granularity=self.granularity,
            unseen=unseen_bytes(len(choice.kept), trace) if request.device.type == "cpu" else 0,
        )
        step = add_margin(add_between(step, request.loop.between_steps), request)
        return Trial(choice, state, step, replay(step.problem, every_op_once(step.problem))), costs


def tracer_of(request: Request, traced: Callable[[], None]) -> Tracer:
    """The model of a request on fake tensors. Raises CaptureError where it cannot be copied, or is on a mesh."""
    answers, args = Answers(), request.args or ()
    answers.packed = False
    mode, model, fake_args, fake_kwargs = to_fake_with_integers(request.model, args, request.kwargs, answers)
    if on_mesh(model, fake_args, fake_kwargs):
        raise CaptureError(
            f"{type(request.model).__name__} has parts that are spread over several processes (DTensors): "
            "checkpointed, they would communicate again in the backward pass. Plan with mode='aten', which keeps "
            "what they receive"
        )
    if cudnn_would_draw(request.model, request.model_device):
        raise CaptureError(
            f"{type(request.model).__name__} has recurrent layers with dropout, whose state cuDNN makes once: it "
            "cannot be traced. Put nn.Dropout between layers of one each, or plan with mode='aten'"
        )
    account, optimizer_step = account_of(request)
    if request.loop.loss is not None and request.loop.loss.read:
        account[TARGETS] = request.loop.loss.read
    return Tracer(request, mode, model, fake_args, fake_kwargs, answers, account, optimizer_step, {}, traced)


def cudnn_would_draw(model: nn.Module, device: torch.device) -> bool:
    """Whether a step draws masks by cuDNN's state, which torch makes once: it would keep a fake one."""
    layers = (m for m in model.modules() if isinstance(m, nn.RNNBase))
    return device.type == "cuda" and any(m.training and m.dropout and m.num_layers > 1 for m in layers)


def _plain(tracer: Tracer) -> Trace:
    """The step without checkpoints, in detail; where Python code decides by a random number, that which makes the most,
    as checkpoints stay the same whichever way a step goes. The tracer's steps go that way from then on.
    """
    answers, traces = tracer.answers, dict[float | None, Trace]()
    for chance in CHANCES:
        answers.chance = chance
        try:
            traces[chance] = _without_checkpoints(tracer)
        except PlannerError:
            if not traces and (chance == CHANCES[-1] or not answers.by_chance):
                raise
        if not answers.by_chance:
            break
    answers.chance = max(traces, key=lambda chance: sum(traces[chance].sizes))
    _warn_of_ways(tracer.request.model, traces, answers.chance)
    return traces[answers.chance]


def warn_of_others(tracer: Tracer, chance: float | None) -> None:
    """Warn where another random number makes the step run what it does not run by `chance`, or in another order."""
    traces = dict[float | None, Trace]()
    for each in dict.fromkeys((chance, *CHANCES)):
        tracer.answers.chance = each
        with suppress(PlannerError, StepFailed):
            traces[each] = tracer.trace(Choice())
    if chance in traces:
        _warn_of_ways(tracer.request.model, traces, chance)


def _warn_of_ways(model: nn.Module, traces: Mapping[float | None, Trace], planned: float | None) -> None:
    """Warn where the planned step does not run all ops of the others' forward passes, in their order. O(ops)."""
    runs = {
        chance: [(op.module, op.target) for op in trace.ops if op.phase == "forward"]
        for chance, trace in traces.items()
    }
    for ops in runs.values():
        those = iter(runs[planned])
        if not all(op in those for op in ops):
            warn(
                f"{type(model).__name__} decides by random numbers which ops its modules run, or in which order, and "
                "the plan is for one of these ways: a step that goes another one may take more than the budget. Give "
                "forward() what it draws as an argument, or leave room"
            )
            return


def _without_checkpoints(tracer: Tracer) -> Trace:
    request = tracer.request
    try:
        try:
            return tracer.trace(Choice(), detailed=True)
        except StepFailed as e:
            asks = isinstance(e.__cause__, (DataDependentOutputException, DynamicOutputShapeException))
            if not asks or not learnt(tracer.answers, request.model, request.args or (), request.kwargs):
                raise
            e.let_go()
            return tracer.trace(Choice(), detailed=True)
    except StepFailed as e:
        raise _explained(request.model, request, e) from e.__cause__


def _same_step(request: Request, known: Known | None, must_match: bool, baseline: int) -> PlanRecord | None:
    """The known plan, where it is of this step and budget, as far as what keeping everything takes can tell."""
    if known is None:
        return None
    record = known.record
    if not must_match and (record.baseline_peak_bytes, record.budget_bytes) != (baseline, request.budget_bytes):
        return None
    return record if isinstance(record.recipe, Choice) else None


def _again(state: State | None, check: Callable[[State], Trial | None], budget: int) -> Trial | None:
    """The choice of another plan, where it is one of this step and fits."""
    found = None if state is None else check(state)
    return found if found is not None and found.peak <= budget else None


def _explained(model: nn.Module, request: Request, failed: StepFailed) -> PlannerError:
    """What to say of a model whose step cannot be traced."""
    error = failed.__cause__
    assert isinstance(error, Exception)
    if isinstance(error, PlannerError):
        return error
    blame(model, request.args or (), request.kwargs, error)
    name = type(model).__name__
    kind = type(model.get_submodule(failed.module)).__name__
    where = f"in {failed.module!r} ({kind})" if failed.module else "in it"
    place = f", at {failed.place}" if failed.place else ""
    return CaptureError(
        f"{name} cannot be traced on fake tensors: {where}{place}: {type(error).__name__}: "
        f"{str(error).strip().splitlines()[0] if str(error).strip() else ''}. "
        "What depends on the values of tensors cannot be planned: move it out of forward(), or plan a submodule"
    )
