"""The mixed-integer model of rematerialization, as PuLP has it; `mip` solves it.

A position is a place in the schedule where one op may run; the positions are laid out once, in stages (stage t ends
with the first run of op t) of several rounds, and a schedule is a choice of positions. A value changes from held to
free only right after a position where its op or a reader may run: one variable for each such place is enough.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pulp

from solvers.problem import Problem
from solvers.schedule import Schedule, kept_bytes, simulate

Position = tuple[int, int]  # stage, op


@dataclass(frozen=True, slots=True)
class Model:
    """A built model, with what is needed to read its answer.

    Attributes:
        lp: PuLP's problem; its objective is what the re-runs cost, or the peak where `capacity` was None.
        positions: every place where an op may run, in order.
        runs: for each position, its 0/1 variable; None for a first run, which always happens.
        holds: (position, value, variable): 1 when the value is still held after that position.
        unit: what 1 of the objective is, in the problem's own unit.
        offset: what to add to the objective, in the problem's own unit.
        byte: bytes that 1 of a memory row is.
    """

    lp: Any
    positions: tuple[Position, ...]
    runs: tuple[Any, ...]
    holds: tuple[tuple[int, int, Any], ...]
    unit: float
    offset: float
    byte: float


def positions(problem: Problem, rounds: int, first_stage: int = 0) -> tuple[Position, ...]:
    """Where ops may run: in stage t, `rounds` times over, in index order, the ops that may run again; then op t.

    Left out is what cannot help: an op from which no chain of reads leads to op t or a later one. Stages before
    `first_stage` re-run nothing.
    """
    reach = list(range(len(problem.ops)))  # the last op that a run of op i can matter to
    for i in range(len(problem.ops) - 1, -1, -1):
        for v in problem.ops[i].writes:
            for r in problem.readers[v]:
                reach[i] = max(reach[i], reach[r] if problem.ops[r].recomputable else r)
    laid: list[Position] = []
    for t, op in enumerate(problem.ops):
        if t >= first_stage:
            again = [
                (t, i)
                for i, o in enumerate(problem.ops[:t])
                if o.recomputable and o.writes and o.region == op.region and reach[i] >= t
            ]
            laid += again * min(rounds, len(again))
        laid.append((t, t))
    return tuple(laid)


def nonzeros(problem: Problem, laid: Sequence[Position]) -> int:
    """About how many nonzeros the model of these positions has. O(positions)."""
    alive = [0] * (len(problem.ops) + 1)
    for v, made in enumerate(problem.producer):
        if v not in problem.pinned and problem.readers[v]:
            alive[made] += 1
            alive[max(problem.readers[v])] -= 1
    count = total = 0
    for t, i in laid:
        total += count + 4 * (len(problem.ops[i].reads) + len(problem.ops[i].writes))
        if i == t:
            count += alive[t]
    return total


def build(problem: Problem, laid: Sequence[Position], capacity: int | None) -> Model:
    """The model of cheapest re-runs within `capacity` bytes; of the lowest peak where that is None. O(nonzeros)."""
    sizes, ops, pinned = problem.sizes, problem.ops, problem.pinned
    lp = pulp.LpProblem("rematerialization", pulp.LpMinimize)
    weights = [*sizes, *(op.workspace for op in ops)]
    most = problem.resident + sum(sizes) + max((op.workspace for op in ops), default=0)
    byte = _unit(weights, (most if capacity is None else capacity), 1e5)
    cost = _unit([op.cost for op in ops], max((op.cost for op in ops), default=0), 1e4)
    room = None if capacity is None else (capacity - problem.resident) / byte
    peak = pulp.LpVariable("peak", 0) if capacity is None else None
    waiting = problem.waiting
    beside = {name: pulp.LpVariable(name, 0) for name in (("forward", "backward") if waiting else ())}

    def add(terms: Iterable[tuple[Any, float]], sense: int, rhs: float) -> None:
        lp.addConstraint(pulp.LpConstraint(pulp.LpAffineExpression(list(terms)), sense, rhs=rhs))

    last = {(v, r): p for p, (_, r) in enumerate(laid) for v in ops[r].reads}  # (value, reader): its last position
    until = [max((last[v, r] for r in problem.readers[v]), default=-1) for v in range(len(sizes))]
    now: dict[int, Any] = {}  # unpinned values that may be held, each with its variable at this point
    fixed = 0  # bytes of the pinned values produced so far
    runs: list[Any] = []
    holds: list[tuple[int, int, Any]] = []
    objective: list[tuple[Any, float]] = []
    for p, (t, i) in enumerate(laid):
        op = ops[i]
        again = i < t
        run = pulp.LpVariable(f"r{p}", 0, 1, pulp.LpInteger) if again else None
        runs.append(run)
        need = sum(sizes[v] for v in op.writes) + op.workspace
        terms = [(var, sizes[v] / byte) for v, var in now.items() if sizes[v]]
        constant = fixed / byte
        if run is not None:
            terms.append((run, need / byte))
            objective.append((run, op.cost / cost))
        else:
            constant += need / byte
        if waiting is not None and (t < waiting.until or (t == waiting.until and run is not None)):
            backward = t > problem.boundary or i == problem.boundary
            terms.append((beside["backward" if backward else "forward"], 1.0))
            if i == t == problem.boundary:
                for name, pairs in (("forward", waiting.forward), ("backward", waiting.backward)):
                    for number, more in pairs:
                        kept = [(var, -number * sizes[v] / byte) for v, var in now.items() if sizes[v] and number]
                        least = (number * fixed + more) / byte
                        add([(beside[name], 1.0), *kept], pulp.LpConstraintGE, least)
        if peak is not None:
            add([*terms, (peak, -1.0)], pulp.LpConstraintLE, -constant)
        elif terms and room is not None:
            add(terms, pulp.LpConstraintLE, room - constant)
        elif room is not None and constant > room:
            add([(pulp.LpVariable("impossible", 0, 0), 1.0)], pulp.LpConstraintGE, 1.0)
        for v in op.reads:
            if v in pinned:
                continue
            before = now[v]
            if run is None:
                before.lowBound = 1
            else:
                add([(run, 1.0), (before, -1.0)], pulp.LpConstraintLE, 0.0)
            if p >= until[v]:
                del now[v]
            else:
                now[v] = pulp.LpVariable(f"h{p}_{v}", 0, 1)
                holds.append((p, v, now[v]))
                add([(now[v], 1.0), (before, -1.0)], pulp.LpConstraintLE, 0.0)
        for v in op.writes:
            if v in pinned:
                fixed += 0 if again else sizes[v]
            elif p < until[v]:
                after = pulp.LpVariable(f"h{p}_{v}", 0, 1)
                holds.append((p, v, after))
                if run is not None:
                    # An old copy that nothing reads before it is written again is free by then: never both.
                    made = [(run, 1.0)] + ([(now[v], 1.0)] if v in now else [])
                    add([(after, 1.0), *((var, -1.0) for var, _ in made)], pulp.LpConstraintLE, 0.0)
                    add(made, pulp.LpConstraintLE, 1.0)
                now[v] = after
    if peak is not None:
        lp.setObjective(pulp.LpAffineExpression([(peak, 1.0)]))
        return Model(lp, tuple(laid), tuple(runs), tuple(holds), byte, problem.resident, byte)
    lp.setObjective(pulp.LpAffineExpression(objective))
    return Model(lp, tuple(laid), tuple(runs), tuple(holds), cost, problem.total_cost, byte)


def _unit(numbers: Sequence[float], scale: float, target: float) -> float:
    """What to divide by: the greatest common divisor where that gives small whole numbers, else `scale`/`target`.

    Solvers take 1e-6 for zero: with whole numbers up to a million that is harmless, with bytes it is not.
    """
    if all(float(x).is_integer() for x in numbers):
        divisor = math.gcd(*(int(x) for x in numbers)) or 1
        if scale / divisor <= 1e6:
            return float(divisor)
    return scale / target if scale > 0 else 1.0


def values_of(problem: Problem, model: Model, schedule: Schedule) -> dict[str, float] | None:
    """The variables' values that say `schedule`; None where the model's positions cannot say it."""
    timeline = simulate(problem, schedule)
    taken: list[int] = []
    at = 0
    first = 0
    for i in schedule.steps:
        first = max(first, i)
        stage = first + (i < first)  # a re-run belongs to the stage of the first run that comes next
        while at < len(model.positions) and model.positions[at] != (stage, i):
            at += 1
        if at == len(model.positions):
            return None
        taken.append(at)
        at += 1
    values = dict.fromkeys((v.name for v in model.runs if v is not None), 0.0)
    values["peak"] = 0.0
    if (waiting := problem.waiting) is not None:
        kept = kept_bytes(problem, schedule.steps)
        for name, pairs in (("forward", waiting.forward), ("backward", waiting.backward)):
            values[name] = waiting.bytes_in(pairs, kept) / model.byte
    held: dict[int, set[int]] = {}
    now: set[int] = set()
    for p, i, gone in zip(taken, schedule.steps, timeline.frees, strict=True):
        if (var := model.runs[p]) is not None:
            values[var.name] = 1.0
        now = (now | set(problem.ops[i].writes)) - set(gone)
        held[p] = now
    now = set()
    after = [now := held.get(p, now) for p in range(len(model.positions))]
    for p, v, var in model.holds:
        values[var.name] = float(v in after[p])
    return values
