"""Moves of values to the host and back: their rules, and the time they take by three clocks.

Memory depends on the positions of moves alone, time on the link as well: a slow link costs time, never memory. The
compute clock waits where a value leaves the device before its copy is out, and where an op reads a value whose copy is
not back. Each direction has a clock of its own, on which copies follow one another.

Where both directions run at once, each has a share of its rate. Which copies can overlap is told by positions, too: a
copy out is over when its value leaves, a copy back when the value is first read. A copy whose stretch of the schedule
meets one of the other direction's is counted at the shared rate throughout. So all clocks only add and take maxima:
the time is never below that of copies which share the link only while they overlap, and a slower link is never faster.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from solvers.errors import ProblemError
from solvers.problem import Problem

Kind = Literal["send", "free", "fetch"]


@dataclass(frozen=True, slots=True)
class Move:
    """One move of a value, just before a step of the schedule.

    `send` starts the copy out; the value stays. `free` waits for that copy; the value's bytes on the device go. `fetch`
    takes bytes on the device and starts the copy back; the first op that reads the value waits for it. The copy on the
    host stays until its last fetch has ended, so that a value that came back may be freed again without being sent.

    Attributes:
        kind: what is done.
        value: the value, one of `Problem.movable`.
        at: the number of the step before which it is done.
    """

    kind: Kind
    value: int
    at: int


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy over the link, in units of cost from the beginning of the schedule.

    Attributes:
        kind: "send" out of the device, or "fetch" back to it.
        value: the value.
        begin, end: when it starts and ends.
        needed: the number of the step before which the schedule waits for its end.
    """

    kind: Kind
    value: int
    begin: float
    end: float
    needed: int


@dataclass(frozen=True, slots=True)
class Traffic:
    """What moves cost beside the steps.

    Attributes:
        stall: units of cost that the compute clock waits.
        moved: bytes copied, out and back.
        host_peak: the most bytes on the host at once.
        copies: all copies, in the order of the moves that start them.
    """

    stall: float = 0.0
    moved: int = 0
    host_peak: int = 0
    copies: tuple[Copy, ...] = ()


FOLLOWS = {"send": ("no move",), "free": ("send", "read"), "fetch": ("free",)}  # what precedes each move of a value
Event = tuple[int, Move | None]  # the number of a step, and a move before it; None for the step itself


def events(steps: Sequence[int], moves: Sequence[Move]) -> Iterator[Event]:
    """Steps and moves in the order in which they are done."""
    n = 0
    for at in range(len(steps)):
        while n < len(moves) and moves[n].at == at:
            yield at, moves[n]
            n += 1
        yield at, None


def check_moves(problem: Problem, steps: Sequence[int], moves: Sequence[Move]) -> None:
    """Check what can be said without knowing which values are held: each value is sent once, freed, fetched, freed, ...

    Raises:
        ProblemError: naming the first move that breaks a rule.
    """
    if moves and problem.link is None:
        raise ProblemError(f"the schedule has {len(moves)} moves, but the problem has no link")
    _check_places(problem, len(steps), moves)
    last: dict[int, str] = {}
    for at, move in events(steps, moves):
        if move is None:
            op = problem.ops[steps[at]]
            last.update((v, "read") for v in op.reads if last.get(v) == "fetch")
            if sent := [v for v in op.writes if last.get(v) == "send"]:
                raise ProblemError(f"step {at}: op {steps[at]} writes value {sent[0]} again while it is being sent")
        elif (then := last.get(move.value, "no move")) not in FOLLOWS[move.kind]:
            raise ProblemError(f"{label(move)}: it follows {then}, not {' or '.join(FOLLOWS[move.kind])}")
        else:
            last[move.value] = move.kind
    if sent := [v for v, kind in last.items() if kind == "send"]:
        raise ProblemError(f"value {sent[0]} is sent, but never freed")


def _check_places(problem: Problem, steps: int, moves: Sequence[Move]) -> None:
    before = 0
    for move in moves:
        if move.kind not in ("send", "free", "fetch"):
            raise ProblemError(f"move {move!r:.80}: it is no kind of move; the kinds are send, free and fetch")
        if move.value not in problem.movable:
            raise ProblemError(f"{label(move)}: the value is not movable")
        if not before <= move.at < steps:
            raise ProblemError(f"{label(move)}: moves must be in order, before steps 0..{steps - 1}")
        before = move.at


def label(move: Move) -> str:
    """A move in a message."""
    return f"step {move.at}: {move.kind} of value {move.value}"


def traffic(problem: Problem, steps: Sequence[int], moves: Sequence[Move]) -> Traffic:
    """Replay the moves of a schedule that `check_moves` has passed. O(steps + reads + moves log moves)."""
    if problem.link is None or not moves:
        return Traffic()
    ends = _ends(problem, steps, moves)
    durations = _durations(problem, moves, ends)
    compute = stall = 0.0
    clocks = {"send": 0.0, "fetch": 0.0}
    done: dict[tuple[str, int], float] = {}  # when each copy ends that nothing has waited for yet
    copies: list[Copy] = []
    n = 0
    for at, move in events(steps, moves):
        awaited: list[tuple[str, int]] = []
        if move is None:
            awaited = [("fetch", v) for v in problem.ops[steps[at]].reads]
        elif move.kind == "free":
            awaited = [("send", move.value)]
        for copy in awaited:
            if (end := done.pop(copy, 0.0)) > compute:
                stall += end - compute
                compute = end
        if move is None:
            compute += problem.ops[steps[at]].cost
            continue
        if move.kind != "free":
            begin = max(clocks[move.kind], compute)
            clocks[move.kind] = done[move.kind, move.value] = begin + durations[n]
            copies.append(Copy(move.kind, move.value, begin, begin + durations[n], ends[n][1]))
        n += 1
    moved = sum(problem.sizes[copy.value] for copy in copies)
    return Traffic(stall, moved, _host_peak(problem, moves, ends), tuple(copies))


def _ends(problem: Problem, steps: Sequence[int], moves: Sequence[Move]) -> list[tuple[int, int, int]]:
    """For each move the event that it is, the step before which its copy must have ended, and the event of that.

    A send must end before its value is freed, a fetch before it is read; a free ends at once.
    """
    found = [(0, 0, 0)] * len(moves)
    running: dict[tuple[str, int], tuple[int, int]] = {}  # of each copy the event and the move that started it
    n = 0
    for time, (at, move) in enumerate(events(steps, moves)):
        over = [("fetch", v) for v in problem.ops[steps[at]].reads] if move is None else [("send", move.value)]
        for copy in over:
            if copy in running:
                begun, m = running.pop(copy)
                found[m] = (begun, at, time)
        if move is not None:
            if move.kind == "free":
                found[n] = (time, at, time)
            else:
                running[move.kind, move.value] = (time, n)
            n += 1
    return found


def _durations(problem: Problem, moves: Sequence[Move], ends: Sequence[tuple[int, int, int]]) -> list[float]:
    """For each move how long its copy takes; a free takes none."""
    link = problem.link
    assert link is not None
    windows: dict[str, list[tuple[int, int]]] = {"send": [], "fetch": [], "free": []}
    for move, (begin, _, end) in zip(moves, ends, strict=True):
        windows[move.kind].append((begin, end))
    latest = {kind: list(accumulate((end for _, end in each), max)) for kind, each in windows.items()}
    found = []
    for move, (begin, _, end) in zip(moves, ends, strict=True):
        if move.kind == "free":
            found.append(0.0)
            continue
        rate, other = (link.out, "fetch") if move.kind == "send" else (link.back, "send")
        earlier = bisect_left(windows[other], (end, 0))  # copies of the other direction that start before this ends
        shared = earlier > 0 and latest[other][earlier - 1] > begin
        found.append(link.latency + problem.sizes[move.value] / (rate * (link.both if shared else 1.0)))
    return found


def _host_peak(problem: Problem, moves: Sequence[Move], ends: Sequence[tuple[int, int, int]]) -> int:
    """The most bytes on the host: each value's from its send to the end of its last fetch."""
    begin: dict[int, int] = {}
    end: dict[int, int] = {}
    for move, (start, _, over) in zip(moves, ends, strict=True):
        begin.setdefault(move.value, start)
        end[move.value] = over
    changes = [(time, problem.sizes[v]) for v, time in begin.items()]
    changes += [(time, -problem.sizes[v]) for v, time in end.items()]
    return max(accumulate(change for _, change in sorted(changes)), default=0)
