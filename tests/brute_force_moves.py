"""The least time of a small problem with a link, tick by tick: sharing nothing with the solvers, as `brute_force`.

Costs and times of copies are whole numbers of ticks. Between two ticks, any number of things may be done that take no
time: a value is dropped, queued to be sent or to come back, freed once its copy is out, forgotten by the host. In a
tick, each direction goes on with the first copy of its queue, and the device runs an op or waits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from solvers.problem import Problem

from .naive import to_others

Queue = tuple[tuple[int, int], ...]  # values, and ticks that the copy of each one takes still


class State(NamedTuple):
    done: int
    running: int  # ticks that the op takes still
    held: frozenset[int]
    unread: frozenset[int]  # that came back, or will, and were not read since
    host: frozenset[int]
    sent: frozenset[int]
    stuck: frozenset[int]  # sent and not freed yet
    out: Queue
    back: Queue


def least_time(problem: Problem) -> int | None:
    """The least ticks of any schedule within the budget; None where none fits."""
    none: frozenset[int] = frozenset()
    layer = {State(0, 0, none, none, none, none, none, (), ())}
    seen: set[State] = set()
    ticks = 0
    while layer:
        todo = list(layer)
        layer = set()
        while todo:
            state = todo.pop()
            if state in seen:
                continue
            seen.add(state)
            if state.done == len(problem.ops) and not state.running:
                return ticks
            if not state.running:
                todo += _at_once(problem, state)
            if state.running or state.out or state.back:
                now = max(0, state.running - 1)
                layer.add(state._replace(running=now, out=_ticked(state.out), back=_ticked(state.back)))
        ticks += 1
    return None


def _ticked(queue: Queue) -> Queue:
    if not queue:
        return queue
    (v, left), *rest = queue
    return ((v, left - 1), *rest) if left > 1 else tuple(rest)


def _at_once(problem: Problem, s: State) -> Iterator[State]:
    link, sizes = problem.link, problem.sizes
    assert link is not None
    assert problem.budget is not None
    bytes_held = problem.resident + sum(sizes[v] for v in s.held)
    room = sum(sizes) if link.host is None else link.host
    coming = {v for v, _ in s.back}
    for v in s.held - problem.pinned - s.unread - s.stuck:
        yield s._replace(held=s.held - {v})
    for v in s.stuck - {v for v, _ in s.out}:
        yield s._replace(held=s.held - {v}, stuck=s.stuck - {v})
    for v in s.host - s.stuck - s.unread if link.host is not None else ():
        yield s._replace(host=s.host - {v})
    for v in problem.movable:
        if v in s.held and v not in s.sent | s.unread and sum(sizes[u] for u in s.host | {v}) <= room:
            takes = int(link.latency + sizes[v] / link.out)
            out = (*s.out, (v, takes)) if takes else s.out
            yield s._replace(host=s.host | {v}, sent=s.sent | {v}, stuck=s.stuck | {v}, out=out)
        if v in s.host - s.held - s.stuck and bytes_held + sizes[v] <= problem.budget:
            takes = int(link.latency + sizes[v] / link.back)
            back = (*s.back, (v, takes)) if takes else s.back
            yield s._replace(held=s.held | {v}, unread=s.unread | {v}, back=back)
    for i in range(min(s.done + 1, len(problem.ops))):
        op = problem.ops[i]
        again = i < s.done
        if again and (s.done == len(problem.ops) or not op.recomputable or op.region != problem.ops[s.done].region):
            continue
        if not s.held.issuperset(op.reads) or coming.intersection(op.reads):
            continue
        others = {v for v in op.writes if again and to_others(problem, v, s.done)}
        if any(v in s.held and v not in problem.pinned | others for v in op.writes):
            continue
        if bytes_held + op.workspace + sum(sizes[v] for v in op.writes) > problem.budget:
            continue
        if not again and i == len(problem.ops) - 1 and s.stuck:
            continue  # what is sent is freed before the last step
        held = s.held | set(op.writes) - others
        yield s._replace(done=s.done + (not again), running=int(op.cost), held=held, unread=s.unread - set(op.reads))
