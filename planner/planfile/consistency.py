"""Whether the figures of a plan file agree, so that its plan can be shown and applied like one computed here."""

from __future__ import annotations

import torch

from planner.core.plan import PlanRecord
from planner.core.recipe import Choice, Recipe
from planner.planfile.schema import LARGEST, Unexpected
from solvers import Problem, ProblemError, Schedule, every_op_once, simulate, validate

LONGEST_NAME = 1000  # characters of a path or an op
MOST_SECONDS = 1e12  # also the largest share of the step's time
ROUNDING = 1e-6  # of a share that is 0


def check(plan: PlanRecord) -> None:
    """Raise Unexpected where figures contradict each other, so that no file promises a peak that its schedule exceeds.

    The schedule is replayed: the complexity is linear in its steps and in the ops that they read.
    """
    if plan.problem is not None and plan.schedule is not None:
        _check_schedule(plan, plan.problem, plan.schedule)
    elif (plan.problem is None) != (plan.schedule is None) or not _has_no_problem(plan.recipe):
        raise Unexpected("plan", "a problem and its schedule", "not both")
    for i, moment in enumerate(plan.baseline_timeline):
        if not all(0 <= at < len(plan.baseline_timeline) for at in moment.reads):
            raise Unexpected(f"plan.baseline_timeline.reads[{i}]", "positions in it", moment.reads)
    _check_bytes(plan)
    try:
        torch.device(plan.step.where)
    except RuntimeError:
        raise Unexpected("plan.step.where", "a torch device", plan.step.where) from None
    _check_times(plan)
    for i, d in enumerate(plan.decisions):
        away = (-1 if d.leaves is None else d.leaves, -1 if d.returns is None else d.returns)
        if (d.action == "offload") != (0 <= away[0] <= away[1] < len(plan.timeline)):
            raise Unexpected(f"plan.decisions.leaves[{i}]", "moments of the timeline for what is offloaded", str(away))
    for table in ("decisions", "timeline", "baseline_timeline"):
        for i, row in enumerate(getattr(plan, table)):
            for name in (row.module, row.op):
                if len(name) > LONGEST_NAME:
                    at = f"plan.{table}[{i}]"
                    raise Unexpected(at, f"names of at most {LONGEST_NAME} characters", f"{len(name)} of them")


def _has_no_problem(recipe: Recipe | Choice) -> bool:
    """Whether plans with such a recipe have no problem: what runs is found by running modules, or generated code."""
    if isinstance(recipe, Choice):
        return True
    return bool(recipe.fused)


def _check_schedule(plan: PlanRecord, problem: Problem, schedule: Schedule) -> None:
    """The timeline and the baseline's peak are those of the problem and its schedule."""
    try:
        replayed = validate(problem.with_budget(None), schedule)
    except ProblemError as e:
        raise Unexpected("plan.schedule", "one of the problem", str(e)) from e
    for i, (moment, expected) in enumerate(zip(plan.timeline, replayed.held, strict=False)):
        if moment.held_bytes != expected:
            raise Unexpected(f"plan.timeline.held_bytes[{i}]", f"{expected}, as the schedule holds", moment.held_bytes)
    if plan.moved_bytes != replayed.moved:
        raise Unexpected("plan.moved_bytes", f"{replayed.moved}, as the schedule moves", plan.moved_bytes)
    baseline_peak = simulate(problem, every_op_once(problem)).peak
    if plan.baseline_peak_bytes != baseline_peak:
        raise Unexpected(
            "plan.baseline_peak_bytes", f"{baseline_peak}, as the problem has it", plan.baseline_peak_bytes
        )
    if len(plan.timeline) != len(replayed.held):
        raise Unexpected("plan.timeline", f"{len(replayed.held)} moments, as the schedule has", len(plan.timeline))


def _check_bytes(plan: PlanRecord) -> None:
    """The timeline, the peak, the account and the budget agree."""
    allocated = [m.held_bytes for m in plan.timeline]
    if not allocated or plan.peak_bytes != max(allocated):
        peak = max(allocated, default="a timeline")
        raise Unexpected("plan.peak_bytes", f"{peak}, its timeline's peak", plan.peak_bytes)
    if sum(plan.account.values()) != plan.peak_bytes:
        raise Unexpected("plan.account", f"lines of {plan.peak_bytes} bytes, the peak", sum(plan.account.values()))
    if plan.budget_bytes <= 0 or min(allocated) < 0:
        raise Unexpected("plan.budget_bytes", "a budget and a timeline of bytes", plan.budget_bytes)


def _check_times(plan: PlanRecord) -> None:
    """Times are nonnegative and finite, and so are shares of the step's time."""
    for name in ("step_seconds", "bound", "solve_seconds", "stall_seconds"):
        _within(getattr(plan, name), f"plan.{name}", "seconds")
    # Inductor may be estimated to take less time for the plan's graphs than for those of its own
    least = {"overhead": -1.0 if plan.problem is None else -ROUNDING, "gap": -ROUNDING}
    for name in least:
        _within(getattr(plan, name), f"plan.{name}", "a share of the time", least[name])
    _within(plan.eager_peak_bytes or 0, "plan.eager_peak_bytes", "bytes")
    _within(plan.host_peak_bytes, "plan.host_peak_bytes", "bytes")
    for i, d in enumerate(plan.decisions):
        _within(d.recompute_seconds, f"plan.decisions.recompute_seconds[{i}]", "seconds")
    for name in ("timeline", "baseline_timeline"):
        for i, moment in enumerate(getattr(plan, name)):
            _within(moment.seconds, f"plan.{name}.seconds[{i}]", "seconds")
    if curve := plan.known_curve:
        for point in (*curve.points, *curve.bound, *curve.peers):
            _within(point.overhead, "plan.known_curve", "shares of the time", -1.0)
            _within(point.peak_bytes, "plan.known_curve", "bytes")


def _within(value: float, at: str, what: str, least: float = 0.0) -> None:
    most = LARGEST if isinstance(value, int) else MOST_SECONDS
    if not least <= value < most:
        raise Unexpected(at, what, value)
