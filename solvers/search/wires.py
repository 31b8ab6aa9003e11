"""The link's data as arrays, and the working memory of the kernels that lay out moves; see `layout`.

As in `arrays`, compiled functions address the fields by position.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from solvers.problem import Problem
from solvers.search.arrays import Bytes, Floats, Ints, Longs, Tables
from solvers.search.policy import droppable

AWAY = 2  # in `Policy.keep`: the value is kept in the gap, but on the host, up to its next read


class Wires(NamedTuple):
    """What moves take.

    Attributes:
        movable: for each value, 1 where it may leave and is large enough to be worth it.
        lasting: for each value, 1 where it is never recomputed.
        out, back: for each value, how long its copy takes in each direction.
        out_shared, back_shared: the same while the other direction runs.
        host: bytes that the host has room for.
    """

    movable: Bytes
    lasting: Bytes
    out: Floats
    back: Floats
    out_shared: Floats
    back_shared: Floats
    host: int


class Yard(NamedTuple):
    """Working memory for a layout: per step or position before a step, per stay on the host, per value.

    Attributes:
        held: for each step, bytes on the device with stays as long as they can be; then what stays may still take.
        change: for each step, by how much stays change the bytes held from it on.
        clock: for each step, the cost of the steps before it.
        first: for each position, the op that runs for the first time next.
        value: for each stay its value, or -1 where the host has no room for it.
        left, needed: the last step before the stay that uses the value, and the first one after it.
        send, free, fetch: the positions of its moves; `send` is that of the copy that leaves first.
        done: when the copy that is on its way ends.
        at_send, at_free, at_fetch, at_read: for each position a list of stays, by `next_...`.
        waiting: stays whose value is to be freed once its copy is out.
        next_read, gap, newest, last: for each value: the next read, the next gap, the first stay, the last stay's end.
        used: the number of stays; the number of those that wait.
    """

    held: Longs
    change: Longs
    clock: Floats
    done: Floats
    first: Ints
    at_send: Ints
    at_free: Ints
    at_fetch: Ints
    at_read: Ints
    value: Ints
    left: Ints
    needed: Ints
    send: Ints
    free: Ints
    fetch: Ints
    next_send: Ints
    next_free: Ints
    next_fetch: Ints
    next_read_at: Ints
    waiting: Ints
    next_read: Ints
    gap: Ints
    newest: Ints
    last: Ints
    used: Ints


class Line(NamedTuple):
    """What a walk needs to lay out moves."""

    wires: Wires
    yard: Yard


def wires(problem: Problem) -> Wires:
    """The link of a problem that has one."""
    link = problem.link
    assert link is not None
    size = np.array(problem.sizes, np.float64)
    movable = np.zeros(len(size), np.uint8)
    movable[[v for v in problem.movable if problem.sizes[v] >= link.least]] = 1
    lasting = np.ones(len(size), np.uint8)
    lasting[droppable(problem)] = 0
    out, back, out_shared, back_shared = (
        link.latency + size / (rate * share) for share in (1.0, link.both) for rate in (link.out, link.back)
    )
    return Wires(movable, lasting, out, back, out_shared, back_shared, 2**62 if link.host is None else link.host)


def yard(t: Tables, longest: int) -> Yard:
    """Working memory for schedules of up to so many steps."""
    gaps, values, places = len(t.value), len(t.size), longest + 2

    def ints(n: int, count: int) -> list[Ints]:
        return [np.full(n, -1, np.int32) for _ in range(count)]

    longs = [np.zeros(places, np.int64) for _ in range(2)]
    floats = [np.zeros(n, np.float64) for n in (places, gaps)]
    return Yard._make(
        (
            *longs,
            *floats,
            *ints(places, 5),
            *ints(gaps, 11),
            *ints(values, 4),
            np.zeros(2, np.int32),
        )
    )
