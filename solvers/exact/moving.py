"""The cheapest schedule with moves of a tiny problem, by A* over all that can be done next.

A state is how many first runs are done, what the device and the host hold, and how long the copies on their way still
take. What is left to run for the first time bounds the time to the end from below. Hart, Nilsson and Raphael, "A formal
basis for the heuristic determination of minimum cost paths" (1968).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import NamedTuple

from solvers.moves import Kind, Move
from solvers.problem import Problem
from solvers.schedule import Schedule

OPS = 6  # the largest problem
STATES = 30_000  # that are looked at

KINDS: dict[str, Kind] = {"send": "send", "free": "free", "fetch": "fetch"}

Copies = tuple[tuple[int, float], ...]  # values by number, and how long each one's copy still takes
Act = tuple[str, int]  # "run" and an op; "drop", "send", "free", "fetch" or "release" (on the host) and a value


class State(NamedTuple):
    """What is so before the next act; `sent` has all values that were ever sent, `out` those not freed yet."""

    done: int
    held: frozenset[int]
    host: frozenset[int]
    sent: frozenset[int]
    out: Copies
    back: Copies


def cheapest_with_moves(problem: Problem) -> Schedule | None:
    """The cheapest schedule within the budget; None where none fits, or where there are too many states.

    None, too, for problems of several regions or more than `OPS` ops, and where directions slow each other down.
    """
    link = problem.link
    if link is None or len(problem.ops) > OPS or link.both < 1 or len({op.region for op in problem.ops}) > 1:
        return None
    rest = [sum(op.cost for op in problem.ops[i:]) for i in range(len(problem.ops) + 1)]
    start = State(0, frozenset(), frozenset(), frozenset(), (), ())
    best = {start: 0.0}
    before: dict[State, tuple[State, Act]] = {}
    heap: list[tuple[float, int, float, State]] = [(rest[0], 0, 0.0, start)]
    pushed = looked = 0
    while heap:
        _, _, time, state = heapq.heappop(heap)
        if time > best[state]:
            continue
        if state.done == len(problem.ops):
            return _written(problem, _path(before, state))
        looked += 1
        if looked > STATES:
            return None
        for act, takes, after in _acts(problem, state):
            then = time + takes
            if then < best.get(after, float("inf")):
                best[after] = then
                before[after] = state, act
                pushed += 1
                heapq.heappush(heap, (then + rest[after.done], -pushed, then, after))
    return None


def _acts(problem: Problem, state: State) -> Iterator[tuple[Act, float, State]]:
    """What can be done in a state: the act, the time that it takes, the state after it."""
    link, sizes = problem.link, problem.sizes
    assert link is not None
    out, back = dict(state.out), dict(state.back)
    held = problem.resident + sum(sizes[v] for v in state.held)
    most = float("inf") if problem.budget is None else problem.budget
    room = (float("inf") if link.host is None else link.host) - sum(sizes[v] for v in state.host)
    for i in range(state.done + 1):
        yield from _run(problem, state, i, held, most)
    for v in state.held - problem.pinned:
        if v not in out and v not in back:
            yield ("drop", v), 0.0, state._replace(held=state.held - {v})
        if v in out:
            rest = _later(tuple(copy for copy in state.out if copy[0] != v), out[v])
            now = State(state.done, state.held - {v}, state.host, state.sent, rest, _later(state.back, out[v]))
            yield ("free", v), out[v], now
        elif v in problem.movable - state.sent - back.keys() and link.least <= sizes[v] <= room:
            ends = max(out.values(), default=0.0) + link.latency + sizes[v] / link.out
            copies = (*state.out, (v, ends))
            yield ("send", v), 0.0, state._replace(host=state.host | {v}, sent=state.sent | {v}, out=copies)
    for v in state.host - back.keys() - out.keys():
        if link.host is not None:
            yield ("release", v), 0.0, state._replace(host=state.host - {v})
        if v not in state.held and held + sizes[v] <= most:
            ends = max(back.values(), default=0.0) + link.latency + sizes[v] / link.back
            yield ("fetch", v), 0.0, state._replace(held=state.held | {v}, back=(*state.back, (v, ends)))


def _run(problem: Problem, state: State, i: int, held: int, most: float) -> Iterator[tuple[Act, float, State]]:
    """Run an op, unless a rule forbids it; where it writes a value again, the old copy is dropped first."""
    if i == len(problem.ops):
        return
    op = problem.ops[i]
    if i < state.done and not (op.recomputable and state.done < len(problem.ops)):
        return
    twice = state.held.intersection(op.writes) - problem.pinned
    if twice or not state.held.issuperset(op.reads) or any(v in op.writes for v, _ in state.out):
        return
    if held + op.workspace + sum(problem.sizes[v] for v in op.writes) > most:
        return
    if i == len(problem.ops) - 1 and state.out:
        return  # what is sent is freed before the last step
    back = dict(state.back)
    takes = max((back[v] for v in op.reads if v in back), default=0.0) + op.cost
    left = tuple(copy for copy in state.back if copy[0] not in op.reads)
    done = state.done + (i == state.done)
    after = State(
        done, state.held.union(op.writes), state.host, state.sent, _later(state.out, takes), _later(left, takes)
    )
    yield ("run", i), takes, after


def _later(copies: Copies, time: float) -> Copies:
    return tuple((v, max(0.0, left - time)) for v, left in copies)


def _path(before: dict[State, tuple[State, Act]], state: State) -> list[Act]:
    acts: list[Act] = []
    while state in before:
        state, act = before[state]
        acts.append(act)
    return acts[::-1]


def _written(problem: Problem, acts: list[Act]) -> Schedule:
    """The acts as a schedule: a value that came back and is dropped is freed by a move if it is fetched again.

    What is fetched and not read any more was not needed, and neither was what is sent and not fetched.
    """
    acts = [act for n, act in enumerate(acts) if act[0] != "fetch" or _read(problem, act[1], acts[n:])]
    fetched = {x for act, x in acts if act == "fetch"}
    steps: list[int] = []
    moves: list[Move] = []
    last: dict[int, str] = {}
    for n, (act, x) in enumerate(acts):
        if act == "run":
            last.update((v, "read") for v in problem.ops[x].reads if last.get(v) == "fetch")
            steps.append(x)
        elif x in fetched and (act in KINDS or (act == "drop" and last.get(x) == "read" and ("fetch", x) in acts[n:])):
            move = Move(KINDS.get(act, "free"), x, len(steps))
            last[x] = move.kind
            moves.append(move)
    return Schedule(tuple(steps), tuple(moves))


def _read(problem: Problem, v: int, acts: list[Act]) -> bool:
    return any(act == "run" and v in problem.ops[i].reads for act, i in acts)
