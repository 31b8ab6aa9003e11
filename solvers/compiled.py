"""What a search runs millions of times, compiled by numba: unroll a policy, measure its peak, anneal.

Why numba: on a published graph of 405 ops one evaluation (schedule, peak and cost) takes about 10 us here and 500 us in
pure Python; numpy has nothing to vectorize, since what is recomputed depends on what was recomputed before. The first
use compiles for some seconds; numba caches the result on disk.

All arrays are indexed by op, value or gap. A gap is what lies between two uses of a value, `start[g]` (its producer or
a reader) and `uses[g]` (the next reader, or the number of ops for the end); gaps are numbered as `uses` is.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Ints = NDArray[np.int32]
Longs = NDArray[np.int64]
Floats = NDArray[np.float64]


class Tables(NamedTuple):
    """A problem as arrays; lists of lists are flat, those of i at `[at[i]:at[i + 1]]`."""

    read_at: Ints
    reads: Ints
    write_at: Ints
    writes: Ints
    use_at: Ints
    uses: Ints
    size: Longs
    cost: Floats
    workspace: Longs
    producer: Ints
    pinned: Bytes
    value: Ints
    start: Ints


class Policy(NamedTuple):
    """What happens to a value in each of its gaps.

    Attributes:
        keep: 1 to hold it from the gap's start on; 0 to drop it there.
        hold: 1 to hold it to the gap's end once it was recomputed for something else; 0 to drop it again.
        drop: op after whose first run it is dropped all the same; -1 for none.
        make: op before whose first run it is recomputed and from there on held; -1 for when it is needed.
    """

    keep: Bytes
    hold: Bytes
    drop: Ints
    make: Ints


class Scratch(NamedTuple):
    """Room to work in, allocated once. `drop_*` and `make_*` are linked lists of the gaps with an event at an op."""

    steps: Ints
    held: Bytes
    next_use: Ints
    in_burst: Bytes
    wanted: Bytes
    drop_first: Ints
    drop_next: Ints
    make_first: Ints
    make_next: Ints


class Choices(NamedTuple):
    """The gaps a search may decide on.

    Attributes:
        gaps: those gaps, ascending by their start.
        class_at, members: the gaps of each class, in order: `members[class_at[c]:class_at[c + 1]]`.
        class_of: for each gap, its class; -1 where the gap is not among `gaps`.
        place: for each gap, where it stands in its class.
        weight: how often each of `gaps` is chosen, summed up to it; the last is 1.
    """

    gaps: Ints
    class_at: Ints
    members: Ints
    class_of: Ints
    place: Ints
    weight: Floats


class Goal(NamedTuple):
    """Energy = price * cost of re-runs + penalty * bytes above `budget`; the best is among peaks up to `ceiling`."""

    price: float
    penalty: float
    budget: float
    ceiling: float
    resident: int


@njit(cache=True, nogil=True)
def link(first: Ints, following: Ints, at: int, g: int) -> None:
    """Put a gap on the list of an op."""
    if at >= 0:
        following[g] = first[at]
        first[at] = g


@njit(cache=True, nogil=True)
def unlink(first: Ints, following: Ints, at: int, g: int) -> None:
    """Take a gap off the list of an op."""
    if at < 0:
        return
    if first[at] == g:
        first[at] = following[g]
        return
    h = first[at]
    while following[h] != g:
        h = following[h]
    following[h] = following[g]


@njit(cache=True, nogil=True)
def link_all(policy: Policy, s: Scratch) -> None:
    """Make the lists of a policy's events."""
    s.drop_first[:] = -1
    s.make_first[:] = -1
    for g in range(policy.keep.shape[0]):
        link(s.drop_first, s.drop_next, policy.drop[g], g)
        link(s.make_first, s.make_next, policy.make[g], g)


@njit(cache=True, nogil=True)
def unroll(t: Tables, p: Policy, s: Scratch, most: float) -> tuple[int, float]:
    """Write a policy's schedule into `s.steps`: first runs as their op i, re-runs as -1 - i.

    Every op once, in order; before each, the ops that its reads need again, in order (lazy recomputation).

    Returns:
        The number of steps, and what the re-runs cost; -1 steps where that is more than `most`.
    """
    # Local names, and no calls in the loops: what numba does to pass arrays takes longer than all the rest.
    read_at, reads, write_at, writes, use_at = t.read_at, t.reads, t.write_at, t.writes, t.use_at
    cost, producer = t.cost, t.producer
    value, keep, hold, make = t.value, p.keep, p.hold, p.make
    steps, held, next_use, in_burst = s.steps, s.held, s.next_use, s.in_burst
    drop_first, drop_next, make_first, make_next = s.drop_first, s.drop_next, s.make_first, s.make_next
    held[:] = 0
    in_burst[:] = 0
    next_use[:] = use_at[:-1]
    ops = cost.shape[0]
    last = steps.shape[0] - ops
    k, extra = 0, 0.0
    for b in range(ops):
        begin = k
        for j in range(read_at[b], read_at[b + 1]):
            v = reads[j]
            o = producer[v]
            if not held[v] and not in_burst[o] and k < last:
                in_burst[o] = 1
                steps[k] = o
                k += 1
        g = make_first[b]
        while g >= 0:
            v = value[g]
            o = producer[v]
            if not held[v] and not in_burst[o] and k < last:
                in_burst[o] = 1
                steps[k] = o
                k += 1
            g = make_next[g]
        if k > begin:
            at = begin
            while at < k:  # each needs what it reads
                o = steps[at]
                at += 1
                for j in range(read_at[o], read_at[o + 1]):
                    v = reads[j]
                    other = producer[v]
                    if not held[v] and not in_burst[other] and k < last:
                        in_burst[other] = 1
                        steps[k] = other
                        k += 1
            if k >= last:
                return -1, extra
            _sort(steps, begin, k)
            for at in range(begin, k):
                o = steps[at]
                in_burst[o] = 0
                extra += cost[o]
                steps[at] = -1 - o
                for j in range(write_at[o], write_at[o + 1]):
                    v = writes[j]
                    g = next_use[v]
                    if g < use_at[v + 1] and (hold[g] or make[g] == b):
                        held[v] = 1
            if extra > most:
                return -1, extra
        steps[k] = b
        k += 1
        for j in range(write_at[b], write_at[b + 1]):
            v = writes[j]
            if next_use[v] < use_at[v + 1]:
                held[v] = keep[next_use[v]]
        for j in range(read_at[b], read_at[b + 1]):
            v = reads[j]
            next_use[v] += 1
            held[v] = keep[next_use[v]] if next_use[v] < use_at[v + 1] else 0
        g = drop_first[b]
        while g >= 0:
            held[value[g]] = 0
            g = drop_next[g]
    return k, extra


@njit(cache=True, nogil=True)
def _sort(a: Ints, low: int, high: int) -> None:
    """Ascending, in place. What comes is nearly descending: reversed, then by insertion."""
    i, j = low, high - 1
    while i < j:
        a[i], a[j] = a[j], a[i]
        i += 1
        j -= 1
    for i in range(low + 1, high):
        x = a[i]
        j = i - 1
        while j >= low and a[j] > x:
            a[j + 1] = a[j]
            j -= 1
        a[j + 1] = x


@njit(cache=True, nogil=True)
def peak_of(t: Tables, s: Scratch, steps: int, resident: int, most: float) -> int:
    """The peak of the schedule in `s.steps`, as `simulate` counts it; -1 where it is above `most`.

    One walk backwards: what is read later is held, from its writing on.
    """
    read_at, reads, write_at, writes = t.read_at, t.reads, t.write_at, t.writes
    size, workspace, pinned, order, wanted = t.size, t.workspace, t.pinned, s.steps, s.wanted
    live = resident
    for v in range(size.shape[0]):
        wanted[v] = pinned[v]
        if pinned[v]:
            live += size[v]
    peak = live
    for at in range(steps - 1, -1, -1):
        i = order[at]
        again = i < 0
        if again:
            i = -1 - i
        own = workspace[i]
        for j in range(write_at[i], write_at[i + 1]):
            v = writes[j]
            own += size[v]
            if wanted[v] and not (again and pinned[v]):  # a pinned value's first copy is the one held
                wanted[v] = 0
                live -= size[v]
        for j in range(read_at[i], read_at[i + 1]):
            v = reads[j]
            if not wanted[v]:
                wanted[v] = 1
                live += size[v]
        if live + own > peak:
            peak = live + own
            if peak > most:
                return -1
    return peak


@njit(cache=True, nogil=True)
def random(state: NDArray[np.uint64]) -> float:
    """Uniform in [0, 1); xorshift64*, so that a search can be stopped and go on, and threads do not meet."""
    x = state[0]
    x ^= x >> np.uint64(12)
    x ^= x << np.uint64(25)
    x ^= x >> np.uint64(27)
    state[0] = x
    return float((x * np.uint64(2685821657736338717)) >> np.uint64(11)) * 2.0**-53


@njit(cache=True, nogil=True)
def below(state: NDArray[np.uint64], n: int) -> int:
    """Uniform in 0..n-1."""
    return int(random(state) * n)
