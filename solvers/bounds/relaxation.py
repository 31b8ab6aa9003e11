"""The relaxation of the cheapest re-runs: memory is constrained only at a few points in time.

The points are first runs of some ops. They cut every schedule into stages, whatever it re-runs and when: a stage ends
with the first run of its op. The order inside a stage is ignored; the program only knows which ops run again in it at
all, and which values are live at its end. It has a few 0/1 variables an op and stage, where Checkmate's model has some
for every op of every stage. A well-chosen point loses little: on the published instances, two or three points prove the
bounds that 24 hours of Gurobi prove on the full model.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from solvers.bounds.host import add_away, add_spare, close_away, most_spent
from solvers.bounds.program import Program, Stage
from solvers.problem import Pairs, Problem

UNITS = 1e7  # sizes are rounded down to so many parts of their sum: a bound stays one
COST = 1e3  # the dearest op's cost, as the solver sees it
ITERATIONS = 200_000  # of the simplex method, at most: a limit that is no clock


@dataclass(frozen=True, slots=True)
class Relaxed:
    """A solved relaxation.

    Attributes:
        bound: a lower bound on the cost of any schedule's re-runs.
        again: for each op that may run again, its largest fraction of a run in a stage; 0 or 1 after a search.
        points: the ops whose first runs are its points in time, ascending.
        away: for each value that may leave, its largest fraction that is on the host only at a point.
    """

    bound: float
    again: dict[int, float]
    points: tuple[int, ...]
    away: dict[int, float] = field(default_factory=dict)

    def kept(self, problem: Problem, share: float) -> frozenset[int]:
        """The values of ops of which no more than this share runs again."""
        return frozenset(v for v, i in enumerate(problem.producer) if self.again.get(i, 0.0) <= share)


def build(problem: Problem, at: Sequence[int]) -> Program:
    """The relaxation at the first runs of the ops `at`, ascending. O(points * (ops + reads)) rows and columns.

    Every valid schedule is a 0/1 solution of no higher cost, so that its optimum, and that of its linear relaxation,
    are lower bounds on what the schedule's re-runs cost, and its waiting for copies:

    - Each value that a first run or a re-run reads is live since the stage began, or its producer runs in the stage.
    - Each value that is live at a stage's end is live at its begin, or its producer runs in the stage.
    - While the op of a point runs for the first time, its reads, writes and workspace, the pinned values so far and
      the values that are live afterwards fit the budget together, beside the waiting microbatches. Each of those holds
      the values that are live at the first backward op, where that is the point or an earlier one; else it holds the
      values that are live there in every schedule. Values on the host only take no room, see `bounds.host`.
    - From any point to the end of the schedule the first rule applies to all stages in one. It adds nothing to 0/1
      solutions, but a fractional one could otherwise run half an op in either of two stages from half of its reads.
    """
    assert problem.budget is not None
    ops, sizes, producer, pinned = problem.ops, problem.sizes, problem.producer, problem.pinned
    unit = max(1.0, sum(sizes) / UNITS)
    cost_unit = _cost_unit(problem)
    matters = _matters(problem)
    # the last first run that may still need the value
    wanted = [max((matters[r] for r in problem.readers[v]), default=-1) for v in range(len(sizes))]
    program = Program()
    stages = program.stages
    live: dict[int, int] = {}
    waiting = problem.waiting
    kept, least = list[tuple[int, float]](), problem.least_kept if waiting else 0
    for begin, end in pairwise((-1, *at, len(ops) - 1)):
        regions = {op.region for op in ops[begin + 1 : end + 1]}
        again = {
            i: program.column(op.cost / cost_unit)
            for i, op in enumerate(ops[: begin + 1])
            if op.recomputable and op.writes and op.region in regions and matters[i] > begin
        }
        reads = {v for op in ops[begin + 1 : end + 1] for v in op.reads}
        stage = Stage(begin, live, again, {v for v in reads if producer[v] <= begin and v not in pinned})
        stages.append(stage)
        if problem.link is not None:
            program.spare.append(add_spare(problem, program, cost_unit))
        _closed(problem, program, stage, stage.needed, again)
        if len(stages) > len(at):
            break
        op = ops[end]
        now = set(op.reads) | set(op.writes) | {v for v in pinned if producer[v] < end}
        room = problem.budget - problem.resident - op.workspace - sum(sizes[v] for v in now)
        live = {v: program.column() for v, i in enumerate(producer) if i <= end < wanted[v] and v not in pinned}
        for v, column in live.items():
            if producer[v] <= begin:
                program.row([*stage.available(v, producer[v]), (column, -1.0)], 0.0)
        terms = [(column, (sizes[v] // unit) / 1e3) for v, column in live.items() if v not in now and sizes[v] >= unit]
        if problem.link is not None:
            away = add_away(problem, program, live, now, end)
            program.away.append(away)
            terms += [(column, -(sizes[v] // unit) / 1e3) for v, column in away.items() if sizes[v] >= unit]
        pairs: Pairs = ((0, 0),)
        if waiting is not None and end < waiting.until:
            pairs = waiting.forward if end < problem.boundary else waiting.backward
            if end == problem.boundary:
                kept = [(column, factor) for column, factor in terms]
                least = sum(sizes[v] for v in now if producer[v] < end)
        for number, beside in pairs:
            factors = dict(terms)
            for column, factor in kept if number else ():
                factors[column] = factors.get(column, 0.0) + number * factor
            program.row(factors.items(), -math.inf, ((room - number * least - beside) // unit) / 1e3)
    _suffixes(problem, program)
    if problem.link is not None:
        close_away(problem, program, cost_unit)
    return program


def _matters(problem: Problem) -> list[int]:
    """For each op the last first run that a run of it can matter to, through ops that may run again."""
    matters = list(range(len(problem.ops)))
    for i in range(len(matters) - 1, -1, -1):
        for v in problem.ops[i].writes:
            for r in problem.readers[v]:
                matters[i] = max(matters[i], matters[r])
        if not problem.ops[i].recomputable:
            matters[i] = i
    return matters


def _closed(problem: Problem, program: Program, stage: Stage, needed: Iterable[int], again: dict[int, int]) -> None:
    """Each value that is needed, or that a re-run reads, is live when the stage begins, or its producer runs again."""
    producer, pinned = problem.producer, problem.pinned
    for v in sorted(needed):
        program.row(stage.available(v, producer[v], again), 1.0)
    for i, column in again.items():
        for v in problem.ops[i].reads:
            if v not in pinned:
                program.row([*stage.available(v, producer[v], again), (column, -1.0)], 0.0)


def _suffixes(problem: Problem, program: Program) -> None:
    """For each stage but the first and the last: an op's runs in it and all later ones as one variable, closed."""
    later, needed = program.stages[-1].again, program.stages[-1].needed
    for stage in program.stages[-2:0:-1]:
        needed = {v for v in needed | stage.needed if problem.producer[v] <= stage.begin}
        merged = {}
        for i in range(stage.begin + 1):
            parts = [runs[i] for runs in (stage.again, later) if i in runs]
            if len(parts) == 1:
                merged[i] = parts[0]
            elif parts:
                merged[i] = column = program.column()
                program.row([*((part, 1.0) for part in parts), (column, -1.0)], 0.0)
                for part in parts:
                    program.row([(column, 1.0), (part, -1.0)], 0.0)
        later = merged
        _closed(problem, program, stage, needed, later)


def solve(problem: Problem, program: Program, nodes: int = 0) -> Relaxed:
    """A lower bound on the program's optimum, and its solution; 0 and nothing where HiGHS finds none or is missing.

    The linear relaxation, or with `nodes` at least 1 the 0/1 program, searched for so many nodes. The bound of a linear
    relaxation is computed from the solver's row prices alone, whichever they are (weak duality; Neumaier and
    Shcherbina, "Safe bounds in linear and mixed-integer linear programming", 2004), so that no tolerance or early end
    of the solver can make it wrong. The bound of the search is HiGHS's own, less 1e-6 of it.
    """
    at = tuple(stage.begin for stage in program.stages[1:])
    try:
        import highspy
    except ImportError:
        return Relaxed(0.0, {}, at)
    starts, columns, factors = (np.array(each) for each in (program.starts, program.columns, program.factors))
    costs, low, high = np.array(program.costs), np.array(program.low), np.array(program.high)
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = len(costs), len(low)
    lp.col_cost_, lp.col_lower_, lp.col_upper_ = costs, np.zeros(len(costs)), np.ones(len(costs))
    lp.row_lower_, lp.row_upper_ = low, high
    lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    lp.a_matrix_.start_ = starts
    lp.a_matrix_.index_, lp.a_matrix_.value_ = columns, factors
    highs = highspy.Highs()  # type: ignore[no-untyped-call]
    options: dict[str, bool | int | float] = {"output_flag": False, "threads": 1, "random_seed": 1}
    options["simplex_iteration_limit"] = ITERATIONS
    if nodes:
        lp.integrality_ = [highspy.HighsVarType.kInteger] * len(costs)
        for column in program.spare:
            lp.integrality_[column] = highspy.HighsVarType.kContinuous
        options |= {"mip_max_nodes": nodes, "mip_rel_gap": 0.0}
    for name, value in options.items():
        highs.setOptionValue(name, value)
    highs.passModel(lp)
    highs.run()
    unit = _cost_unit(problem)
    solution = highs.getSolution()
    again: dict[int, float] = {}
    away: dict[int, float] = {}
    if solution.value_valid:
        for found, each in ((again, [stage.again for stage in program.stages]), (away, program.away)):
            for i, column in ((i, column) for columns in each for i, column in columns.items()):
                found[i] = max(found.get(i, 0.0), solution.col_value[column])
    if nodes:
        best = highs.getInfo().mip_dual_bound
        bound = max(0.0, best - 1e-6 * (1 + best)) * unit if math.isfinite(best) else 0.0
        return Relaxed(min(bound, most_spent(problem)), again, at, away)
    prices = np.array(solution.row_dual)
    if len(prices) != len(low) or not np.isfinite(prices).all():
        return Relaxed(0.0, again, at, away)
    prices = np.where(np.isfinite(low), np.maximum(prices, 0.0), np.minimum(prices, 0.0))
    reduced = costs - np.bincount(columns, factors * np.repeat(prices, np.diff(starts)), minlength=len(costs))
    limits = np.where(np.isfinite(low), low, high)
    bound = max(0.0, float(prices @ limits + np.minimum(reduced, 0.0).sum())) * unit
    return Relaxed(min(bound, most_spent(problem)), again, at, away)


def _cost_unit(problem: Problem) -> float:
    """The problem's cost for 1 of a program's: the dearest op has 1,000, far above solvers' tolerances."""
    return max(op.cost for op in problem.ops) / COST or 1.0
