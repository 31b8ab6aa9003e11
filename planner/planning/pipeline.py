"""From a checked request to a plan: capture, estimate, solve, rewrite, on one screen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType

import torch
from torch import fx

from planner.capture.provenance import origins
from planner.capture.regions.region import Region
from planner.capture.trace.data_dependent import told
from planner.capture.trace.dynamo import Partition
from planner.capture.trace.state_guard import random_kept
from planner.capture.trace.step import TrainingGraph, capture
from planner.codegen.emit import emit, keep_everything
from planner.core.identity import identity
from planner.core.plan import GraphModules, PlanRecord
from planner.core.recipe import PlannedRegion, Recipe
from planner.costs.account import account_of, step_of
from planner.costs.measured_ops import measure
from planner.costs.ops import estimate
from planner.eager.pipeline import make_eager_plan
from planner.errors import CaptureError, InfeasibleBudgetError, RankError
from planner.lowering.build import Lowered, lower, raise_schedule
from planner.lowering.collectives import communicate
from planner.lowering.margin import MARGIN, solve_with_margin
from planner.lowering.microbatches import in_words, with_others
from planner.parallel.fsdp import groups_of
from planner.parallel.group import other_world
from planner.planning.adopt_schedule import alike, reused, taken_over
from planner.planning.decisions import carried, decisions, peak_account
from planner.planning.timelines import timelines
from planner.requests.planned import Filed, Known, Planned, source_of
from planner.requests.request import Request
from solvers import InfeasibleError, Problem, Solution, solve
from solvers.bounds import cost_bound
from solvers.progress import bar, clock

# from torch 2.13 on, a compiled region may free a gradient that enters its backward pass while that runs
TANGENTS_FREED = hasattr(torch.autograd.Function, "boxed_grads_call")


def make_plan(
    request: Request, others: Sequence[Planned] = (), *, known: Known | None = None, must_match: bool = False
) -> Planned:
    """Plan a checked request that has a batch: capture, estimate, solve, rewrite. Raises as `plan()` does.

    Args:
        request: what was asked for.
        others: plans of the same model: a schedule of theirs is taken where it fits this step, instead of solving anew.
        known: a plan whose schedule is taken where the step turns out to be the one that it was made for.
        must_match: whether to raise RankError, and solve nothing, where the known plan is not for this step.
    """
    with random_kept():
        if request.options.mode == "eager":
            return make_eager_plan(request, others[-1] if others else None, known=known, must_match=must_match)
        graph = graph_of(request)
    lowered, lines = problem_of(request, graph)
    solve_here = partial(_solve, others=others, known=known, must_match=must_match)
    lowered, solution, lines = solve_with_margin(request, lowered, lines, solve_here)
    return write(request, graph, lowered, solution, lines)


def graph_of(request: Request) -> TrainingGraph:
    """The training step; where sizes may be smaller, at the largest, with symbols for them if that is possible."""
    with bar("capturing", request.options.progress, bar_format="{desc}: {n} graphs, {elapsed}") as shown, clock(shown):

        def split(region: Region) -> tuple[fx.GraphModule, fx.GraphModule]:
            shown.update()
            return keep_everything(region)

        return _graph_of(request, split)


def _graph_of(request: Request, split: Partition) -> TrainingGraph:
    batch = (request.args or (), request.kwargs)
    step = partial(
        capture,
        request.model,
        *batch,
        split,
        request.loss_fn,
        request.options.checkpoints,
        likely=request.assume_median_branch,
    )
    if request.maxima is None:
        return step()
    why = "none of its sizes is a symbol once it is traced"
    try:
        graph = step(request.maxima)
        if graph.maxima is not None:
            return graph
    except CaptureError as e:
        why = str(e)
    note = f"No graph serves every size ({why}): each new one is compiled, and runs by this schedule where that fits."
    return replace(step(request.maxima, symbolic=False), note=note)


def problem_of(request: Request, graph: TrainingGraph) -> tuple[Lowered, dict[str, int]]:
    """The training step as a problem, and the lines of the account that are held all the time, fragmentation apart."""
    device, here = request.device, request.measure_on
    outside = measure(graph.loss.calls, here, progress=request.options.progress) if here is not None else {}
    excess = sum(a.excess for a in outside.values())
    lines, step = account_of(request)
    groups = groups_of(request.model)
    granularity = 512 if device.type == "cuda" else 1
    lowered = lower(
        graph.regions,
        estimate(
            graph.regions,
            device,
            measure_on=here,
            timed=request.costs == "measured",
            progress=request.options.progress,
        ),
        links=graph.links,
        resident=sum(lines.values()),
        loss_workspace=graph.loss.workspace,
        loss_bytes=graph.loss.held + excess,
        # loss.backward() holds the loss's own gradient
        tangents_pinned=graph.loss.source in ("model", "received") or not TANGENTS_FREED,
        tangents_held=not TANGENTS_FREED,
        accumulate=request.gradients_copied,
        optimizer_step=step,
        shard=request.options.shard,
        reduced=bool(groups),
        granularity=granularity,
        budget=request.budget_bytes,
    )
    if groups:
        names = {name for name, _ in request.model.named_modules()}
        paths = [[m for m, _ in origins(((op.node, r.module) for op in r.ops), names)] for r in graph.regions]
        lowered = communicate(lowered, groups, paths, accumulate=request.options.accumulate, granularity=granularity)
    return with_others(request, lowered, lines, graph.loss.waiting + excess, excess)


def _solve(
    request: Request,
    lowered: Lowered,
    lines: dict[str, int],
    *,
    others: Sequence[Planned] = (),
    known: Known | None = None,
    must_match: bool = False,
) -> Solution:
    same = _known(request, lowered.problem, lines, known, must_match)
    if isinstance(same, Solution):
        return same
    if must_match:
        raise RankError(same)
    records = [p.record for p in others]
    found = reused(lowered.problem, [(r.problem, r.schedule) for r in records if r.problem and r.schedule])
    if found is not None:
        return found
    options = request.options
    try:
        found = solve(lowered.problem, options.solver, time_limit=options.time_limit, progress=options.progress)
        return replace(found, note=f"{found.note} {same}".strip())
    except InfeasibleError as e:
        leanest = peak_account(lowered, e.schedule)
        takes = dict(sorted({**lines, **leanest}.items(), key=lambda line: -line[1]))
        raise InfeasibleBudgetError(request.budget_gb, e.minimum, takes) from None


def _known(
    request: Request, problem: Problem, lines: Mapping[str, int], known: Known | None, must_match: bool
) -> Solution | str:
    """The schedule of the known plan, where that is of this step and budget; else a note that says why it is not."""
    if known is None:
        return ""
    record = known.record
    if record.problem is None or record.schedule is None:
        why: Solution | str = "it is a plan for eager mode"
    elif must_match:  # sizes may be those of another rank's share
        here = alike(problem, record.problem)
        why = taken_over(problem, problem if here else record.problem, record.schedule, cost_bound(problem))
    elif isinstance(known, Filed) and (other := other_world(record.step.ranks, record.options.shard, request.model)):
        why = other
    elif record.options.solver != request.options.solver:
        why = f"it is of solver={record.options.solver!r}"
    elif _apart(problem, lines) != _apart(record.problem, record.account):
        why = "what is held all the time differs"
    else:
        why = taken_over(problem, record.problem, record.schedule, record.bound)
    if isinstance(why, str):
        return f"Solved anew, not taken from {source_of(known)}: {why}."
    return replace(why, solver=record.solver, note=f"Taken from {source_of(known)}: the same step and budget.")


def _apart(problem: Problem, lines: Mapping[str, int]) -> int:
    """What is resident, fragmentation apart: its margin may be that of another schedule."""
    return problem.resident - lines.get(MARGIN, 0)


def _notes(request: Request, graph: TrainingGraph) -> Iterator[str]:
    found = sum(region.checkpointed for region in graph.regions)
    calls = "1 checkpointed call" if found == 1 else f"{found} checkpointed calls"
    if found and request.options.checkpoints == "keep":
        yield f'{calls} of the model recomputed as the model asks; that is part of "everything kept" here.'
    elif found:
        yield f"{calls} of the model planned like the rest (checkpoints='keep' leaves them as they are)."
    if graph.asked:
        yield told(graph.asked, "is planned when it comes")


def write(
    request: Request, graph: TrainingGraph, lowered: Lowered, solution: Solution, lines: dict[str, int]
) -> Planned:
    """The plan that a solution makes."""
    problem, timeline = lowered.problem, solution.timeline
    passes = raise_schedule(lowered, solution.schedule)
    planned = [PlannedRegion(r.fingerprint, *each) for r, each in zip(graph.regions, passes, strict=True)]
    calls = {key: tuple(None if r is None else planned[r] for r in order) for key, order in graph.order.items()}
    names = {name for name, _ in request.model.named_modules()}
    kept = carried(problem, solution.schedule)
    planned_timeline, unplanned = timelines(graph.regions, lowered, solution, lines, names, kept)

    def graphs() -> tuple[GraphModules, ...]:
        pairs = zip(graph.regions, passes, strict=True)
        return tuple(GraphModules(*emit(region, *each)) for region, each in pairs if region.fingerprint)

    record = PlanRecord(
        budget_bytes=request.budget_bytes,
        peak_bytes=timeline.peak,
        baseline_peak_bytes=max((m.held_bytes for m in unplanned), default=problem.resident),
        resident_bytes=problem.resident,
        overhead=timeline.cost / problem.total_cost - 1,
        bound=solution.bound,
        gap=solution.gap,
        solver=solution.solver,
        solve_seconds=solution.seconds,
        timeline=planned_timeline,
        baseline_timeline=unplanned,
        decisions=decisions(graph.regions, lowered, solution, names),
        step_seconds=timeline.cost,
        account=MappingProxyType({**lines, **peak_account(lowered, solution.schedule)}),
        note=" ".join(
            filter(None, [solution.note, in_words(problem, solution.schedule), graph.note, *_notes(request, graph)])
        ),
        device=request.device.name,
        recipe=Recipe(calls, graph.detached, graph.maxima, graph.asked),
        problem=problem,
        schedule=solution.schedule,
        options=request.options,
        step=step_of(request),
        identity=identity(request.model),
    )
    return Planned(record, request, graphs)
