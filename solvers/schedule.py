"""Schedules, and `simulate`, the one judge of every solver's answer.

A schedule is a sequence of ops; it determines when each value is freed. A copy of a value is live from the op that
writes it to the last op that reads it before the value is written again; a pinned value is live to the end, and a copy
that no op reads is freed as soon as its op ends. Of a value that other regions read, all ops read the first copy until
these have ended, and of a pinned one always; what is written again is freed as its op ends. Freeing later never lowers
a peak, so the sequence says everything. Where the problem has a link, moves say which values leave the device for a
while, see `solvers.moves`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate

from solvers.errors import ProblemError, SolverError
from solvers.moves import Copy, Move, check_moves, events, label, traffic
from solvers.problem import Problem


@dataclass(frozen=True, slots=True)
class Schedule:
    """The ops in the order in which they run; an op that runs again appears again.

    Attributes:
        steps: the ops.
        moves: of values to the host and back, in the order in which they are done: `at` never falls.
    """

    steps: tuple[int, ...]
    moves: tuple[Move, ...] = ()


@dataclass(frozen=True, slots=True)
class Timeline:
    """Memory and cost of a schedule, step by step.

    Attributes:
        held: for each step, bytes allocated while it runs: resident bytes, live values, its outputs and workspace, and
            the bytes of waiting microbatches. Where the moves just before it take more for a moment, as many.
        after: for each step, bytes allocated once it has ended and its frees are done, before any move.
        frees: for each step, the values freed when it ends; a value that a move frees is not among them.
        peak: the largest of `held` (of `resident`, where there are no steps).
        cost: summed cost of all steps, and `stall`.
        stall: how long steps wait for copies, in units of cost.
        moved: bytes copied to the host and back.
        host_peak: the most bytes on the host at once.
        copies: the copies to the host and back, with their times.
    """

    held: tuple[int, ...]
    after: tuple[int, ...]
    frees: tuple[tuple[int, ...], ...]
    peak: int
    cost: float
    stall: float = 0.0
    moved: int = 0
    host_peak: int = 0
    copies: tuple[Copy, ...] = ()


class InfeasibleError(SolverError):
    """The solver knows no schedule within the budget.

    Attributes:
        budget: the budget that was asked for, in bytes.
        minimum: the peak of the leanest schedule that the solver reached, in bytes; solving again with this budget
            succeeds.
        bound: a proven lower bound on the peak of any schedule, in bytes.
        schedule: that leanest schedule.
    """

    def __init__(self, budget: int, minimum: int, bound: int, schedule: Schedule) -> None:
        super().__init__(
            f"budget of {budget} bytes: the leanest schedule found peaks at {minimum} bytes "
            f"(proven: none peaks under {bound}); raise the budget to {minimum} bytes or more"
        )
        self.budget = budget
        self.minimum = minimum
        self.bound = bound
        self.schedule = schedule


def every_op_once(problem: Problem) -> Schedule:
    """The schedule that recomputes nothing."""
    return Schedule(tuple(range(len(problem.ops))))


def simulate(problem: Problem, schedule: Schedule) -> Timeline:
    """Replay a schedule. O(steps + reads) time.

    The answer is exact under the model of `Problem`: while an op runs, its reads, its writes and its workspace are
    allocated; where an op writes a value of which a copy is still live, both copies count until the op ends.

    Raises:
        ProblemError: a step reads a value that is not live, or names an op that does not exist.
    """
    ops, sizes, steps = problem.ops, problem.sizes, schedule.steps
    frees = _frees(problem, steps, schedule.moves)
    live = problem.resident
    is_held = bytearray(len(sizes))
    held: list[int] = []
    after: list[int] = []
    most = 0  # bytes at once, of the moves before the next step
    for at, move in events(steps, schedule.moves):
        if move is not None:
            live += _moved(problem, is_held, move)
            most = max(most, live)
            continue
        i = steps[at]
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
        held.append(max(now, most))
        most = 0
        for v in frees[at]:
            is_held[v] = 0
            live -= sizes[v]
        after.append(live)
    if problem.waiting is not None:
        beside = waiting_bytes(problem, steps)
        held, after = ([a + b for a, b in zip(each, beside, strict=True)] for each in (held, after))
    peak = max(held, default=problem.resident)
    links = traffic(problem, steps, schedule.moves)
    cost = math.fsum(ops[i].cost for i in steps) + links.stall
    return Timeline(
        tuple(held), tuple(after), frees, peak, cost, links.stall, links.moved, links.host_peak, links.copies
    )


def _moved(problem: Problem, is_held: bytearray, move: Move) -> int:
    """Do a move; returns the bytes on the device that it takes."""
    v = move.value
    if is_held[v] == (move.kind == "fetch"):
        raise ProblemError(f"{label(move)}: the value is {'' if is_held[v] else 'not '}held on the device")
    if move.kind == "send":
        return 0
    is_held[v] = move.kind == "fetch"
    return problem.sizes[v] if is_held[v] else -problem.sizes[v]


def _kept(problem: Problem, steps: tuple[int, ...]) -> set[int]:
    """The values that are live when the first backward op of a schedule starts."""
    start = steps.index(problem.boundary)
    frees = _frees(problem, steps)
    live: set[int] = set()
    for i, gone in zip(steps[:start], frees, strict=False):
        live.update(problem.ops[i].writes)
        live.difference_update(gone)
    return live


def kept_bytes(problem: Problem, steps: tuple[int, ...]) -> int:
    """Bytes of the values that are live when the first backward op of a schedule starts."""
    return sum(problem.sizes[v] for v in _kept(problem, steps))


def _beside_again(problem: Problem, steps: tuple[int, ...], again: int) -> list[int]:
    """For each step, the bytes beside the schedule where its backward pass runs twice.

    Either pass may be the higher one at a step: the first, where all that the schedule has freed of the saved values is
    still held, or the second, where the results of the first are.
    """
    start, saved = steps.index(problem.boundary), _kept(problem, steps)
    held = 0
    beside = [0] * start
    for gone in _frees(problem, steps)[start:]:
        beside.append(max(again, held))
        held += sum(problem.sizes[v] for v in saved.intersection(gone))
        saved.difference_update(gone)
    return beside


def waiting_bytes(problem: Problem, steps: tuple[int, ...]) -> list[int]:
    """For each step, the bytes of the microbatches that wait, and those that a second backward pass takes.

    O(steps + reads).
    """
    waiting = problem.waiting
    if waiting is None or problem.boundary not in steps:
        return [0] * len(steps)
    start = steps.index(problem.boundary)
    end = steps.index(waiting.until) if waiting.until in steps else len(steps)
    kept = kept_bytes(problem, steps)
    forward, backward = waiting.bytes_in(waiting.forward, kept), waiting.bytes_in(waiting.backward, kept)
    found = [forward] * start + [backward] * (end - start) + [0] * (len(steps) - end)
    if waiting.again is not None:
        beside = _beside_again(problem, steps, waiting.again)
        found = [a + b if at < end else a for at, (a, b) in enumerate(zip(found, beside, strict=True))]
    return found


def _frees(problem: Problem, steps: tuple[int, ...], moves: tuple[Move, ...] = ()) -> tuple[tuple[int, ...], ...]:
    """For each step, the values that it frees: no read, send or free follows before their next write or fetch."""
    ops = problem.ops
    for at, i in enumerate(steps):
        if not 0 <= i < len(ops):
            raise ProblemError(f"step {at}: there is no op {i!r}, only 0..{len(ops) - 1}")
    check_moves(problem, steps, moves)
    wanted = bytearray(len(problem.sizes))  # needed later, before it is written or fetched
    for v in problem.pinned:
        wanted[v] = 1
    pinned, shared, furthest = problem.pinned, problem.shared_until, list(accumulate(steps, max))
    frees: list[tuple[int, ...]] = [()] * len(steps)
    n = len(moves)
    for at in range(len(steps) - 1, -1, -1):
        op = ops[steps[at]]
        gone = [v for v in op.writes if not wanted[v]]
        for v in op.writes:
            if v not in pinned and furthest[at] >= shared[v]:
                wanted[v] = 0
        for v in op.reads:
            if not wanted[v]:
                wanted[v] = 1
                gone.append(v)
        frees[at] = tuple(gone)
        while n and moves[n - 1].at == at:
            n -= 1
            _want(wanted, moves[n])
    return tuple(frees)


def _want(wanted: bytearray, move: Move) -> None:
    """Whether a value is needed before a move, from whether it is needed after it."""
    v = move.value
    if move.kind == "free" and wanted[v]:
        raise ProblemError(f"{label(move)}: a later step reads the value before it is fetched")
    if move.kind == "fetch" and not wanted[v]:
        raise ProblemError(f"{label(move)}: no step reads the value that is fetched")
    wanted[v] = move.kind != "fetch"


def validate(problem: Problem, schedule: Schedule) -> Timeline:
    """Replay a schedule, check every rule that a schedule must keep to, and return its timeline.

    Raises:
        ProblemError: the message names the first step that breaks a rule: an op is missing or out of order, an op that
            must run once runs again, a re-run or a move is outside its region, a move is out of order, a read value is
            not live, or the peak is above the budget, on the device or on the host.
    """
    timeline = simulate(problem, schedule)
    first = 0
    for at, move in events(schedule.steps, schedule.moves):
        if move is not None:
            if (
                first == len(problem.ops)
                or problem.ops[first].region != problem.ops[problem.producer[move.value]].region
            ):
                raise ProblemError(f"{label(move)}: the value moves in another region than its own")
            continue
        i = schedule.steps[at]
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
    host = None if problem.link is None else problem.link.host
    if host is not None and timeline.host_peak > host:
        raise ProblemError(f"{timeline.host_peak} bytes on the host are above its limit of {host} bytes")
    return timeline


def to_steps(problem: Problem, schedule: Schedule) -> list[list[object]]:
    """The schedule as `["compute", op]` and `["free", value]` pairs; published instances number both alike.

    Where an op writes a value of which a copy is still live, the old copy is freed first. Moves are `["send", value]`,
    `["free", value]` and `["fetch", value]`.
    """
    steps: list[list[object]] = []
    live: set[int] = set()
    frees = simulate(problem, schedule).frees
    for at, move in events(schedule.steps, schedule.moves):
        if move is not None:
            steps.append([move.kind, move.value])
            live = live - {move.value} if move.kind == "free" else live | {move.value}
            continue
        i, gone = schedule.steps[at], frees[at]
        writes = problem.ops[i].writes
        steps += [["free", v] for v in writes if v in live]
        steps.append(["compute", i])
        steps += [["free", v] for v in gone]
        live.update(writes)
        live.difference_update(gone)
    return steps
