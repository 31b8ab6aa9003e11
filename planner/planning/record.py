"""Writes a solved step down as a plan's record, for compiled and eager plans alike."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

from planner.core.identity import identity
from planner.core.plan import PlanRecord
from planner.core.recipe import Choice, Recipe
from planner.core.step import Replay, Runs, Step, replay, runs_of
from planner.costs.account import planned_step
from planner.planning.decisions import decisions, peak_account
from planner.planning.timelines import baseline_timeline, planned_timeline
from planner.requests.request import Request
from solvers import Solution, every_op_once


@dataclass(frozen=True)
class Unplanned:
    """The step with nothing recomputed, where it is another problem than the planned step, as in eager mode.

    Attributes:
        step: its ops are those that decisions are about.
        runs: what the plan makes of them.
    """

    step: Step
    runs: Runs


def record_of(
    request: Request,
    step: Step,
    planned: Replay,
    solution: Solution,
    recipe: Recipe | Choice,
    unplanned: Unplanned | None = None,
    host_bytes: int = 0,
) -> PlanRecord:
    """The record of a plan. O(steps + reads).

    Args:
        request: what was planned.
        step: the step that the solution schedules.
        planned: the solution's schedule, replayed.
        solution: of the step; with the note of the plan.
        recipe: how to run it.
        unplanned: the step with nothing recomputed; None where that is every op of `step`, once.
        host_bytes: room that its moves take where values go.
    """
    problem, timeline = step.problem, planned.timeline
    before, runs = (unplanned.step, unplanned.runs) if unplanned else (step, runs_of(planned))
    baseline = replay(before.problem, every_op_once(before.problem))
    return PlanRecord(
        budget_bytes=request.budget_bytes,
        peak_bytes=timeline.peak,
        baseline_peak_bytes=baseline.timeline.peak,
        resident_bytes=problem.resident,
        overhead=timeline.cost / before.problem.total_cost - 1,
        bound=solution.bound,
        gap=solution.gap,
        solver=solution.solver,
        solve_seconds=solution.seconds,
        timeline=planned_timeline(step, planned),
        baseline_timeline=baseline_timeline(before, runs, baseline),
        decisions=decisions(before, runs),
        step_seconds=timeline.cost,
        account=MappingProxyType({**step.account, **peak_account(step, planned)}),
        note=solution.note,
        device=request.device.name,
        recipe=recipe,
        problem=None if unplanned else problem,
        schedule=None if unplanned else solution.schedule,
        options=request.options,
        step=planned_step(request, step.account["optimizer state"], step.optimizer_step),
        identity=identity(request.model),
        eager_peak_bytes=baseline.timeline.peak if unplanned else None,
        stall_seconds=timeline.stall,
        moved_bytes=timeline.moved,
        host_peak_bytes=host_bytes,
    )
