"""Proven lower bounds on the cost of any schedule within the budget."""

from __future__ import annotations

from dataclasses import replace

from solvers.bounds.relaxation import Relaxed, build, solve
from solvers.problem import Problem
from solvers.schedule import every_op_once, simulate

POINTS = 24  # candidate points in time, at most
QUICK = 16_000  # `cost_bound` relaxes at this number over the number of ops points
WORK = 1.5e6  # of all linear relaxations that `relax` solves, in the unit of `Program.work`: about 1 s
GAIN = 1e-5  # one more point must raise the bound by this share
SEARCHED = 1_500  # columns of the largest relaxation that is searched for whole numbers
NODES = 100  # of that search


def cost_bound(problem: Problem) -> float:
    """A lower bound on the cost of any schedule within the budget; never higher for a larger budget.

    The best of some linear relaxations, each at one point in time: O(ops + reads) rows and columns. About 0.1 s for 400
    ops, 0.5 s for 3,300, 1.3 s for 14,000. It is never below the knapsack at the first backward op, which is the bound
    without HiGHS.
    """
    if problem.budget is None or not problem.ops:
        return problem.total_cost
    at = points(problem)[: max(1, QUICK // len(problem.ops))]
    extra = max((solve(problem, build(problem, [t])).bound for t in at), default=0.0)
    return max(knapsack(problem), problem.total_cost + extra)


def relaxation_bound(problem: Problem, relaxed: Relaxed | None = None) -> float:
    """A lower bound on the cost of any schedule within the budget, never below `cost_bound`: seconds.

    The bound of `relax`, unless its result is given. Which points it takes depends on the budget: a larger budget can
    give a bound that is higher by a trifle; it then bounds the smaller budget too.
    """
    relaxed = relax(problem) if relaxed is None else relaxed
    return max(cost_bound(problem), problem.total_cost + relaxed.bound)


def relax(problem: Problem, effort: float = 1.0) -> Relaxed:
    """The relaxation at several points in time, searched for whole numbers. 0.1 to 3 s, the search most of it.

    Points are added one by one, each time the one that raises the bound most, until none does or the work is spent.
    Limited by counts and not by a clock: the answer depends on the problem alone, and on the `effort`, a share of that
    work.
    """
    best = Relaxed(0.0, {}, ())
    if problem.budget is None or not problem.ops:
        return best
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
        if not tried or tried[0][0].bound <= best.bound + GAIN * (problem.total_cost + best.bound):
            break
        best = tried[0][0]
        taken.append(tried[0][1])
        # a point that raises the bound little now will raise it less beside more points
        left = [t for _, t in tried[1 : 1 + len(left) // 2]]
    while taken:
        program = build(problem, sorted(taken))
        if len(program.costs) <= effort * SEARCHED:
            searched = solve(problem, program, NODES)
            return replace(searched if searched.again else best, bound=max(best.bound, searched.bound))
        taken.pop()
    return best


def points(problem: Problem) -> list[int]:
    """The local maxima of memory above the budget when every op runs once, highest first; steps, which are ops.

    The first backward op is among them where it is above the budget.
    """
    assert problem.budget is not None
    memory = simulate(problem, every_op_once(problem)).held
    around = (0, *memory, 0)
    peaks = [t for t, now in enumerate(memory) if now > problem.budget and now >= max(around[t], around[t + 2])]
    highest = sorted(peaks, key=lambda t: (-memory[t], t))[:POINTS]
    boundary = problem.boundary
    if boundary < len(memory) and memory[boundary] > problem.budget and boundary not in highest:
        highest.insert(1, boundary)
    return highest


def knapsack(problem: Problem) -> float:
    """A lower bound on the cost of any schedule that needs no LP solver. O(ops log ops).

    When the first backward op starts, every forward op has run; a forward value that a backward op still reads is
    either live then, and once more for each waiting microbatch, or its producer runs again. The live values must fit
    the budget: a covering knapsack, relaxed to fractions. With a link, values may be elsewhere: it proves nothing.
    """
    if problem.budget is None or problem.boundary >= len(problem.ops) or problem.link is not None:
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
