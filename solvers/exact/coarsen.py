"""Contract a large problem into a small one of the same shape, and bring a schedule of the small one back.

Contiguous ops become one super-op, cut where few bytes cross. Values that cross a cut with the same producer and the
same readers become one coarse value. A super-op's workspace is the peak of its inner values. The coarse problem
overestimates memory and cost (a super-op runs again as a whole, and all its reads stay live to its end), so that the
expanded schedule is then trimmed: the exact simulator says which re-runs can be left out.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from solvers.problem import Op, Problem
from solvers.schedule import Schedule, simulate


@dataclass(frozen=True, slots=True)
class Coarse:
    """A coarse problem over a fine one: coarse op g stands for `fine.ops[starts[g]:starts[g + 1]]`."""

    fine: Problem
    problem: Problem
    starts: tuple[int, ...]


def coarsen(problem: Problem, forward: int, backward: int) -> Coarse:
    """Contract to about `forward` and `backward` super-ops of each pass. O(ops * groups + reads)."""
    starts = _starts(problem, forward, backward)
    group_of = [g for g, (a, b) in enumerate(pairwise(starts)) for _ in range(a, b)]
    merged: dict[tuple[int, tuple[int, ...], bool], int] = {}
    coarse_of: dict[int, int] = {}
    sizes: list[int] = []
    for v, producer in enumerate(problem.producer):
        g = group_of[producer]
        outside = tuple(sorted({group_of[r] for r in problem.readers[v]} - {g}))
        if outside or v in problem.pinned:
            key = (g, outside, v in problem.pinned)
            if key not in merged:
                merged[key] = len(sizes)
                sizes.append(0)
            coarse_of[v] = merged[key]
            sizes[merged[key]] += problem.sizes[v]
    ops = []
    for g, (a, b) in enumerate(pairwise(starts)):
        inside = problem.ops[a:b]
        outer = {v for op in inside for v in op.reads if group_of[problem.producer[v]] != g}
        reads = tuple(sorted({coarse_of[v] for v in outer}))
        writes = tuple(sorted({coarse_of[v] for op in inside for v in op.writes if v in coarse_of}))
        again = b <= problem.boundary and any(op.recomputable for op in inside)
        stuck = sum(op.cost for op in inside if not op.recomputable)
        ops.append(
            Op(
                f"{inside[0].name}..{inside[-1].name}",
                reads,
                writes,
                sum(op.cost for op in inside) - (stuck if again else 0),
                max(0, _inner_peak(problem, a, b, coarse_of) - sum(sizes[c] for c in writes)),
                again,
                inside[0].region,
            )
        )
    pinned = frozenset(c for (_, _, kept), c in merged.items() if kept)
    boundary, waiting = bisect_left(starts, problem.boundary), problem.waiting
    if waiting is not None:
        waiting = replace(waiting, until=bisect_left(starts, waiting.until))
    return Coarse(
        problem,
        Problem(tuple(ops), tuple(sizes), boundary, pinned, problem.resident, problem.budget, problem.name, waiting),
        starts,
    )


def _inner_peak(problem: Problem, a: int, b: int, crossing: dict[int, int]) -> int:
    """The peak of the values that ops a to b write themselves, workspaces included."""
    last = {v: max((r for r in problem.readers[v]), default=-1) for op in problem.ops[a:b] for v in op.writes}
    live = peak = 0
    for i in range(a, b):
        op = problem.ops[i]
        live += sum(problem.sizes[v] for v in op.writes)
        peak = max(peak, live + op.workspace)
        gone = {v for v in (*op.reads, *op.writes) if v in last and v not in crossing and last[v] <= i}
        live -= sum(problem.sizes[v] for v in gone)
    return peak


def _starts(problem: Problem, forward: int, backward: int) -> tuple[int, ...]:
    """Where each group starts, and the end: narrow and even forward cuts, backward the mirrors of such cuts."""
    n, boundary = len(problem.ops), problem.boundary
    must = {0, n, boundary} | {i for i in range(1, n) if problem.ops[i].region != problem.ops[i - 1].region}
    if problem.waiting is not None:
        must |= {boundary + 1, problem.waiting.until}
    ahead = set(range(boundary)) if forward >= boundary else _narrow(problem, forward)
    if backward >= n - boundary:
        back = set(range(boundary, n))
    else:
        back = {_mirror(problem, cut) for cut in _narrow(problem, backward)}
    return tuple(sorted(must | ahead | back))


def _narrow(problem: Problem, groups: int) -> set[int]:
    """Forward cuts, as the index of the op after them: near even shares of bytes and cost, where few bytes cross."""
    boundary = problem.boundary
    change = [0] * (boundary + 1)
    weight = []
    whole = sum(problem.sizes) or 1
    time_of_all = problem.total_cost or 1.0
    for op in problem.ops[:boundary]:
        weight.append(sum(problem.sizes[v] for v in op.writes) / whole + op.cost / time_of_all + 1e-6)
    for v, producer in enumerate(problem.producer):
        last = max((r for r in problem.readers[v] if r < boundary), default=producer)
        if producer < boundary:
            change[producer] += problem.sizes[v]
            change[last] -= problem.sizes[v]
    crossing = list(accumulate(change[:boundary]))
    upto = list(accumulate(weight))
    cuts: set[int] = set()
    for k in range(1, groups):
        share = upto[-1] / groups
        low = bisect_left(upto, share * (k - 0.4))
        high = max(low + 1, bisect_left(upto, share * (k + 0.4)))
        near = range(low, min(high, boundary - 1))
        if near:
            cuts.add(1 + min(near, key=lambda i: (crossing[i], abs(upto[i] - share * k))))
    return cuts


def _mirror(problem: Problem, cut: int) -> int:
    """The backward cut that belongs to a forward one: the fewest bytes written on one side are read on the other."""
    boundary, n = problem.boundary, len(problem.ops)
    balance = [0] * (n - boundary + 1)  # by how much each next op prefers to be on the near side
    for b in range(boundary, n):
        for v in problem.ops[b].reads:
            if problem.producer[v] < boundary:
                late = problem.producer[v] >= cut
                balance[b - boundary + 1] += problem.sizes[v] if late else -problem.sizes[v]
    gain = list(accumulate(balance))
    return boundary + max(range(len(gain)), key=lambda k: (gain[k], -k))


def expand(coarse: Coarse, schedule: Schedule) -> Schedule:
    """The fine schedule of a coarse one, without the re-runs whose outputs no op reads. It always obeys the rules."""
    steps: list[int] = []
    ran = 0
    for g in schedule.steps:
        ops = range(coarse.starts[g], coarse.starts[g + 1])
        steps.extend(i for i in ops if g == ran or coarse.fine.ops[i].recomputable)
        ran += g == ran
    return prune(coarse.fine, Schedule(tuple(steps)))


def prune(problem: Problem, schedule: Schedule) -> Schedule:
    """Leave out re-runs of which no output is read before it is written again. O(steps + reads)."""
    ops = problem.ops
    first = _first_runs(schedule.steps)
    wanted = bytearray(len(problem.sizes))
    kept: list[int] = []
    for at in range(len(schedule.steps) - 1, -1, -1):
        op = ops[schedule.steps[at]]
        if first[at] or any(wanted[v] for v in op.writes):
            kept.append(schedule.steps[at])
            for v in op.writes:
                wanted[v] = 0
            for v in op.reads:
                wanted[v] = 1
    return Schedule(tuple(reversed(kept)))


def _first_runs(steps: tuple[int, ...]) -> list[bool]:
    """For each step, whether it is its op's first run."""
    seen = -1
    first = []
    for i in steps:
        first.append(i > seen)
        seen = max(seen, i)
    return first


def trim(problem: Problem, schedule: Schedule, deadline: float) -> Schedule:
    """Leave out re-runs while the peak stays within the budget: dearest per byte first, in ever smaller groups.

    A schedule without one of its re-runs still obeys the rules: the outputs then stay live from the run before it.

    Args:
        problem: with a budget.
        schedule: one that may be within the budget or not; one that is not is returned as it is.
        deadline: when to stop, by `time.monotonic`; each try is one simulation.
    """
    assert problem.budget is not None
    if simulate(problem, schedule).peak > problem.budget:
        return schedule
    best, out = schedule, set[int]()
    order = _dearest(problem, schedule)
    size = max(1, len(order) // 2)
    while size and order:
        left: list[int] = []
        for at in range(0, len(order), size):
            group = order[at : at + size]
            if time.monotonic() > deadline:
                return best
            steps = tuple(i for s, i in enumerate(schedule.steps) if s not in out and s not in group)
            trial = prune(problem, Schedule(steps))
            if simulate(problem, trial).peak <= problem.budget:
                best = trial
                out.update(group)
            else:
                left += group
        order = left
        size //= 2
    return best


def _dearest(problem: Problem, schedule: Schedule) -> list[int]:
    """The re-run steps, by cost per byte and step that their outputs would have to stay live longer."""
    latest: dict[int, int] = {}
    price: list[tuple[float, int]] = []
    for at, i in enumerate(schedule.steps):
        op = problem.ops[i]
        if i in latest:
            size = sum(problem.sizes[v] for v in op.writes)
            price.append((-op.cost / (1 + size * (at - latest[i])), at))
        latest[i] = at
    return [at for _, at in sorted(price)]
