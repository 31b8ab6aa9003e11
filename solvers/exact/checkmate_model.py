"""The mixed-integer model of rematerialization, built with PuLP; `highs` solves it.

A position is a place in the schedule where one op may run; the positions are laid out once, in stages (stage t ends
with the first run of op t) of several rounds, and a schedule is a choice of positions. A value is freed only right
after a position where its producer or a reader may run: one hold variable for each such position is enough.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pulp

from solvers.problem import Problem, Waiting
from solvers.schedule import Schedule, kept_bytes, simulate

Position = tuple[int, int]  # stage, op


@dataclass(frozen=True, slots=True)
class Model:
    """A model, with its variables by position.

    Attributes:
        lp: PuLP's problem; its objective is the cost of the re-runs, or the peak where `capacity` was None.
        positions: every place where an op may run, in order.
        runs: for each position, its 0/1 variable; None for a first run, which always happens.
        holds: (position, value, variable): 1 when the value is live after that position.
        unit: 1 of the objective in the problem's own unit.
        offset: the objective's offset in the problem's own unit.
        byte: bytes for 1 of a memory row.
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

    Ops from which no chain of reads leads to op t or a later one are left out: running them again cannot help. Stages
    before `first_stage` re-run nothing.
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
    for v, producer in enumerate(problem.producer):
        if v not in problem.pinned and problem.readers[v]:
            alive[producer] += 1
            alive[max(problem.readers[v])] -= 1
    count = total = 0
    for t, i in laid:
        total += count + 4 * (len(problem.ops[i].reads) + len(problem.ops[i].writes))
        if i == t:
            count += alive[t]
    return total


def build(problem: Problem, laid: Sequence[Position], capacity: int | None) -> Model:
    """The model of cheapest re-runs within `capacity` bytes; of the lowest peak where that is None. O(nonzeros)."""
    builder = _Builder(problem, laid, capacity)
    for p, (t, i) in enumerate(laid):
        run = builder.run(p, t, i)
        builder.memory(t, i, run)
        for v in problem.ops[i].reads:
            builder.read(p, v, run)
        for v in problem.ops[i].writes:
            builder.write(p, v, run)
    return builder.model()


class _Builder:
    """The model while its positions are added in order.

    Attributes:
        holds_at: for each unpinned value that may be live at this point, its hold variable.
        pinned_bytes: bytes of the pinned values that are produced so far.
        last: for each value, the last position that reads it; -1 for none.
    """

    def __init__(self, problem: Problem, laid: Sequence[Position], capacity: int | None) -> None:
        ops, sizes = problem.ops, problem.sizes
        self.problem, self.laid, self.waiting = problem, tuple(laid), problem.waiting
        self.lp = pulp.LpProblem("rematerialization", pulp.LpMinimize)
        weights = [*sizes, *(op.workspace for op in ops)]
        most = problem.resident + sum(sizes) + max((op.workspace for op in ops), default=0)
        self.byte = _unit(weights, (most if capacity is None else capacity), 1e5)
        self.cost = _unit([op.cost for op in ops], max((op.cost for op in ops), default=0), 1e4)
        self.room = None if capacity is None else (capacity - problem.resident) / self.byte
        self.peak = pulp.LpVariable("peak", 0) if capacity is None else None
        passes = ("forward", "backward") if self.waiting else ()
        self.beside = {name: pulp.LpVariable(name, 0) for name in passes}  # bytes of waiting microbatches
        position = {(v, r): p for p, (_, r) in enumerate(laid) for v in ops[r].reads}  # the last one of each reader
        self.last = [max((position[v, r] for r in problem.readers[v]), default=-1) for v in range(len(sizes))]
        self.holds_at: dict[int, Any] = {}
        self.pinned_bytes = 0
        self.runs: list[Any] = []
        self.holds: list[tuple[int, int, Any]] = []
        self.objective: list[tuple[Any, float]] = []

    def add(self, terms: Iterable[tuple[Any, float]], sense: int, rhs: float) -> None:
        self.lp.addConstraint(pulp.LpConstraint(pulp.LpAffineExpression(list(terms)), sense, rhs=rhs))

    def run(self, p: int, t: int, i: int) -> Any:
        """The 0/1 variable of a re-run; None for a first run."""
        run = pulp.LpVariable(f"r{p}", 0, 1, pulp.LpInteger) if i < t else None
        self.runs.append(run)
        if run is not None:
            self.objective.append((run, self.problem.ops[i].cost / self.cost))
        return run

    def memory(self, t: int, i: int, run: Any) -> None:
        """The bytes allocated while op i runs are within the room, or below the peak."""
        sizes, op = self.problem.sizes, self.problem.ops[i]
        need = (sum(sizes[v] for v in op.writes) + op.workspace) / self.byte
        terms = [(var, sizes[v] / self.byte) for v, var in self.holds_at.items() if sizes[v]]
        constant = self.pinned_bytes / self.byte
        if run is None:
            constant += need
        else:
            terms.append((run, need))
        if self.waiting is not None and (t < self.waiting.until or (t == self.waiting.until and run is not None)):
            backward = t > self.problem.boundary or i == self.problem.boundary
            terms.append((self.beside["backward" if backward else "forward"], 1.0))
            if i == t == self.problem.boundary:
                self.saved_for_backward(self.waiting)
        if self.peak is not None:
            self.add([*terms, (self.peak, -1.0)], pulp.LpConstraintLE, -constant)
        elif terms and self.room is not None:
            self.add(terms, pulp.LpConstraintLE, self.room - constant)
        elif self.room is not None and constant > self.room:
            self.add([(pulp.LpVariable("impossible", 0, 0), 1.0)], pulp.LpConstraintGE, 1.0)

    def saved_for_backward(self, waiting: Waiting) -> None:
        """Each waiting microbatch holds the values that are live now, before the first backward op."""
        sizes = self.problem.sizes
        for name, pairs in (("forward", waiting.forward), ("backward", waiting.backward)):
            for number, more in pairs:
                kept = [(v, -number * sizes[i] / self.byte) for i, v in self.holds_at.items() if sizes[i] and number]
                least = (number * self.pinned_bytes + more) / self.byte
                self.add([(self.beside[name], 1.0), *kept], pulp.LpConstraintGE, least)

    def read(self, p: int, v: int, run: Any) -> None:
        """The value is live while position p runs; afterwards it stays so only where it was."""
        if v in self.problem.pinned:
            return
        before = self.holds_at[v]
        if run is None:
            before.lowBound = 1
        else:
            self.add([(run, 1.0), (before, -1.0)], pulp.LpConstraintLE, 0.0)
        if p >= self.last[v]:
            del self.holds_at[v]
        else:
            after = self._hold(p, v)
            self.add([(after, 1.0), (before, -1.0)], pulp.LpConstraintLE, 0.0)

    def write(self, p: int, v: int, run: Any) -> None:
        """The value is live after position p only where position p runs, or where it was live before."""
        if v in self.problem.pinned:
            self.pinned_bytes += self.problem.sizes[v] if run is None else 0
        elif p < self.last[v]:
            before = self.holds_at.get(v)
            after = self._hold(p, v)
            if run is not None:
                counts = self.laid[p][0] > self.problem.shared_until[v]
                # An old copy that no op reads before it is written again is free by then: never both.
                sources = [(run, 1.0)] * counts + ([] if before is None else [(before, 1.0)])
                self.add([(after, 1.0), *((var, -1.0) for var, _ in sources)], pulp.LpConstraintLE, 0.0)
                if counts:
                    self.add(sources, pulp.LpConstraintLE, 1.0)

    def _hold(self, p: int, v: int) -> Any:
        hold = self.holds_at[v] = pulp.LpVariable(f"h{p}_{v}", 0, 1)
        self.holds.append((p, v, hold))
        return hold

    def model(self) -> Model:
        if self.peak is not None:
            objective, unit, offset = [(self.peak, 1.0)], self.byte, float(self.problem.resident)
        else:
            objective, unit, offset = self.objective, self.cost, self.problem.total_cost
        self.lp.setObjective(pulp.LpAffineExpression(objective))
        return Model(self.lp, self.laid, tuple(self.runs), tuple(self.holds), unit, offset, self.byte)


def _unit(numbers: Sequence[float], scale: float, target: float) -> float:
    """The unit to divide by: the greatest common divisor where that gives small whole numbers, else `scale`/`target`.

    Solvers take 1e-6 for zero: with whole numbers up to a million that is harmless, with bytes it is not.
    """
    if all(float(x).is_integer() for x in numbers):
        divisor = math.gcd(*(int(x) for x in numbers)) or 1
        if scale / divisor <= 1e6:
            return float(divisor)
    return scale / target if scale > 0 else 1.0


def values_of(problem: Problem, model: Model, schedule: Schedule) -> dict[str, float] | None:
    """The values of the variables that express `schedule`; None where the model's positions cannot express it."""
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
    live: dict[int, set[int]] = {}
    now: set[int] = set()
    for p, i, gone in zip(taken, schedule.steps, timeline.frees, strict=True):
        if (var := model.runs[p]) is not None:
            values[var.name] = 1.0
        now = (now | set(problem.ops[i].writes)) - set(gone)
        live[p] = now
    now = set()
    after = [now := live.get(p, now) for p in range(len(model.positions))]
    for p, v, var in model.holds:
        values[var.name] = float(v in after[p])
    return values
