"""Naive exact answers for small problems, sharing nothing with the solvers: the tests' independent judge.

A state is how many first runs are done and which values are held. Any op that has run may run again at any time and
any value may be freed at any time; Dijkstra's algorithm finds the cheapest path of all, or the one of the lowest peak.
Exponential in the number of values: meant for up to about eight ops. What other microbatches hold depends on the whole
schedule: each amount that this one may keep at most is tried.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import product

from solvers.problem import Problem

from .naive import to_others

State = tuple[int, frozenset[int]]


def _moves(problem: Problem, state: State, most_kept: int) -> Iterator[tuple[int, int, float, State]]:
    """Each move as (op or -1 for a free, bytes held during it, cost, next state)."""
    waiting = problem.waiting
    done, held = state
    for v in held:
        if v not in problem.pinned:
            yield -1, 0, 0.0, (done, held - {v})
    if done == len(problem.ops):
        return
    taken = problem.resident + sum(problem.sizes[v] for v in held)
    for i in range(done + 1):
        op = problem.ops[i]
        again = i < done
        if again and (not op.recomputable or op.region != problem.ops[done].region):
            continue
        if not held.issuperset(op.reads):
            continue
        others = {v for v in op.writes if again and to_others(problem, v, done)}
        if any(v in held and v not in problem.pinned | others for v in op.writes):
            continue  # the old copy can be freed first, which is a move of its own
        during = taken + op.workspace + sum(problem.sizes[v] for v in op.writes)
        if waiting is not None:
            if i == done == problem.boundary and sum(problem.sizes[v] for v in held) > most_kept:
                continue
            if done < problem.boundary or (done == problem.boundary and again):
                during += max(number * most_kept + beside for number, beside in waiting.forward)
            elif done < waiting.until or (done == waiting.until and again):
                during += max(number * most_kept + beside for number, beside in waiting.backward)
        yield i, during, op.cost, (done + (not again), held | set(op.writes) - others)


def cheapest(problem: Problem) -> float | None:
    """The cost of the cheapest schedule within the budget; None where none fits."""
    costs = (_cheapest(problem, most) for most in _kept(problem))
    return min((cost for cost in costs if cost is not None), default=None)


def _kept(problem: Problem) -> list[int]:
    """What the values held when the first backward op starts may come to."""
    if problem.waiting is None:
        return [0]
    sizes = [problem.sizes[v] for op in problem.ops[: problem.boundary] for v in op.writes]
    return sorted({sum(part) for part in product(*((0, size) for size in sizes))})


def _cheapest(problem: Problem, most_kept: int) -> float | None:
    start: State = (0, frozenset())
    best = {start: 0.0}
    queue: list[tuple[float, int, State]] = [(0.0, 0, start)]
    pushed = 0
    while queue:
        cost, _, state = heapq.heappop(queue)
        if cost > best[state]:
            continue
        if state[0] == len(problem.ops):
            return cost
        for _, during, extra, after in _moves(problem, state, most_kept):
            if problem.budget is not None and during > problem.budget:
                continue
            if cost + extra < best.get(after, float("inf")):
                best[after] = cost + extra
                pushed += 1
                heapq.heappush(queue, (cost + extra, pushed, after))
    return None


def lowest_peak(problem: Problem) -> int:
    """The lowest peak of any schedule, in bytes, whatever it costs."""
    peaks = (_lowest_peak(problem, most) for most in _kept(problem))
    return min(peak for peak in peaks if peak is not None)


def _lowest_peak(problem: Problem, most_kept: int) -> int | None:
    start: State = (0, frozenset())
    best = {start: problem.resident}
    queue: list[tuple[int, int, State]] = [(problem.resident, 0, start)]
    pushed = 0
    while queue:
        peak, _, state = heapq.heappop(queue)
        if peak > best[state]:
            continue
        if state[0] == len(problem.ops):
            return peak
        for _, during, _, after in _moves(problem, state, most_kept):
            reached = max(peak, during)
            if reached < best.get(after, 1 << 80):
                best[after] = reached
                pushed += 1
                heapq.heappush(queue, (reached, pushed, after))
    return None
