"""Whether what a plan file says holds together, so that it can be shown and applied like a plan made here."""

from __future__ import annotations

import torch

from planner.core.plan import PlanRecord
from planner.core.recipe import Choice
from planner.planfile.schema import LARGEST, Unexpected
from solvers import ProblemError, every_op_once, simulate, validate

LONGEST_NAME = 1000  # characters of a path or an op
MOST_SECONDS = 1e12  # or times the step
ROUNDING = 1e-6


def check(plan: PlanRecord) -> None:
    """Raise Unexpected where the figures contradict each other: no file may promise what its schedule does not hold."""
    held = [m.held_bytes for m in plan.timeline]
    if plan.problem is not None and plan.schedule is not None:
        try:
            replayed = validate(plan.problem.with_budget(None), plan.schedule)
        except ProblemError as e:
            raise Unexpected("plan.schedule", "one of the problem", str(e)) from e
        for i, (told, found) in enumerate(zip(held, replayed.held, strict=False)):
            if told != found:
                raise Unexpected(f"plan.timeline.held_bytes[{i}]", f"{found}, as the schedule holds", told)
        once = simulate(plan.problem, every_op_once(plan.problem))
        if plan.baseline_peak_bytes != once.peak:
            raise Unexpected(
                "plan.baseline_peak_bytes", f"{once.peak}, as the problem has it", plan.baseline_peak_bytes
            )
        if len(held) != len(replayed.held):
            raise Unexpected("plan.timeline", f"{len(replayed.held)} moments, as the schedule has", len(held))
    elif (plan.problem is None) != (plan.schedule is None) or not isinstance(plan.recipe, Choice):
        raise Unexpected("plan", "a problem and its schedule", "not both")
    for i, moment in enumerate(plan.baseline_timeline):
        if not all(0 <= at < len(plan.baseline_timeline) for at in moment.reads):
            raise Unexpected(f"plan.baseline_timeline.reads[{i}]", "positions in it", moment.reads)
    if not held or plan.peak_bytes != max(held):
        raise Unexpected("plan.peak_bytes", f"{max(held, default='a timeline')}, its timeline's peak", plan.peak_bytes)
    if sum(plan.account.values()) != plan.peak_bytes:
        raise Unexpected("plan.account", f"lines of {plan.peak_bytes} bytes, the peak", sum(plan.account.values()))
    if plan.budget_bytes <= 0 or min(held) < 0:
        raise Unexpected("plan.budget_bytes", "a budget and a timeline of bytes", plan.budget_bytes)
    try:
        torch.device(plan.step.where)
    except RuntimeError:
        raise Unexpected("plan.step.where", "a torch device", plan.step.where) from None
    _check_times(plan)
    for table in ("decisions", "timeline", "baseline_timeline"):
        for i, row in enumerate(getattr(plan, table)):
            for name in (row.module, row.op):
                if len(name) > LONGEST_NAME:
                    at = f"plan.{table}[{i}]"
                    raise Unexpected(at, f"names of at most {LONGEST_NAME} characters", f"{len(name)} of them")


def _check_times(plan: PlanRecord) -> None:
    for name in ("step_seconds", "bound", "solve_seconds"):
        _within(getattr(plan, name), f"plan.{name}", "seconds")
    for name in ("overhead", "gap"):
        _within(getattr(plan, name), f"plan.{name}", "a share of the time", -ROUNDING)
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
