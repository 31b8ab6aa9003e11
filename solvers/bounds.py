"""Proven lower bounds: what no schedule can beat, whatever found it."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from itertools import accumulate

from solvers.problem import Problem
from solvers.relaxation import Relaxed, build, solve
from solvers.schedule import every_op_once, simulate

POINTS = 24  # points in time that are candidates, at most
QUICK = 16_000  # ops, times how many points `cost_bound` looks at
WORK = 1.5e6  # of all linear relaxations that `relax` solves: about 1 s
GAIN = 1e-5  # what one more point must add, as a share of the bound
SEARCHED = 1_500  # columns of the largest relaxation that is searched for whole numbers
NODES = 100  # of that search
LOOKS = 32  # states looked at for each op in `minimum_peak_bound`
ALL_LOOKS = 40_000  # and for all ops


def cost_bound(problem: Problem) -> float:
    """A lower bound on the cost of any schedule within the budget; never higher for a larger budget.

    The linear relaxation of `relaxation` at one point in time, the best of some: O(ops + reads) rows and columns.
    About 0.1 s for 400 ops, 0.5 s for 3,300, 1.3 s for 14,000. Not below the knapsack at the first backward op, which
    is what there is without HiGHS.
    """
    if problem.budget is None or not problem.ops:
        return problem.total_cost
    at = points(problem)[: max(1, QUICK // len(problem.ops))]
    extra = max((solve(problem, build(problem, [t])).bound for t in at), default=0.0)
    return max(_knapsack(problem), problem.total_cost + extra)


def relaxation_bound(problem: Problem, relaxed: Relaxed | None = None) -> float:
    """A lower bound on the cost of any schedule within the budget, never below `cost_bound`: seconds.

    The relaxation at several points in time, searched for whole numbers: what `relax` finds, unless it is given. Which
    points are taken depends on the budget: a larger one can give a bound higher by a trifle, which then is one for the
    smaller budget too.
    """
    found = relax(problem) if relaxed is None else relaxed
    return max(cost_bound(problem), problem.total_cost + found.bound)


def relax(problem: Problem, effort: float = 1.0) -> Relaxed:
    """The relaxation at several points in time, searched for whole numbers. 0.1 to 3 s, the search most of it.

    Points are added one by one, each time the one that raises the bound most, until none does or the work is spent.
    Limited by counts and not by a clock: the answer depends on the problem alone, and on the `effort`, a share of that
    work.
    """
    found = Relaxed(0.0, {}, ())
    if problem.budget is None or not problem.ops:
        return found
    work, taken, left = effort * WORK, list[int](), points(problem)
    while left:
        tried: list[tuple[Relaxed, int]] = []
        for t in left:
            program = build(problem, sorted((*taken, t)))
            work -= program.work
            if work < 0 and (tried or taken):
                break
            tried.append((solve(problem, program), t))
        tried.sort(key=lambda r: -r[0].bound)
        if not tried or tried[0][0].bound <= found.bound + GAIN * (problem.total_cost + found.bound):
            break
        found = tried[0][0]
        taken.append(tried[0][1])
        # what raises the bound little now will raise it less beside more points
        left = [t for _, t in tried[1 : 1 + len(left) // 2]]
    while taken:
        program = build(problem, sorted(taken))
        if len(program.costs) <= effort * SEARCHED:
            searched = solve(problem, program, NODES)
            return replace(searched if searched.again else found, bound=max(found.bound, searched.bound))
        taken.pop()
    return found


def points(problem: Problem) -> list[int]:
    """Where running every op once holds more than the budget, and no less than just before and after; highest first.

    The first backward op is among them.
    """
    assert problem.budget is not None
    held = simulate(problem, every_op_once(problem)).held
    around = (0, *held, 0)
    peaks = [t for t, now in enumerate(held) if now > problem.budget and now >= max(around[t], around[t + 2])]
    found = sorted(peaks, key=lambda t: (-held[t], t))[:POINTS]
    boundary = problem.boundary
    if boundary < len(held) and held[boundary] > problem.budget and boundary not in found:
        found.insert(1, boundary)
    return found


def _knapsack(problem: Problem) -> float:
    """The bound that needs no solver. O(ops log ops).

    When the first backward op starts, every forward op has run; a forward value that a backward op still reads is
    either held then, and once more for each microbatch that waits, or its op runs again. What is held must fit the
    budget: a covering knapsack, relaxed to fractions. The bound holds for first runs in the order of the ops.
    """
    if problem.budget is None or problem.boundary >= len(problem.ops):
        return problem.total_cost
    sizes, boundary = problem.sizes, problem.boundary
    first = problem.ops[boundary]
    waiting, beside = max(problem.waiting.backward) if problem.waiting else (0, 0)
    room = problem.budget - problem.resident - first.workspace - sum(sizes[v] for v in first.writes) - beside
    choices: list[tuple[float, int]] = []
    for op in problem.ops[:boundary]:
        needed = 0
        for v in op.writes:
            if v in problem.pinned or v in first.reads:
                room -= (1 + waiting) * sizes[v]
            elif any(r > boundary for r in problem.readers[v]):
                needed += (1 + waiting) * sizes[v]
        if needed and op.recomputable:
            choices.append((op.cost, needed))
        else:
            room -= needed
    extra = 0.0
    for cost, size in sorted(choices, key=lambda c: c[0] / c[1], reverse=True):
        part = max(0, min(size, room))
        room -= size
        extra += cost * (1 - part / size)
    return problem.total_cost + extra


def minimum_peak_bound(problem: Problem) -> int:
    """A lower bound on the peak of any schedule, in bytes. O(ops * LOOKS * reads), at most ALL_LOOKS states.

    While an op runs for the first time, what it reads, what it writes, its workspace, every pinned value written so
    far and every value that cannot be recomputed and is still to be read are held. And what it reads was made: the
    last of its reads to be made was made while the others were held, by an op that had its own reads, and so on
    backwards. Of all these histories, the one of the lowest peak is sought best first, as in pebbling; where the
    search ends early, the peak of the best one left is a lower bound still.
    """
    history = _Histories(problem)
    order = sorted(range(len(problem.ops)), key=lambda i: -history.first_run(i))
    peak = max((history.first_run(i) for i in order), default=problem.resident)
    looks = ALL_LOOKS
    for i in order:
        peak, used = history.lowest(i, peak, min(LOOKS, looks))
        looks -= used
    return peak


class _Histories:
    """What may have come before the first run of an op, in the order backwards."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.last = [max(readers, default=-1) for readers in problem.readers]
        self.stuck = {
            v for v, i in enumerate(problem.producer) if v not in problem.pinned and not problem.ops[i].recomputable
        }
        made = [sum(problem.sizes[v] for v in op.writes if v in problem.pinned) for op in problem.ops]
        self.pinned = list(accumulate(made, initial=0))  # bytes pinned by the ops before this one
        self.kept = cache(self._kept)
        waiting, least = problem.waiting, problem.least_kept
        self.waiting = min(waiting.bytes_in(p, least) for p in (waiting.forward, waiting.backward)) if waiting else 0
        self.none_waits = waiting.until if waiting else 0  # from this op on

    def _kept(self, after: int, until: int) -> int:
        made, sizes = self.problem.producer, self.problem.sizes
        return sum(sizes[v] for v in self.stuck if made[v] <= after and self.last[v] >= until)

    def held(self, i: int, beside: Iterable[int], after: int, until: int) -> int:
        """Least bytes held while op i runs, other values beside, between the first runs of `after` and `until`."""
        problem, made = self.problem, self.problem.producer
        op = problem.ops[i]
        values = {*op.reads, *op.writes, *beside}
        sure = (
            v
            for v in values
            if made[v] <= after and (v in problem.pinned or (v in self.stuck and self.last[v] >= until))
        )
        more = values.difference(sure)
        fixed = problem.resident + op.workspace + self.pinned[after + 1] + self.kept(after, until)
        fixed += self.waiting if until < self.none_waits else 0
        return fixed + sum(problem.sizes[v] for v in more)

    def first_run(self, i: int) -> int:
        return self.held(i, (), i - 1, i)

    def lowest(self, op: int, floor: int, looks: int) -> tuple[int, int]:
        """A lower bound on the peak up to the first run of an op, at least `floor`, and the states looked at.

        A state is a set of values held together, at a time before the first run of some op. One of them was made
        last: its op ran beside the others, for the first time, if no other one was made first by a later op, or again.
        """
        ops, made, pinned = self.problem.ops, self.problem.producer, self.problem.pinned
        start = (frozenset(ops[op].reads) - pinned, op)
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
            newest = max(made[v] for v in values)
            for i in sorted({made[v] for v in values}):
                before = values.difference(ops[i].writes).union(ops[i].reads) - pinned
                times = [(newest - 1, newest)] if i == newest else []
                if ops[i].recomputable and newest < until:
                    times.append((newest, until))
                for after, by in times:
                    now = max(peak, self.held(i, values, after, by))
                    if now < best.get((before, by), now + 1):
                        best[before, by] = now
                        count += 1
                        heapq.heappush(heap, (now, len(before), count, (before, by)))
        return floor, used
