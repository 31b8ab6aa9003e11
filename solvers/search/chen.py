"""Segments at the narrowest cuts: Chen et al., "Training deep nets with sublinear memory cost" (2016).

The forward pass is cut into k segments; values that cross a cut are kept, all others are recomputed a segment at a
time. The last segment is kept whole: its backward pass comes at once.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from solvers.bounds.peak import minimum_peak_bound
from solvers.problem import Problem
from solvers.schedule import InfeasibleError, Schedule, every_op_once, simulate
from solvers.search.evaluation import Evaluator
from solvers.search.policy import keep_only

Integers = NDArray[np.int64]


def crossing_bytes(problem: Problem) -> Integers:
    """For each forward op, bytes of the values that later forward ops read once it has run (pinned ones aside)."""
    values, producers, last = _lifetimes(problem)
    sizes = np.array([0 if v in problem.pinned else problem.sizes[v] for v in values], dtype=np.int64)
    change = np.zeros(problem.boundary + 1, dtype=np.int64)
    np.add.at(change, producers, sizes)
    np.subtract.at(change, last, sizes)
    return np.cumsum(change[:-1])


def _lifetimes(problem: Problem) -> tuple[list[int], Integers, Integers]:
    """The forward values; for each its producer, and the last forward op that reads it."""
    values = [v for v, i in enumerate(problem.producer) if i < problem.boundary]
    producers = [problem.producer[v] for v in values]
    last = [
        max((r for r in problem.readers[v] if r < problem.boundary), default=i)
        for v, i in zip(values, producers, strict=True)
    ]
    return values, np.array(producers, dtype=np.int64), np.array(last, dtype=np.int64)


def cuts(problem: Problem, segments: int) -> list[int]:
    """Forward ops after which to cut: segments of about equal bytes, each cut at the narrowest place nearby.

    A cut moves from its even place by up to a third of a segment, to where least crosses.
    """
    forward = problem.ops[: problem.boundary]
    total = np.cumsum([sum(problem.sizes[v] for v in op.writes) for op in forward], dtype=np.int64)
    if not len(total) or not total[-1]:
        return []
    crossing = crossing_bytes(problem)
    reach = total[-1] / segments / 3
    places: set[int] = set()
    for target in total[-1] * np.arange(1, segments) / segments:
        low, high = np.searchsorted(total, (target - reach, np.nextafter(target + reach, np.inf)))
        if low < high:
            near = slice(low, high)
            places.add(int(low + np.lexsort((abs(total[near] - target), crossing[near]))[0]))
    return sorted(places)


def keep_across(problem: Problem, at: list[int], *, last: bool = True) -> list[int]:
    """The values that cross a cut, and with `last` all of the last segment, whose backward pass comes at once."""
    values, producers, until = _lifetimes(problem)
    following = np.searchsorted(at, producers)  # the first cut at or after a value's producer
    crosses = np.append(np.array(at, dtype=np.int64), len(problem.ops))[following] < until
    whole = producers > (at[-1] if at else -1) if last else np.zeros(len(values), dtype=bool)
    return [v for v, kept in zip(values, crosses | whole, strict=True) if kept]


def segment_counts(problem: Problem) -> list[int]:
    """Numbers of segments worth trying: all small ones, then ever sparser up to 4 sqrt(L)."""
    most = max(2, 4 * math.isqrt(problem.boundary))
    counts, k = [], 2
    while k <= min(most, problem.boundary):
        counts.append(k)
        k = max(k + 1, int(k * 1.1))
    return counts


def chen(problem: Problem) -> Schedule:
    """The fewest segments that fit the budget; with no budget, the number of segments of the lowest peak.

    O(sqrt(L)) simulations of the whole schedule, for L forward ops.

    Raises:
        InfeasibleError: no number of segments fits; its `minimum` is the lowest peak among them.
    """
    best, lowest = every_op_once(problem), simulate(problem, every_op_once(problem)).peak
    evaluator = Evaluator(problem)
    for k in segment_counts(problem):
        if problem.budget is not None and lowest <= problem.budget:
            return best
        keep = keep_across(problem, cuts(problem, k))
        schedule = evaluator.schedule(keep_only(problem, evaluator.tables, keep))
        if schedule is not None and (peak := simulate(problem, schedule).peak) < lowest:
            best, lowest = schedule, peak
    if problem.budget is not None and lowest > problem.budget:
        raise InfeasibleError(problem.budget, lowest, minimum_peak_bound(problem), best)
    return best
