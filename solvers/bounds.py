"""Proven lower bounds: what no schedule can beat, whatever found it."""

from __future__ import annotations

from .problem import Problem


def minimum_peak_bound(problem: Problem) -> int:
    """A lower bound on the peak of any schedule, in bytes. O(ops + reads).

    While an op runs for the first time, what it reads, what it writes, its workspace, every pinned value written so
    far and every value that cannot be recomputed and is still to be read are held.
    """
    sizes, pinned = problem.sizes, problem.pinned
    stuck = {v for op in problem.ops if not op.recomputable for v in op.writes}
    last = {v: max(problem.readers[v], default=-1) for v in stuck}
    until: dict[int, list[int]] = {}
    held = peak = problem.resident
    for i, op in enumerate(problem.ops):
        own = sum(sizes[v] for v in op.reads if v not in pinned and v not in stuck)
        peak = max(peak, held + own + op.workspace + sum(sizes[v] for v in op.writes))
        for v in op.writes:
            if v in pinned:
                held += sizes[v]
            elif v in stuck and last[v] > i:
                held += sizes[v]
                until.setdefault(last[v], []).append(v)
        held -= sum(sizes[v] for v in until.pop(i, ()))
    return peak


def cost_bound(problem: Problem) -> float:
    """A lower bound on the cost of any schedule within the budget. O(ops log ops).

    When the first backward op starts, every forward op has run; a forward value that a backward op still reads is
    either held then or its op runs again. What is held must fit the budget: a covering knapsack, relaxed to
    fractions. The bound holds for first runs in the order of the ops.
    """
    if problem.budget is None or problem.boundary >= len(problem.ops):
        return problem.total_cost
    sizes, boundary = problem.sizes, problem.boundary
    first = problem.ops[boundary]
    room = problem.budget - problem.resident - first.workspace - sum(sizes[v] for v in first.writes)
    choices: list[tuple[float, int]] = []
    for op in problem.ops[:boundary]:
        needed = 0
        for v in op.writes:
            if v in problem.pinned or v in first.reads:
                room -= sizes[v]
            elif any(r > boundary for r in problem.readers[v]):
                needed += sizes[v]
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
