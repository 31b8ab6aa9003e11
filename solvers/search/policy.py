"""Policies: a decision for each gap between two uses of a value, and the schedule that follows by lazy recomputation.

In a gap the value is kept, or it is dropped and recomputed: when a reader needs it, or earlier, while the inputs of its
producer are still live. A recomputed value is kept for later readers, or dropped again. The policy that keeps all
values runs every op once; one that keeps only the values that cross some cuts checkpoints in segments; one that also
drops recomputed values inside the segments nests recomputation.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Sequence
from itertools import accumulate, chain

import numpy as np

from solvers.problem import Pairs, Problem
from solvers.search.arrays import Choices, Ints, Longs, Odds, Policy, Scratch, Tables

HOPS = 4  # ops that look alike to so many hops away are the same op of two repeated blocks
STRETCH = 16  # a schedule longer than this many times the ops is given up
BY_SIZE = (
    0.5  # share of moves that choose a gap by size, as large values decide the peak; the others: small ones add up
)
ODDS = Odds(block=0.2, spread=0.2, pair=0.3, drop=0.15, make=0.3, hold=0.25)


def droppable(problem: Problem) -> list[int]:
    """Forward values that a schedule may drop and recompute, in order of production.

    Values that no backward op reads are among them: where they are kept, a recomputation can start from them.
    """
    return [
        v
        for op in problem.ops[: problem.boundary]
        for v in op.writes
        if v not in problem.lasting and problem.readers[v]
    ]


def tables(problem: Problem) -> Tables:
    """A problem as arrays; the last gap of a forward value reaches to the end: a re-run may read it. O(ops + reads)."""
    end = len(problem.ops)
    uses = [
        (*readers, end) if producer < problem.boundary else readers
        for producer, readers in zip(problem.producer, problem.readers, strict=True)
    ]
    use_at, flat_uses = _flat(uses)
    read_at, reads = _flat([op.reads for op in problem.ops])
    write_at, writes = _flat([op.writes for op in problem.ops])
    pinned = np.zeros(len(problem.sizes), np.uint8)
    pinned[list(problem.pinned)] = 1
    once = _ints(end if v in problem.pinned else until for v, until in enumerate(problem.shared_until))
    return Tables(
        read_at,
        reads,
        write_at,
        writes,
        use_at,
        flat_uses,
        np.array(problem.sizes, np.int64),
        np.array([op.cost for op in problem.ops], np.float64),
        np.array([op.workspace for op in problem.ops], np.int64),
        _ints(problem.producer),
        pinned,
        once,
        _ints(v for v, ends in enumerate(uses) for _ in ends),
        _ints(i for v, ends in enumerate(uses) for i in (problem.producer[v], *ends)[:-1][: len(ends)]),
        _ints(op.region for op in problem.ops),
        _pairs(problem.waiting.forward if problem.waiting else ()),
        _pairs(problem.waiting.backward if problem.waiting else ()),
        problem.boundary if problem.waiting else -1,
        problem.waiting.until if problem.waiting else -1,
        problem.waiting.again if problem.waiting and problem.waiting.again is not None else -1,
    )


def _pairs(pairs: Pairs) -> Longs:
    return np.array(pairs, np.int64).reshape(-1, 2)


def _ints(numbers: Iterable[int]) -> Ints:
    return np.array(list(numbers), np.int32)


def _flat(lists: Sequence[Sequence[int]]) -> tuple[Ints, Ints]:
    return _ints(accumulate(map(len, lists), initial=0)), _ints(chain.from_iterable(lists))


def scratch(t: Tables) -> Scratch:
    """Working memory for `unroll` and `peak_of`."""
    ops, values, gaps = len(t.cost), len(t.size), len(t.value)
    ints = [np.full(n, -1, np.int32) for n in (ops, gaps, ops, gaps)]
    return Scratch(
        np.zeros(STRETCH * ops + 1, np.int32),
        np.zeros(values, np.uint8),
        np.zeros(values, np.int32),
        np.zeros(ops, np.uint8),
        np.zeros(values, np.uint8),
        ints[0],
        ints[1],
        ints[2],
        ints[3],
        np.full(values, -1, np.int32),
    )


def keep_only(
    problem: Problem, t: Tables, keep: Collection[int] | None = None, hold: Collection[int] | None = None
) -> Policy:
    """The policy of two sets of values.

    Args:
        problem: what to schedule.
        t: its tables.
        keep: forward values kept from the forward pass on; None for all, so that every op runs once. The others are
            dropped at the end of the forward pass, or after the first backward op if that reads them.
        hold: values that, once recomputed, are kept for their later uses; None for all.
    """
    gaps = len(t.value)
    policy = Policy(
        np.ones(gaps, np.uint8), np.ones(gaps, np.uint8), np.full(gaps, -1, np.int64), np.full(gaps, -1, np.int64)
    )
    if keep is not None:
        loose = np.zeros(len(t.size), bool)
        loose[droppable(problem)] = True
        loose[list(keep)] = False
        passing = np.zeros(len(t.size), bool)
        passing[list(hold) if hold is not None else slice(None)] = True
        backward = t.uses > problem.boundary
        again = t.start > problem.boundary
        policy.keep[loose[t.value] & backward & ~(again & passing[t.value])] = 0
        policy.hold[loose[t.value] & ~passing[t.value]] = 0
    return policy


def nest(problem: Problem, t: Tables, keep: Collection[int], hold: Collection[int], at: Sequence[int]) -> Policy:
    """The policy of segments inside segments: values outside both sets are recomputed segment by segment.

    Args:
        problem: what to schedule.
        t: its tables.
        keep: forward values kept from the forward pass on.
        hold: values that, once recomputed, are kept for their later uses.
        at: forward ops after which an inner segment ends. All its values are recomputed, and kept from there on, when
            the backward pass needs the first of them; a re-run that only passes through the segment keeps none.
    """
    policy = keep_only(problem, t, keep, hold)
    producer = np.array(problem.producer, np.int64)[t.value]
    dropped = (policy.keep == 0) & (policy.hold == 0) & (producer < problem.boundary)
    policy.keep[dropped & (t.start > problem.boundary)] = 1
    passing = np.flatnonzero(dropped & (t.start <= problem.boundary) & (t.uses < len(problem.ops)))
    segment = np.searchsorted(np.array(at, np.int64), producer[passing])
    first = np.full(len(at) + 1, len(problem.ops))
    np.minimum.at(first, segment, t.uses[passing])
    early = (first[segment] > t.start[passing]) & (first[segment] < t.uses[passing])
    early &= t.region[first[segment]] == t.region[producer[passing]]
    policy.make[passing[early]] = first[segment][early]
    return policy


def copy(policy: Policy) -> Policy:
    """A policy that can be changed without changing this one."""
    return Policy(policy.keep.copy(), policy.hold.copy(), policy.drop.copy(), policy.make.copy())


def choices(problem: Problem, t: Tables, values: Collection[int] | None = None) -> Choices:
    """The gaps that a search decides on: gaps of `values`, longer than one op. O(HOPS * reads).

    Args:
        problem: what to schedule.
        t: its tables.
        values: those that it decides on; None for those that may be dropped.
    """
    free = np.zeros(len(t.size), bool)
    free[droppable(problem) if values is None else sorted(values)] = True
    gaps = np.flatnonzero(free[t.value] & (t.uses > t.start + 1)).astype(np.int32)
    gaps = gaps[np.argsort(t.start[gaps], kind="stable")]
    looks = _looks(problem)
    number: dict[Hashable, int] = {}
    class_of = np.full(len(t.value), -1, np.int32)
    for g in gaps.tolist():
        v, end = int(t.value[g]), int(t.uses[g])
        producer = problem.producer[v]
        key = (
            looks[producer],
            problem.ops[producer].writes.index(v),
            g - int(t.use_at[v]),
            looks[end] if end < len(looks) else -1,
        )
        class_of[g] = number.setdefault(key, len(number))
    members = gaps[np.argsort(class_of[gaps], kind="stable")]
    class_at = np.searchsorted(class_of[members], np.arange(len(number) + 1)).astype(np.int32)
    place = np.zeros(len(t.value), np.int32)
    place[members] = np.arange(len(members), dtype=np.int32) - class_at[class_of[members]]
    size = t.size[t.value[gaps]] / max(1, int(t.size[t.value[gaps]].sum()))
    weight = np.cumsum(BY_SIZE * size + (1 - BY_SIZE) / max(1, len(gaps)))
    return Choices(gaps, class_at, members, class_of, place, weight, ODDS, 1)


def _looks(problem: Problem) -> list[int]:
    """For each op, its class: ops of a class look alike to HOPS hops away (Weisfeiler-Leman refinement)."""
    looks = _number((op.cost, op.workspace, tuple(problem.sizes[v] for v in op.writes)) for op in problem.ops)
    for _ in range(HOPS):
        looks = _number(
            (
                looks[i],
                tuple(looks[problem.producer[v]] for v in op.reads),
                tuple(tuple(looks[r] for r in problem.readers[v]) for v in op.writes),
            )
            for i, op in enumerate(problem.ops)
        )
    return looks


def _number(keys: Iterable[Hashable]) -> list[int]:
    known: dict[Hashable, int] = {}
    return [known.setdefault(key, len(known)) for key in keys]
