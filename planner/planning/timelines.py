"""A solution's timeline, moment by moment: the op that runs, its module, and the bytes held, by kind."""

from __future__ import annotations

from planner.core.account import BACKWARD, GRADIENTS, KEPT, PARAMETERS, PASSING, RECOMPUTED, resident
from planner.core.plan import Action, BaselineMoment, Held, Moment
from planner.core.step import Replay, Runs, Step, needed_in_backward
from solvers import Move, Problem
from solvers.moves import events


def planned_timeline(step: Step, planned: Replay) -> tuple[Moment, ...]:
    """The timeline of a schedule of the step. O(steps + reads)."""
    problem, seen = step.problem, set[int]()
    timeline = []
    for i, held in zip(planned.schedule.steps, by_kind(step, planned), strict=True):
        at = step.origins[i]
        # an early free may make an op run again in the forward pass, and the forward ops of one graph after another's
        phase = "backward" if i in seen and problem.boundary in seen else at.phase
        timeline.append(Moment(at.kind, phase, i in seen or at.again, held, problem.ops[i].cost, at.module, at.source))
        seen.add(i)
    return tuple(timeline)


def baseline_timeline(step: Step, runs: Runs, baseline: Replay) -> tuple[BaselineMoment, ...]:
    """The timeline of every op once, with what the plan does with each op. O(ops + reads).

    Args:
        step: the training step.
        runs: what the plan makes of it.
        baseline: every op once.
    """
    problem = step.problem
    return tuple(
        BaselineMoment(
            at.kind,
            at.phase,
            held_bytes,
            op.cost,
            at.module,
            at.source,
            nbytes=sum(problem.sizes[v] for v in op.writes if (i, v) not in step.holds),
            runs=runs.times[i],
            action=_action(step, runs, i),
            reads=tuple(dict.fromkeys(problem.producer[v] for v in op.reads if (i, v) not in step.holds)),
        )
        for i, (op, at, held_bytes) in enumerate(zip(problem.ops, step.origins, baseline.timeline.held, strict=True))
    )


def _action(step: Step, runs: Runs, i: int) -> Action | None:
    """What becomes of the values of op number `i`."""
    if i >= step.problem.boundary:
        return None
    if any(v in runs.away for v in step.problem.ops[i].writes):
        return "offload"
    if runs.times[i] > 1:
        return "recompute"
    saved = (v for v in step.problem.ops[i].writes if v in runs.saved_for_backward)
    return "keep" if any(needed_in_backward(step, v) for v in saved) else None


def by_kind(step: Step, planned: Replay) -> list[Held]:
    """`planned.timeline.held`, by kind. O(steps + reads)."""
    problem, steps = step.problem, planned.schedule.steps
    transient = _transient(problem, planned)
    live = list(resident(step.account))
    kind_of: dict[int, int] = {}  # of the values held
    away: dict[int, int] = {}  # of those that have left
    seen: set[int] = set()
    found = []
    moments = list(live)
    for at, move in events(steps, planned.schedule.moves):
        if move is not None:
            _move(problem, move, live, kind_of, away)
            moments = max(moments, list(live), key=sum)
            continue
        i, gone, others = steps[at], planned.timeline.frees[at], planned.others[at]
        op = problem.ops[i]
        replaced = []  # values that are still held: their old copies go when the op has ended
        for v in op.writes:
            if v in kind_of:
                replaced.append((v, kind_of[v]))
            kind_of[v] = kind = _kind(step, i, v, i in seen or step.origins[i].again, transient)
            live[kind] += problem.sizes[v]
        now = [*live[:-2], others, op.workspace]
        found.append(Held._make(now if sum(now) >= sum(moments) else moments))  # moves may take more for a moment
        moments = []
        for v, kind in replaced:
            live[kind] -= problem.sizes[v]
        for v in gone:
            live[kind_of.pop(v)] -= problem.sizes[v]
        seen.add(i)
    return found


def _move(problem: Problem, move: Move, live: list[int], kind_of: dict[int, int], away: dict[int, int]) -> None:
    """Take a value off the bytes of its kind, or add it to them."""
    v = move.value
    if move.kind == "free":
        away[v] = kind_of.pop(v)
        live[away[v]] -= problem.sizes[v]
    elif move.kind == "fetch":
        kind_of[v] = away.pop(v)
        live[kind_of[v]] += problem.sizes[v]


def _kind(step: Step, i: int, value: int, again: bool, transient: set[int]) -> int:
    """Which of the bytes in `Held` a value is that op number `i` makes."""
    if value in step.gathered:
        return PARAMETERS
    if again:
        return RECOMPUTED
    if i < step.problem.boundary:
        return PASSING if value in transient else KEPT
    if step.origins[i].phase == "loss" and value == step.problem.ops[i].writes[-1]:
        return KEPT  # saved by the loss itself
    return GRADIENTS if value in step.gradients else BACKWARD


def _transient(problem: Problem, planned: Replay) -> set[int]:
    """Forward values that are freed, or made again, before the first backward op, once they were made."""
    steps = planned.schedule.steps
    end = steps.index(problem.boundary) if problem.boundary in steps else len(steps)
    seen: set[int] = set()
    found: set[int] = set()
    for i, gone in zip(steps[:end], planned.timeline.frees[:end], strict=True):
        if i in seen:
            found.update(problem.ops[i].writes)
        found.update(gone)
        seen.add(i)
    return found
