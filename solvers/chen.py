"""Segments at the narrowest cuts: Chen et al., "Training deep nets with sublinear memory cost" (2016).

The forward pass is cut into k segments; what crosses a cut is kept, the rest is recomputed a segment at a time. The
last segment is kept whole: its backward pass comes at once.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from itertools import accumulate

from .bounds import minimum_peak_bound
from .errors import InfeasibleError
from .policy import realize
from .problem import Problem
from .schedule import Schedule, every_op_once, simulate


def crossing_bytes(problem: Problem) -> list[int]:
    """For each forward op, bytes of the values that later forward ops read once it has run (pinned ones aside)."""
    change = [0] * (problem.boundary + 1)
    for v, made in enumerate(problem.producer):
        last = max((r for r in problem.readers[v] if r < problem.boundary), default=made)
        if made < problem.boundary and v not in problem.pinned:
            change[made] += problem.sizes[v]
            change[last] -= problem.sizes[v]
    return list(accumulate(change[:-1]))


def cuts(problem: Problem, segments: int) -> list[int]:
    """Forward ops after which to cut: segments of about equal bytes, each cut at the narrowest place nearby.

    A cut moves from its even place by up to a third of a segment, to where least crosses.
    """
    crossing = crossing_bytes(problem)
    total = list(accumulate(sum(problem.sizes[v] for v in op.writes) for op in problem.ops[: problem.boundary]))
    found: list[int] = []
    if not total or not total[-1]:
        return found
    for k in range(1, segments):
        target = total[-1] * k / segments
        reach = total[-1] / segments / 3
        low, high = bisect_left(total, target - reach), bisect_right(total, target + reach)
        if low < high:
            best = min(range(low, high), key=lambda i: (crossing[i], abs(total[i] - target)))
            if best not in found:
                found.append(best)
    return sorted(found)


def keep_across(problem: Problem, at: list[int], *, last: bool = True) -> list[int]:
    """The values that cross a cut, and with `last` all of the last segment, whose backward pass comes at once."""
    begin = at[-1] if at else -1
    keep = []
    for v, made in enumerate(problem.producer):
        if made >= problem.boundary:
            continue
        until = max((r for r in problem.readers[v] if r < problem.boundary), default=made)
        cut = bisect_left(at, made)
        if (last and made > begin) or (cut < len(at) and at[cut] < until):
            keep.append(v)
    return keep


def candidates(problem: Problem) -> list[int]:
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
    for k in candidates(problem):
        if problem.budget is not None and lowest <= problem.budget:
            return best
        schedule = realize(problem, keep_across(problem, cuts(problem, k)))
        if (peak := simulate(problem, schedule).peak) < lowest:
            best, lowest = schedule, peak
    if problem.budget is not None and lowest > problem.budget:
        raise InfeasibleError(problem.budget, lowest, minimum_peak_bound(problem))
    return best
