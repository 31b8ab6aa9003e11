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
from planner.core.plan import GraphModules, Plan
from planner.costs.account import account_of
from planner.costs.measured_ops import measure
from planner.costs.ops import estimate
from planner.eager.pipeline import make_eager_plan
from planner.errors import CaptureError, InfeasibleBudgetError, RankError
from planner.lowering.build import Lowered, lower, raise_schedule
from planner.lowering.collectives import communicate
from planner.lowering.margin import MARGIN, solve_with_margin
from planner.lowering.microbatches import in_words, with_others
from planner.parallel.fsdp import groups_of
from planner.planfile.files import FromFile
from planner.planning.adopt_schedule import alike, reused, taken_over
from planner.planning.decisions import carried, decisions, peak_account
from planner.planning.timelines import timelines
from planner.requests.request import Request
from planner.runtime.compiled import PlannedRegion, Recipe
from solvers import InfeasibleError, Problem, Solution, cost_bound, solve
from solvers.progress import bar, clock

# from torch 2.13 on, a compiled region may free a gradient that enters its backward pass while that runs
TANGENTS_FREED = hasattr(torch.autograd.Function, "boxed_grads_call")


def make_plan(request: Request, known: Sequence[Plan] = ()) -> Plan:
    """Plan a checked request that has a batch: capture, estimate, solve, rewrite. Raises as `plan()` does.

    Args:
        request: what was asked for.
        known: plans of the same model: a schedule of theirs is taken where it fits this step, instead of solving anew.
    """
    with random_kept():
        if request.mode == "eager":
            return make_eager_plan(request, known[-1] if known else None)
        graph = graph_of(request)
    lowered, lines = problem_of(request, graph)
    lowered, solution, lines = solve_with_margin(request, lowered, lines, partial(_solve, known=known))
    return write(request, graph, lowered, solution, lines)


def graph_of(request: Request) -> TrainingGraph:
    """The training step; where sizes may be smaller, at the largest, with symbols for them if that is possible."""
    with bar("capturing", request.progress, bar_format="{desc}: {n} graphs, {elapsed}") as shown, clock(shown):

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
        request.checkpoints,
        likely=request.likely,
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
    outside = measure(graph.loss.calls, here, progress=request.progress) if here is not None else {}
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
            progress=request.progress,
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
        shard=request.shard,
        reduced=bool(groups),
        granularity=granularity,
        budget=request.budget_bytes,
    )
    if groups:
        names = {name for name, _ in request.model.named_modules()}
        paths = [[m for m, _ in origins(((op.node, r.module) for op in r.ops), names)] for r in graph.regions]
        lowered = communicate(lowered, groups, paths, accumulate=request.accumulate, granularity=granularity)
    return with_others(request, lowered, lines, graph.loss.waiting + excess, excess)


def _solve(request: Request, lowered: Lowered, lines: dict[str, int], known: Sequence[Plan] = ()) -> Solution:
    same = _known(request, lowered.problem, lines)
    if isinstance(same, Solution):
        return same
    if request.follows:
        raise RankError(same)
    found = reused(lowered.problem, [(p.problem, p.schedule) for p in known if p.problem and p.schedule])
    if found is not None:
        return found
    try:
        found = solve(lowered.problem, request.solver, time_limit=request.time_limit, progress=request.progress)
        return replace(found, note=f"{found.note} {same}".strip())
    except InfeasibleError as e:
        leanest = peak_account(lowered, e.schedule)
        takes = dict(sorted({**lines, **leanest}.items(), key=lambda line: -line[1]))
        raise InfeasibleBudgetError(request.budget_gb, e.minimum, takes) from None


def _known(request: Request, problem: Problem, lines: Mapping[str, int]) -> Solution | str:
    """The schedule of the known plan, where that is of this step and budget; else a note that says why it is not."""
    known = request.known
    if known is None:
        return ""
    if known.problem is None or known.schedule is None:
        why: Solution | str = "it is a plan for eager mode"
    elif request.follows:  # sizes may be those of another rank's share
        here = alike(problem, known.problem)
        why = taken_over(problem, problem if here else known.problem, known.schedule, cost_bound(problem))
    elif isinstance(there := known.request, FromFile) and (other := there.other_world(request.model)):
        why = other
    elif known.request.solver != request.solver:
        why = f"it is of solver={known.request.solver!r}"
    elif _apart(problem, lines) != _apart(known.problem, known.account):
        why = "what is held all the time differs"
    else:
        why = taken_over(problem, known.problem, known.schedule, known.bound)
    if isinstance(why, str):
        return f"Solved anew, not taken from {known.request.source}: {why}."
    return replace(why, solver=known.solver, note=f"Taken from {known.request.source}: the same step and budget.")


def _apart(problem: Problem, lines: Mapping[str, int]) -> int:
    """What is resident, fragmentation apart: its margin may be that of another schedule."""
    return problem.resident - lines.get(MARGIN, 0)


def _notes(request: Request, graph: TrainingGraph) -> Iterator[str]:
    found = sum(region.checkpointed for region in graph.regions)
    calls = "1 checkpointed call" if found == 1 else f"{found} checkpointed calls"
    if found and request.checkpoints == "keep":
        yield f'{calls} of the model recomputed as the model asks; that is part of "everything kept" here.'
    elif found:
        yield f"{calls} of the model planned like the rest (checkpoints='keep' leaves them as they are)."
    if graph.asked:
        yield told(graph.asked, "is planned when it comes")


def write(request: Request, graph: TrainingGraph, lowered: Lowered, solution: Solution, lines: dict[str, int]) -> Plan:
    problem, timeline = lowered.problem, solution.timeline
    passes = raise_schedule(lowered, solution.schedule)
    modules = tuple(
        GraphModules(*emit(region, *each))
        for region, each in zip(graph.regions, passes, strict=True)
        if region.fingerprint
    )
    planned = [PlannedRegion(r.fingerprint, *each) for r, each in zip(graph.regions, passes, strict=True)]
    calls = {key: tuple(None if r is None else planned[r] for r in order) for key, order in graph.order.items()}
    recipe = Recipe(calls, graph.detached, graph.maxima, graph.asked)
    names = {name for name, _ in request.model.named_modules()}
    kept = carried(problem, solution.schedule)
    planned_timeline, unplanned = timelines(graph.regions, lowered, solution, lines, names, kept)
    return Plan(
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
        graph_modules=modules,
        step_seconds=timeline.cost,
        account=MappingProxyType({**lines, **peak_account(lowered, solution.schedule)}),
        note=" ".join(
            filter(None, [solution.note, in_words(problem, solution.schedule), graph.note, *_notes(request, graph)])
        ),
        device=request.device.name,
        recipe=recipe,
        problem=problem,
        schedule=solution.schedule,
        request=request,
    )
