"""From a checked request to an eager plan: trace, find modules, search, check by tracing what will run."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from planner.capture.trace.data_dependent import Answers
from planner.capture.trace.step import blame, learnt
from planner.compat.fake import DataDependentOutputException
from planner.core.identity import identity
from planner.core.plan import PlanRecord
from planner.core.recipe import Choice
from planner.costs.account import account_of, planned_step
from planner.eager.candidates import find_units
from planner.eager.costs import CostsKnown, costs_of, timeline
from planner.eager.describe import baseline_moments, decisions, kept_by, moments, note, peak_account, peak_of
from planner.eager.margin import margin_of
from planner.eager.memory_model import State, Surrogate, surrogate
from planner.eager.search import Step, search
from planner.eager.step import StepFailed, trace_step
from planner.eager.trace import Trace
from planner.eager.values import to_fake_with_integers
from planner.errors import CaptureError, InfeasibleBudgetError, PlannerError, RankError
from planner.lowering.margin import MARGIN
from planner.parallel.meshes import on_mesh
from planner.requests.planned import Known, Planned, source_of
from planner.requests.request import Request
from solvers.progress import bar, clock


def make_eager_plan(
    request: Request, like: Planned | None = None, *, known: Known | None = None, must_match: bool = False
) -> Planned:
    """Plan a checked request that has a batch, to run without torch.compile; raises as `plan()` does.

    Args:
        request: what to plan.
        like: a plan whose choice is taken where it fits.
        known: as for `make_plan()`.
        must_match: as for `make_plan()`.
    """
    with (
        bar("planning", request.options.progress, bar_format="{desc}: {n} steps traced, {elapsed}") as shown,
        clock(shown),
    ):
        return Planned(_make(request, None if like is None else like.record, known, must_match, shown), request)


def _make(
    request: Request, like: PlanRecord | None, known_plan: Known | None, must_match: bool, shown: Any
) -> PlanRecord:
    began = time.perf_counter()
    model, args, kwargs = request.model, request.args or (), request.kwargs
    answers = Answers()
    mode, fake_model, fake_args, fake_kwargs = to_fake_with_integers(model, args, kwargs, answers)
    if on_mesh(fake_model, fake_args, fake_kwargs):
        raise CaptureError(
            f"{type(model).__name__} has parts that are spread over several processes (DTensors): checkpointed, they "
            "would communicate again in the backward pass. Plan with mode='compiled', which keeps what they receive"
        )
    where = next(fake_model.parameters()).device
    lines, step = account_of(request)
    known: CostsKnown = {}

    def trace(choice: Choice, detailed: bool = False) -> Trace:
        shown.update()
        answers.begin()
        return trace_step(
            fake_model,
            fake_args,
            fake_kwargs,
            mode=mode,
            loss_fn=request.loss_fn,
            choice=choice,
            accumulate=request.gradients_copied,
            shard=request.options.shard,
            detailed=detailed,
        )

    def measured(choice: Choice, state: State, traced: Trace) -> Step:
        costs = costs_of(traced, request, mode, where, known)
        held, sizes = timeline(traced, costs, 512 if request.device.type == "cuda" else 1)
        unseen = _unseen(choice, traced) if request.device.type == "cpu" else 0
        held = [now + unseen for now in held]
        peak = sum(lines.values()) + peak_of(traced, held, step)
        margin = margin_of(request, lines, traced, costs, sizes, peak)
        return Step(choice, state, traced, held, sizes, costs, margin, peak + margin, sum(c.seconds for c in costs))

    try:
        try:
            plain = trace(Choice(), detailed=True)
        except StepFailed as e:
            if not isinstance(e.__cause__, DataDependentOutputException) or not learnt(answers, model, args, kwargs):
                raise
            plain = trace(Choice(), detailed=True)
    except StepFailed as e:
        raise _explained(model, request, e) from e.__cause__
    asked = answers.lines()
    baseline = measured(Choice(), {}, plain)
    units, refused = find_units(fake_model, plain, baseline.costs)
    estimated = surrogate(
        plain, baseline.costs, [h + sum(lines.values()) + baseline.margin for h in baseline.held], baseline.sizes, units
    )

    def check(state: State) -> Step | None:
        if not state:
            return baseline
        choice = choice_of(estimated, state)
        try:
            return measured(choice, state, trace(choice))
        except StepFailed:  # a module that does something else when it runs again
            return None

    same = _same_step(request, known_plan, must_match, baseline.peak)
    best = _again(estimated, check, same or like, request.budget_bytes)
    told = f"Taken from {source_of(known_plan)}: the same step and budget. " if known_plan and same and best else ""
    if best is None and must_match:
        raise RankError("its modules run other ops, or more is held beside them")
    if best is None:
        first = kept_by(estimated, like) if like is not None else frozenset()
        best, leanest = search(estimated, check, baseline, request.budget_bytes, first)
    if best is None:
        takes = {**lines, MARGIN: leanest.margin, **_account(leanest, step)}
        takes = dict(sorted(takes.items(), key=lambda line: -line[1]))
        raise InfeasibleBudgetError(request.budget_gb, leanest.peak, takes)
    account = {**lines, MARGIN: best.margin} if best.margin else lines
    made = decisions(estimated, best.state, refused)
    unplanned = moments(baseline, {**lines, MARGIN: baseline.margin}, step)
    return PlanRecord(
        budget_bytes=request.budget_bytes,
        peak_bytes=best.peak,
        baseline_peak_bytes=baseline.peak,
        resident_bytes=sum(account.values()),
        overhead=best.seconds / baseline.seconds - 1,
        bound=baseline.seconds,
        gap=best.seconds / baseline.seconds - 1,
        solver="eager",
        solve_seconds=time.perf_counter() - began,
        timeline=moments(best, account, step),
        baseline_timeline=baseline_moments(baseline, made, estimated, best.state, unplanned),
        decisions=made,
        step_seconds=best.seconds,
        account=MappingProxyType({**account, **_account(best, step)}),
        note=told + note(best.choice, refused, asked),
        device=request.device.name,
        recipe=best.choice,
        problem=None,
        schedule=None,
        options=request.options,
        step=planned_step(request, lines["optimizer state"], step),
        identity=identity(model),
    )


def _unseen(choice: Choice, trace: Trace) -> int:
    """Bytes that no dispatch mode sees: states of random generators, and numbers that are saved as tensors."""
    saved = [op.distinct.args for op in trace.ops if op.distinct and op.phase != "backward" and ".Tensor" in op.target]
    numbers = sum(isinstance(x, (int, float)) for args in saved for x in args)
    return torch.get_rng_state().nbytes * len(choice.kept) + 8 * numbers


def _account(step: Step, optimizer_step: int | None) -> dict[str, int]:
    return peak_account(step.trace, step.held, step.sizes, optimizer_step)


def _same_step(request: Request, known: Known | None, must_match: bool, baseline: int) -> PlanRecord | None:
    """The known plan, where it is of this step and budget, as far as what keeping everything takes can tell."""
    if known is None:
        return None
    record = known.record
    if not must_match and (record.baseline_peak_bytes, record.budget_bytes) != (baseline, request.budget_bytes):
        return None
    return record if isinstance(record.recipe, Choice) else None


def _again(
    model: Surrogate, check: Callable[[State], Step | None], like: PlanRecord | None, budget: int
) -> Step | None:
    """The choice of another plan, where it fits."""
    if like is None or not isinstance(like.recipe, Choice):
        return None
    state = state_of(model, like.recipe)
    step = None if state is None else check(state)
    return step if step is not None and step.peak <= budget else None


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


def choice_of(model: Surrogate, state: State) -> Choice:
    """What to checkpoint, in terms that the runtime can follow."""
    begins = {path: model.units[path].begin for path in state}
    ops = model.trace.ops
    return Choice({path: {i - begins[path]: ops[i].target for i in sorted(kept)} for path, kept in state.items()})


def state_of(model: Surrogate, choice: Choice) -> State | None:
    """A choice in numbers of this step's ops; None where the step differs from the one it was made for."""
    state = {}
    for path, kept in choice.kept.items():
        unit = model.units.get(path)
        if unit is None or any(
            unit.begin + at >= unit.end or model.trace.ops[unit.begin + at].target != target
            for at, target in kept.items()
        ):
            return None
        state[path] = frozenset(unit.begin + at for at in kept)
    return state
