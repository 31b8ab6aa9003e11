"""A proven lower bound on the peak of any schedule."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from functools import cache
from itertools import accumulate

from solvers.problem import Problem

LOOKS = 32  # states that are expanded for each op
ALL_LOOKS = 40_000  # and for all ops


def minimum_peak_bound(problem: Problem) -> int:
    """A lower bound on the peak of any schedule, in bytes. O(ops * LOOKS * reads), at most ALL_LOOKS states.

    While an op runs for the first time, its reads, its writes, its workspace, every pinned value written so far and
    every value that cannot be recomputed and is still to be read are allocated. And its reads were written before: the
    last of them was written while the others were live, by an op that had its own reads, and so on backwards. Of all
    these histories, the one of the lowest peak is sought best first, as in pebbling; where the search ends early, the
    peak of the best history left is still a lower bound.
    Values that may leave over a link need not be there before they are read.
    """
    history = _Histories(problem)
    order = sorted(range(len(problem.ops)), key=lambda i: -history.first_run(i))
    peak = max((history.first_run(i) for i in order), default=problem.resident)
    looks = ALL_LOOKS
    for i in order:
        peak, used = history.lowest(i, peak, min(LOOKS, looks))
        looks -= used
    return peak


def first_runs_bound(problem: Problem) -> int:
    """The same from first runs alone, without what came before them: a lower bound, sooner. O(ops + reads)."""
    history = _Histories(problem)
    return max((history.first_run(i) for i in range(len(problem.ops))), default=problem.resident)


class _Histories:
    """The histories that may lead to the first run of an op, backwards in time."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.last = [max(readers, default=-1) for readers in problem.readers]
        self.stuck = {
            v for v, i in enumerate(problem.producer) if v not in problem.pinned and not problem.ops[i].recomputable
        }
        movable = problem.movable if problem.link is not None else frozenset[int]()
        self.stuck -= movable
        self.anywhere = problem.pinned | movable  # what a history need not write last
        pinned = [sum(problem.sizes[v] for v in op.writes if v in problem.pinned) for op in problem.ops]
        self.pinned = list(accumulate(pinned, initial=0))  # bytes pinned by the ops before this one
        self.kept = cache(self._kept)
        waiting, least = problem.waiting, problem.least_kept
        self.waiting = min(waiting.bytes_in(p, least) for p in (waiting.forward, waiting.backward)) if waiting else 0
        self.none_waits = waiting.until if waiting else 0  # from this op on

    def _kept(self, after: int, until: int) -> int:
        producer, sizes = self.problem.producer, self.problem.sizes
        return sum(sizes[v] for v in self.stuck if producer[v] <= after and self.last[v] >= until)

    def allocated(self, i: int, beside: Iterable[int], after: int, until: int) -> int:
        """Least bytes while op i runs, other values live beside it, between the first runs of `after` and `until`."""
        problem, producer = self.problem, self.problem.producer
        op = problem.ops[i]
        values = {*op.reads, *op.writes, *beside}
        sure = (
            v
            for v in values
            if producer[v] <= after and (v in problem.pinned or (v in self.stuck and self.last[v] >= until))
        )
        more = values.difference(sure)
        fixed = problem.resident + op.workspace + self.pinned[after + 1] + self.kept(after, until)
        fixed += self.waiting if until < self.none_waits else 0
        return fixed + sum(problem.sizes[v] for v in more)

    def first_run(self, i: int) -> int:
        return self.allocated(i, (), i - 1, i)

    def lowest(self, op: int, floor: int, looks: int) -> tuple[int, int]:
        """A lower bound on the peak up to the first run of an op, at least `floor`, and the states looked at.

        A state is a set of values that are live together, at a time before the first run of some op. One of them was
        written last: its producer ran while the others were live, for the first time (if it is the latest producer of
        them all) or again.
        """
        ops, producer, anywhere = self.problem.ops, self.problem.producer, self.anywhere
        start = (frozenset(ops[op].reads) - anywhere, op)
        best = {start: max(floor, self.first_run(op))}
        heap = [(best[start], 0, 0, start)]
        count = used = 0
        while heap:
            peak, _, _, state = heapq.heappop(heap)
            values, until = state
            if not values or used >= looks:
                return peak, used
            if peak > best[state]:
                continue
            used += 1
            newest = max(producer[v] for v in values)
            for i in sorted({producer[v] for v in values}):
                before = values.difference(ops[i].writes).union(ops[i].reads) - anywhere
                times = [(newest - 1, newest)] if i == newest else []
                if ops[i].recomputable and newest < until:
                    times.append((newest, until))
                for after, by in times:
                    now = max(peak, self.allocated(i, values, after, by))
                    if now < best.get((before, by), now + 1):
                        best[before, by] = now
                        count += 1
                        heapq.heappush(heap, (now, len(before), count, (before, by)))
        return floor, used
