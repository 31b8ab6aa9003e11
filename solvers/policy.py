"""Policies: what to do with each value between its uses, and the schedule that follows by lazy recomputation.

A gap is what lies between two uses of a value, or between its last use and the end. In it the value is kept, or dropped
and made again: when it is next needed, or ahead of its need, while what that takes is still held; once made again it is
held or dropped again. With all values kept that is every op once; kept at cuts only, it is checkpointing in segments;
held inside segments or not, nested recomputation.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Sequence
from itertools import accumulate, chain

import numpy as np

from solvers.arrays import Ints, Longs
from solvers.compiled import Choices, Policy, Scratch, Tables, link_all, unroll
from solvers.problem import Pairs, Problem
from solvers.schedule import Schedule

HOPS = 4  # how far two gaps must look alike to be the same gap of two repeated blocks
STRETCH = 16  # a schedule longer than this many times the ops is given up


def droppable(problem: Problem) -> list[int]:
    """Forward values that a schedule may drop and make again, in order of production.

    Also those that no backward op reads: kept, they are where a recomputation can start.
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
        (*found, end) if made < problem.boundary else found
        for made, found in zip(problem.producer, problem.readers, strict=True)
    ]
    use_at, flat_uses = _flat(uses)
    read_at, reads = _flat([op.reads for op in problem.ops])
    write_at, writes = _flat([op.writes for op in problem.ops])
    pinned = np.zeros(len(problem.sizes), np.uint8)
    pinned[list(problem.pinned)] = 1
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
        _ints(v for v, found in enumerate(uses) for _ in found),
        _ints(i for v, found in enumerate(uses) for i in (problem.producer[v], *found)[:-1][: len(found)]),
        _ints(op.region for op in problem.ops),
        _pairs(problem.waiting.forward if problem.waiting else ()),
        _pairs(problem.waiting.backward if problem.waiting else ()),
        problem.boundary if problem.waiting else -1,
        problem.waiting.until if problem.waiting else -1,
    )


def _pairs(pairs: Pairs) -> Longs:
    return np.array(pairs, np.int64).reshape(-1, 2)


def _ints(numbers: Iterable[int]) -> Ints:
    return np.array(list(numbers), np.int32)


def _flat(lists: Sequence[Sequence[int]]) -> tuple[Ints, Ints]:
    return _ints(accumulate(map(len, lists), initial=0)), _ints(chain.from_iterable(lists))


def scratch(t: Tables) -> Scratch:
    """Room for `unroll` and `peak_of` to work in."""
    ops, values, gaps = len(t.cost), len(t.size), len(t.value)
    ints = [np.full(n, -1, np.int32) for n in (ops, gaps, ops, gaps)]
    return Scratch(
        np.zeros(STRETCH * ops + 1, np.int32),
        np.zeros(values, np.uint8),
        np.zeros(values, np.int32),
        np.zeros(ops, np.uint8),
        np.zeros(values, np.uint8),
        *ints,
    )


def keep_only(
    problem: Problem, t: Tables, keep: Collection[int] | None = None, hold: Collection[int] | None = None
) -> Policy:
    """The policy of two sets of values.

    Args:
        problem: what to schedule.
        t: its tables.
        keep: forward values held from the forward pass on; None for all, so that every op runs once. The others are
            dropped at the end of the forward pass, or after the first backward op if that reads them.
        hold: values held, once recomputed, for their later uses; None for all.
    """
    gaps = len(t.value)
    policy = Policy(
        np.ones(gaps, np.uint8), np.ones(gaps, np.uint8), np.full(gaps, -1, np.int32), np.full(gaps, -1, np.int32)
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
    """The policy of segments inside segments: what is neither kept nor held is made segment by segment.

    Args:
        problem: what to schedule.
        t: its tables.
        keep: forward values held from the forward pass on.
        hold: values held, once recomputed, for their later uses.
        at: forward ops after which an inner segment ends. Its values are made, and from there on held, when the first
            of them is needed in the backward pass; a re-run that only passes through holds none of them.
    """
    policy = keep_only(problem, t, keep, hold)
    made = np.array(problem.producer, np.int64)[t.value]
    dropped = (policy.keep == 0) & (policy.hold == 0) & (made < problem.boundary)
    policy.keep[dropped & (t.start > problem.boundary)] = 1
    passing = np.flatnonzero(dropped & (t.start <= problem.boundary) & (t.uses < len(problem.ops)))
    segment = np.searchsorted(np.array(at, np.int64), made[passing])
    first = np.full(len(at) + 1, len(problem.ops))
    np.minimum.at(first, segment, t.uses[passing])
    early = (first[segment] > t.start[passing]) & (first[segment] < t.uses[passing])
    early &= t.region[first[segment]] == t.region[made[passing]]
    policy.make[passing[early]] = first[segment][early]
    return policy


def copy(policy: Policy) -> Policy:
    """A policy that can be changed without changing this one."""
    return Policy(policy.keep.copy(), policy.hold.copy(), policy.drop.copy(), policy.make.copy())


def realize(t: Tables, policy: Policy, s: Scratch) -> Schedule | None:
    """The schedule of a policy; None where it would be far longer than any that is worth it. O(steps * reads)."""
    link_all(policy, s)
    steps, _ = unroll(t, policy, s, np.inf)
    found = s.steps[:steps]
    return Schedule(tuple(np.where(found < 0, -1 - found, found).tolist())) if steps >= 0 else None


def choices(problem: Problem, t: Tables) -> Choices:
    """The gaps that a search decides on: those of droppable values in which something else happens. O(HOPS * reads)."""
    free = np.zeros(len(t.size), bool)
    free[droppable(problem)] = True
    gaps = np.flatnonzero(free[t.value] & (t.uses > t.start + 1)).astype(np.int32)
    gaps = gaps[np.argsort(t.start[gaps], kind="stable")]
    looks = _looks(problem)
    number: dict[Hashable, int] = {}
    class_of = np.full(len(t.value), -1, np.int32)
    for g in gaps.tolist():
        v, end = int(t.value[g]), int(t.uses[g])
        made = problem.producer[v]
        key = (
            looks[made],
            problem.ops[made].writes.index(v),
            g - int(t.use_at[v]),
            looks[end] if end < len(looks) else -1,
        )
        class_of[g] = number.setdefault(key, len(number))
    members = gaps[np.argsort(class_of[gaps], kind="stable")]
    class_at = np.searchsorted(class_of[members], np.arange(len(number) + 1)).astype(np.int32)
    place = np.zeros(len(t.value), np.int32)
    place[members] = np.arange(len(members), dtype=np.int32) - class_at[class_of[members]]
    # by size: what is large decides; half of all choices by number: small values add up
    size = t.size[t.value[gaps]] / max(1, int(t.size[t.value[gaps]].sum()))
    weight = np.cumsum(0.5 * size + 0.5 / max(1, len(gaps)))
    return Choices(gaps, class_at, members, class_of, place, weight)


def _looks(problem: Problem) -> list[int]:
    """For each op, a number that ops share which look alike to HOPS hops away: Weisfeiler and Leman's refinement."""
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
