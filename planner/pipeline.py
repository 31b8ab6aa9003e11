"""From a checked request to a plan: capture, estimate, solve, rewrite, on one screen."""

from __future__ import annotations

from types import MappingProxyType

import torch

from solvers import InfeasibleError, Solution, every_op_once, simulate, solve

from .account import account_of
from .capture.step import TrainingGraph, capture
from .decide import decisions, moments, peak_account
from .eager.pipeline import make_eager_plan
from .errors import InfeasibleBudgetError
from .estimate.ops import estimate
from .estimate.workspace import measure
from .fragmentation import solve_with_margin
from .lowering import Lowered, lower, raise_schedule
from .plan import GraphModules, Plan
from .request import Request
from .rewrite.emit import emit, keep_everything
from .runtime.run import Recipe


def make_plan(request: Request, like: Plan | None = None) -> Plan:
    """Plan a checked request that has a batch: capture, estimate, solve, rewrite. Raises as `plan()` does.

    Args:
        request: what to plan.
        like: a plan for the same model; an eager one is made like it where that fits.
    """
    if request.mode == "eager":
        return make_eager_plan(request, like)
    graph = capture(request.model, request.args or (), request.kwargs, keep_everything, request.loss_fn)
    lowered, lines = problem_of(request, graph)
    lowered, solution, lines = solve_with_margin(request, lowered, lines, _solve)
    return write(request, graph, lowered, solution, lines)


def problem_of(request: Request, graph: TrainingGraph) -> tuple[Lowered, dict[str, int]]:
    """The training step as a problem, and the lines of the account that are held all the time, fragmentation apart."""
    device, here = request.device, request.measure_on
    outside = measure(graph.loss.calls, here, progress=False) if here is not None else {}
    lines, step = account_of(request)
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
        loss_bytes=graph.loss.held + sum(a.excess for a in outside.values()),
        # loss.backward() holds the loss's own gradient; before torch 2.13, autograd holds any that enter a region
        tangents_pinned=graph.loss.source == "model" or not hasattr(torch.autograd.Function, "boxed_grads_call"),
        accumulate=request.accumulate,
        optimizer_step=step,
        shard=request.shard,
        granularity=512 if device.type == "cuda" else 1,
        budget=request.budget_bytes,
    )
    return lowered, lines


def _solve(request: Request, lowered: Lowered, lines: dict[str, int]) -> Solution:
    try:
        return solve(lowered.problem, request.solver, time_limit=request.time_limit, progress=request.progress)
    except InfeasibleError as e:
        leanest = peak_account(lowered.problem, e.schedule)
        takes = dict(sorted({**lines, **leanest}.items(), key=lambda line: -line[1]))
        raise InfeasibleBudgetError(request.budget_gb, e.minimum, takes) from None


def write(request: Request, graph: TrainingGraph, lowered: Lowered, solution: Solution, lines: dict[str, int]) -> Plan:
    problem, timeline = lowered.problem, solution.timeline
    passes = raise_schedule(lowered, solution.schedule)
    modules = tuple(GraphModules(*emit(region, *each)) for region, each in zip(graph.regions, passes, strict=True))
    recipe = Recipe({r.fingerprint: each for r, each in zip(graph.regions, passes, strict=True)}, graph.detached)
    return Plan(
        budget_bytes=request.budget_bytes,
        peak_bytes=timeline.peak,
        baseline_peak_bytes=simulate(problem, every_op_once(problem)).peak,
        resident_bytes=problem.resident,
        overhead=timeline.cost / problem.total_cost - 1,
        bound=solution.bound,
        gap=solution.gap,
        solver=solution.solver,
        solve_seconds=solution.seconds,
        timeline=moments(lowered, solution),
        decisions=decisions(graph.regions, lowered, solution, {name for name, _ in request.model.named_modules()}),
        graph_modules=modules,
        step_seconds=timeline.cost,
        account=MappingProxyType({**lines, **peak_account(problem, solution.schedule)}),
        note=solution.note,
        device=request.device.name,
        recipe=recipe,
        request=request,
    )
