"""Schedules and the one judge of every solver's answer.

A schedule is the sequence of ops to run; when values are freed follows from it. A value is held from the op that
writes it to the last op that reads it before it is written again (pinned values: to the end); what nothing reads is
freed as soon as its op ends. No later free could help, so the sequence says everything.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from solvers.errors import ProblemError
from solvers.problem import Problem


@dataclass(frozen=True, slots=True)
class Schedule:
    """The ops in the order in which they run; an op that runs again appears again."""

    steps: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Timeline:
    """What a schedule holds and costs.

    Attributes:
        held: for each step, bytes held while it runs: resident, values, outputs, workspace, and what waits.
        after: for each step, bytes held once it has ended and what nothing reads again is freed.
        frees: for each step, the values freed when it ends.
        peak: the largest of `held` (of `resident`, where there are no steps).
        cost: summed cost of all steps.
    """

    held: tuple[int, ...]
    after: tuple[int, ...]
    frees: tuple[tuple[int, ...], ...]
    peak: int
    cost: float


@dataclass(frozen=True, slots=True)
class Answer:
    """What a solver returns before it is judged.

    Attributes:
        schedule: the best it found.
        bound: the best lower bound on the cost that it proved; 0 where it proved none.
        note: what the user should know: what was coarsened, that time ran out.
    """

    schedule: Schedule
    bound: float = 0.0
    note: str = ""


def every_op_once(problem: Problem) -> Schedule:
    """The schedule that recomputes nothing."""
    return Schedule(tuple(range(len(problem.ops))))


def simulate(problem: Problem, schedule: Schedule) -> Timeline:
    """Replay a schedule. O(steps + reads) time.

    The answer is exact under the model of `Problem`: while an op runs, what it reads, all that it writes and its
    workspace are held; a second copy of a value that is still held counts until the op that wrote it ends.

    Raises:
        ProblemError: a step reads what is not held, or names an op that does not exist.
    """
    ops, sizes, steps = problem.ops, problem.sizes, schedule.steps
    frees = _frees(problem, steps)
    live = problem.resident
    is_held = bytearray(len(sizes))
    held: list[int] = []
    after: list[int] = []
    for at, i in enumerate(steps):
        op = ops[i]
        for v in op.reads:
            if not is_held[v]:
                raise ProblemError(f"step {at}: op {i} ({op.name}) reads value {v}, which is not held")
        now = live + op.workspace
        for v in op.writes:
            now += sizes[v]
            if not is_held[v]:
                is_held[v] = 1
                live += sizes[v]
        held.append(now)
        for v in frees[at]:
            is_held[v] = 0
            live -= sizes[v]
        after.append(live)
    if problem.waiting is not None:
        beside = waiting_bytes(problem, steps)
        held, after = ([a + b for a, b in zip(each, beside, strict=True)] for each in (held, after))
    peak = max(held, default=problem.resident)
    return Timeline(tuple(held), tuple(after), frees, peak, math.fsum(ops[i].cost for i in steps))


def kept_bytes(problem: Problem, steps: tuple[int, ...]) -> int:
    """Bytes that a schedule holds of its values when the first backward op starts."""
    start = steps.index(problem.boundary)
    frees = _frees(problem, steps)
    held: set[int] = set()
    for i, gone in zip(steps[:start], frees, strict=False):
        held.update(problem.ops[i].writes)
        held.difference_update(gone)
    return sum(problem.sizes[v] for v in held)


def waiting_bytes(problem: Problem, steps: tuple[int, ...]) -> list[int]:
    """For each step, the bytes of other microbatches. O(steps + reads)."""
    waiting = problem.waiting
    if waiting is None or problem.boundary not in steps:
        return [0] * len(steps)
    start = steps.index(problem.boundary)
    end = steps.index(waiting.until) if waiting.until in steps else len(steps)
    kept = kept_bytes(problem, steps)
    forward, backward = waiting.bytes_in(waiting.forward, kept), waiting.bytes_in(waiting.backward, kept)
    return [forward] * start + [backward] * (end - start) + [0] * (len(steps) - end)


def _frees(problem: Problem, steps: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Walk the steps backwards: a value not read before its next writing (or the end) is freed here."""
    ops = problem.ops
    wanted = bytearray(len(problem.sizes))  # read later, before it is written again
    for v in problem.pinned:
        wanted[v] = 1
    pinned = problem.pinned
    frees: list[tuple[int, ...]] = [()] * len(steps)
    for at in range(len(steps) - 1, -1, -1):
        i = steps[at]
        if not 0 <= i < len(ops):
            raise ProblemError(f"step {at}: there is no op {i!r}, only 0..{len(ops) - 1}")
        op = ops[i]
        gone = [v for v in op.writes if not wanted[v]]
        for v in op.writes:
            if v not in pinned:
                wanted[v] = 0
        for v in op.reads:
            if not wanted[v]:
                wanted[v] = 1
                gone.append(v)
        frees[at] = tuple(gone)
    return tuple(frees)


def validate(problem: Problem, schedule: Schedule) -> Timeline:
    """Replay a schedule and check everything a schedule must keep to; returns its timeline.

    Raises:
        ProblemError: naming the first step that is wrong: an op missing or out of order, one that must run once
            running again, a re-run outside its region, a read of what is not held, or a peak above the budget.
    """
    timeline = simulate(problem, schedule)
    first = 0
    for at, i in enumerate(schedule.steps):
        op = problem.ops[i]
        if i == first:
            first += 1
        elif i > first:
            raise ProblemError(f"step {at}: op {i} ({op.name}) runs before op {first}, which comes first")
        elif not op.recomputable:
            raise ProblemError(f"step {at}: op {i} ({op.name}) must not run again")
        elif first < len(problem.ops) and problem.ops[first].region != op.region:
            raise ProblemError(f"step {at}: op {i} ({op.name}) of region {op.region} runs again in another region")
    if first < len(problem.ops):
        raise ProblemError(f"op {first} ({problem.ops[first].name}) never runs")
    if problem.budget is not None and timeline.peak > problem.budget:
        raise ProblemError(f"peak {timeline.peak} is above the budget of {problem.budget} bytes")
    return timeline


def to_steps(problem: Problem, schedule: Schedule) -> list[list[object]]:
    """The schedule as `["compute", op]` and `["free", value]` pairs; in published instances these are one number.

    A value that is made again while it is still held has its old copy freed first.
    """
    steps: list[list[object]] = []
    held: set[int] = set()
    for i, gone in zip(schedule.steps, simulate(problem, schedule).frees, strict=True):
        writes = problem.ops[i].writes
        steps += [["free", v] for v in writes if v in held]
        steps.append(["compute", i])
        steps += [["free", v] for v in gone]
        held.update(writes)
        held.difference_update(gone)
    return steps
