"""A simulation of PyTorch's caching allocator: the bytes that a step reserves on a GPU, with fragmentation.

The algorithm is that of c10/cuda/CUDACachingAllocator.cpp and c10/core/AllocatorConfig.h in torch 2.13, for one stream
and under the default configuration: no expandable segments, no rounding to powers of two, no limit on splitting.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from math import ceil

from solvers import Problem, Schedule, Timeline, simulate
from solvers.moves import events as in_order

FREE = -1  # in the place of bytes
BLOCK = 512  # sizes are multiples of it
SMALL = 2**20  # the largest request that the small pool serves, and the largest rest that the large pool gives away
SMALL_SEGMENT = 2 * 2**20
LARGE_SEGMENT = 20 * 2**20  # shared by requests of less than OWN_SEGMENT
OWN_SEGMENT = 10 * 2**20
SEGMENT = 2 * 2**20  # larger segments are multiples of it
NAMED = 1e-3  # by how much of it a limit grows, at most, that is rounded up to four digits

Event = tuple[int, int]  # (bytes, key): allocate, (FREE, key): free; a key may come again once it is free


@dataclass(frozen=True, slots=True)
class Reserved:
    """Peaks of a replay, up to where it ran out of memory, if it did.

    Attributes:
        requested_peak: the most bytes asked for at once, each request rounded up to 512 bytes.
        allocated_peak: the most bytes handed out, as `torch.cuda.max_memory_allocated` counts them: a block may be
            up to 1 MiB larger than the request.
        reserved_peak: the most bytes in segments, as `torch.cuda.max_memory_reserved` counts them.
        retries: how often it gave back all empty segments to get a new one, which stops the GPU for a moment.
        out_of_memory: whether a request could not be served within the limit.
    """

    requested_peak: int
    allocated_peak: int
    reserved_peak: int
    retries: int
    out_of_memory: bool


def reserved(events: Iterable[Event], limit: int | None = None) -> Reserved:
    """Replay allocations and frees. O(log n) comparisons an event, n the number of free blocks.

    Args:
        events: in order; requests of 0 bytes take nothing.
        limit: bytes that the segments may take together; None for no limit.

    Examples:
        >>> MiB = 2**20
        >>> peaks = reserved([(6 * MiB, 0), (6 * MiB, 1), (FREE, 0), (13 * MiB, 2)])
        >>> peaks.requested_peak // MiB, peaks.reserved_peak // MiB
        (19, 34)
    """
    cache = _Cache(limit)
    blocks: dict[int, tuple[int, int, int]] = {}
    requested = allocated = requested_peak = allocated_peak = 0
    failed = False
    for nbytes, key in events:
        if nbytes == FREE:
            size, start, block = blocks.pop(key)
            requested -= size
            allocated -= block
            cache.give(start, block)
            continue
        size = -(-nbytes // BLOCK) * BLOCK
        taken = cache.take(size) if size else (0, 0)
        if taken is None:
            failed = True
            break
        blocks[key] = size, *taken
        requested += size
        allocated += taken[1]
        requested_peak = max(requested_peak, requested)
        allocated_peak = max(allocated_peak, allocated)
    return Reserved(requested_peak, allocated_peak, cache.peak, cache.retries, failed)


@dataclass(frozen=True, slots=True)
class Placed:
    """Where allocations go.

    Attributes:
        starts: for each key, where its block begins; addresses count from 0.
        sizes: for each key, the bytes of its block.
        segments: (event before which it is made, (where it begins, its bytes)) of each segment.
    """

    starts: dict[int, int]
    sizes: dict[int, int]
    segments: list[tuple[int, tuple[int, int]]]


def place(events: Iterable[Event]) -> Placed:
    """Replay allocations and frees without a limit; keys that come once. O(log n) comparisons an event."""
    cache = _Cache(None)
    placed = Placed({}, {}, [])
    for at, (nbytes, key) in enumerate(events):
        if nbytes == FREE:
            cache.give(placed.starts[key], placed.sizes[key])
            continue
        before = cache.top
        placed.starts[key], placed.sizes[key] = cache.take(-(-nbytes // BLOCK) * BLOCK) or (0, 0) if nbytes else (0, 0)
        if cache.top > before:
            placed.segments.append((at, (before, cache.segments[before])))
    return placed


def smallest_limit(events: Sequence[Event], above: int = 0) -> int:
    """The bytes that segments need, by bisection in steps of 2 MiB: with these it does not run out, with less it does.

    The allocator's luck is no monotonic function of the limit; there may be smaller limits with which it gets by.

    Args:
        events: as for `reserved`.
        above: a limit that is known not to suffice.
    """
    free = reserved(events)
    low = max((free.requested_peak - 1) // SEGMENT, above // SEGMENT)  # too little
    high = free.reserved_peak // SEGMENT
    while high - low > 1:
        middle = (low + high) // 2
        if reserved(events, middle * SEGMENT).out_of_memory:
            low = middle
        else:
            high = middle
    return high * SEGMENT


def lasting_limit(events: Sequence[Event], above: int = 0) -> int:
    """A limit above one that does not suffice, from which on the next `NAMED` of it suffice, too: as for
    `smallest_limit`, for who names it in four digits.
    """
    least = smallest_limit(events, above)
    while True:
        limits = range(least, least + ceil(NAMED * least) + SEGMENT, SEGMENT)
        failing = [limit for limit in limits if reserved(events, limit).out_of_memory]
        if not failing:
            return least
        least = failing[-1] + SEGMENT


def events_of(
    problem: Problem,
    schedule: Schedule,
    resident: Sequence[int],
    *,
    state: Sequence[int] = (),
    workspaces: Mapping[int, Sequence[int]] | None = None,
    steps: int = 2,
    timeline: Timeline | None = None,
) -> list[Event]:
    """What training steps in a row allocate and free; the second begins with the segments that the first has left.

    An op allocates its outputs, then its workspace; what it was the last to read is freed when it ends. What is still
    held at the end of a step (gradients, outputs) is freed before the next.

    Args:
        problem: one training step.
        schedule: the ops that it runs.
        resident: bytes of each tensor that is there before the first step (parameters, buffers, the batch).
        state: the same for what comes just before the last op of the first step, as an optimizer's state does.
        workspaces: for ops whose workspace is not one allocation, the bytes of each.
        steps: how many.
        timeline: that of the schedule, where it is known already.
    """
    frees = (timeline or simulate(problem, schedule)).frees
    keys = count()
    events = [(nbytes, next(keys)) for nbytes in resident]
    last = len(schedule.steps) - 1
    for step in range(steps):
        held: dict[int, int] = {}
        for at, move in in_order(schedule.steps, schedule.moves):
            if move is not None:
                if move.kind == "fetch":
                    held[move.value] = next(keys)
                    events.append((problem.sizes[move.value], held[move.value]))
                elif move.kind == "free":
                    events.append((FREE, held.pop(move.value)))
                continue
            i = schedule.steps[at]
            if step == 0 and at == last:
                events += [(nbytes, next(keys)) for nbytes in state]
            op = problem.ops[i]
            made = [(problem.sizes[v], next(keys)) for v in op.writes]
            pieces = (workspaces or {}).get(i, (op.workspace,) if op.workspace else ())
            work = [(nbytes, next(keys)) for nbytes in pieces]
            events += made
            events += work
            events += [(FREE, key) for _, key in work]
            for v, (_, key) in zip(op.writes, made, strict=True):
                if v in held:  # the copy that is there stays
                    events.append((FREE, key))
                else:
                    held[v] = key
            events += [(FREE, held.pop(v)) for v in frees[at]]
        events += [(FREE, key) for key in held.values()]
    return events


class _Cache:
    """Segments, and the free blocks in them. Addresses are integers; there is a gap after each segment."""

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self.small: list[tuple[int, int]] = []  # free blocks: (bytes, start), ascending
        self.large: list[tuple[int, int]] = []
        self.size_at: dict[int, int] = {}  # of free blocks, by where they start
        self.start_of: dict[int, int] = {}  # the same by where they end
        self.segments: dict[int, int] = {}  # start -> bytes
        self.reserved = self.peak = self.retries = self.top = 0

    def take(self, size: int) -> tuple[int, int] | None:
        """The smallest free block that is large enough, or a new one; returns start and bytes, None for no memory."""
        free = self.small if size <= SMALL else self.large
        at = bisect_left(free, (size, 0))
        if at < len(free):
            block, start = free[at]
            self._remove(free, start, block)
        else:
            block = _segment_bytes(size)
            if not self._fits(block):
                self._release()
                if not self._fits(block):
                    return None
            start, self.top = self.top, self.top + block + BLOCK
            self.segments[start] = block
            self.reserved += block
            self.peak = max(self.peak, self.reserved)
        rest = block - size
        if rest > SMALL or (rest and size <= SMALL):
            self._add(free, start + size, rest)
            return start, size
        return start, block

    def give(self, start: int, size: int) -> None:
        """Take a block back, and join it with the free blocks on both sides of it."""
        if not size:
            return
        free = self.small if size <= SMALL else self.large
        after = self.size_at.get(start + size)
        if after is not None:
            self._remove(free, start + size, after)
            size += after
        before = self.start_of.get(start)
        if before is not None:
            size += start - before
            self._remove(free, before, start - before)
            start = before
        self._add(free, start, size)

    def _fits(self, segment: int) -> bool:
        return self.limit is None or self.reserved + segment <= self.limit

    def _release(self) -> None:
        """Give back every segment that is one free block."""
        self.retries += 1
        for free in (self.small, self.large):
            for size, start in free.copy():
                if self.segments.get(start) == size:
                    self._remove(free, start, size)
                    del self.segments[start]
                    self.reserved -= size

    def _add(self, free: list[tuple[int, int]], start: int, size: int) -> None:
        insort(free, (size, start))
        self.size_at[start] = size
        self.start_of[start + size] = start

    def _remove(self, free: list[tuple[int, int]], start: int, size: int) -> None:
        del free[bisect_left(free, (size, start))]
        del self.size_at[start], self.start_of[start + size]


def _segment_bytes(size: int) -> int:
    if size <= SMALL:
        return SMALL_SEGMENT
    return LARGE_SEGMENT if size < OWN_SEGMENT else -(-size // SEGMENT) * SEGMENT
