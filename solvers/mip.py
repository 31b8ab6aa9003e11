"""The only place that talks to the MILP solvers: HiGHS through PuLP, or CBC where HiGHS is not installed."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Any, Literal

import pulp

from solvers.milp import Model, values_of
from solvers.problem import Problem
from solvers.schedule import Schedule

Status = Literal["optimal", "feasible", "infeasible", "unknown"]
Tick = Callable[[float, float], None]  # best objective and its bound so far, in the problem's own unit


@dataclass(frozen=True, slots=True)
class Result:
    """What the solver said: its status in our own words, the steps it found, a proven bound on the objective."""

    status: Status
    steps: tuple[int, ...] | None
    bound: float


def solve(
    problem: Problem,
    model: Model,
    time_limit: float,
    start: Schedule | None = None,
    tick: Tick | None = None,
    free: Container[int] | None = None,
) -> Result:
    """Run HiGHS, or CBC where HiGHS is not installed. Interrupting it stops the solver too.

    Where `free` is given, re-runs of all other ops stay as they are in `start`: a neighbourhood of it is searched, and
    what the result says of optimality, infeasibility and bound is about that neighbourhood.
    """
    if not model.lp.variables():
        return Result("optimal", tuple(i for _, i in model.positions), model.offset)
    begin = None if start is None else values_of(problem, model, start)
    if free is not None:
        if begin is None:
            return Result("unknown", None, 0.0)
        for (_, i), run in zip(model.positions, model.runs, strict=True):
            if run is not None:
                value = begin[run.name]
                run.lowBound, run.upBound = (0, 1) if i in free else (value, value)
    if pulp.HiGHS(msg=False).available():
        status, bound = _highs(model, time_limit, begin, tick)
    else:
        status, bound = _cbc(model, time_limit)
    steps = None
    if status in ("optimal", "feasible"):
        steps = tuple(
            i for (_, i), run in zip(model.positions, model.runs, strict=True) if run is None or run.varValue > 0.5
        )
    return Result(status, steps, max(0.0, bound) * model.unit + model.offset)


def _highs(model: Model, time_limit: float, start: dict[str, float] | None, tick: Tick | None) -> tuple[Status, float]:
    import highspy

    stop, done = threading.Event(), threading.Event()
    best = [math.inf, 0.0]

    def watch(kind: Any, message: str, out: Any, answer: Any, user: Any) -> None:
        best[:] = out.mip_primal_bound, out.mip_dual_bound
        if stop.is_set():
            answer.user_interrupt = True

    class Solver(pulp.HiGHS):  # type: ignore[misc]  # PuLP is untyped
        def callSolver(self, lp: Any) -> None:
            highs = lp.solverModel
            if start is not None:
                solution = highspy.HighsSolution()
                solution.col_value = [start.get(v.name, 0.0) for v in lp.variables()]
                highs.setSolution(solution)
            highs.run()

    # One thread: on these models more gain little, and the answer then does not hang on the machine's core count.
    # The gaps: by default HiGHS calls 1e-4 of the objective optimal.
    solver = Solver(
        msg=False,
        threads=1,
        timeLimit=max(0.1, time_limit),
        gapRel=0.0,
        gapAbs=1e-7,
        random_seed=1,
        callbackTuple=(watch, None),
        callbacksToActivate=[highspy.cb.HighsCallbackType.kCallbackMipInterrupt],
    )
    failure: list[Exception] = []

    def work() -> None:
        try:
            solver.actualSolve(model.lp)
        except Exception as e:
            failure.append(e)
        finally:
            done.set()

    # In a thread of its own, so that an interrupt is seen at once and reaches HiGHS through its callback. An event says
    # when it ends: a `join` that is interrupted takes the thread for ended (Python 3.11).
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        while not done.wait(0.05):
            if tick is not None:
                tick(best[0] * model.unit + model.offset, best[1] * model.unit + model.offset)
    except BaseException:
        stop.set()
        done.wait()
        raise
    finally:
        thread.join()
    if failure and not isinstance(
        failure[0], (KeyError, IndexError)
    ):  # what PuLP raises for a status it has no word for
        raise failure[0]
    status = model.lp.solverModel.getModelStatus()
    info = model.lp.solverModel.getInfo()
    bound = info.mip_dual_bound if math.isfinite(info.mip_dual_bound) else 0.0
    if status == highspy.HighsModelStatus.kOptimal and not failure:
        return "optimal", model.lp.solverModel.getObjectiveValue()
    if status in (highspy.HighsModelStatus.kInfeasible, highspy.HighsModelStatus.kUnboundedOrInfeasible):
        return "infeasible", 0.0
    if info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible and not failure:
        return "feasible", bound
    return "unknown", bound


def _cbc(model: Model, time_limit: float) -> tuple[Status, float]:
    """CBC says nothing of its bound through PuLP: only an optimal answer has one."""
    solver = pulp.PULP_CBC_CMD(
        msg=False, timeLimit=max(1.0, time_limit), gapRel=0.0, gapAbs=1e-7, threads=1, options=["RandomCbcSeed 1"]
    )
    began = time.perf_counter()
    try:
        model.lp.solve(solver)
    except pulp.PulpSolverError:
        return "unknown", 0.0
    if model.lp.sol_status == pulp.LpSolutionOptimal:
        return "optimal", pulp.value(model.lp.objective) or 0.0
    if model.lp.sol_status == pulp.LpSolutionIntegerFeasible:
        return "feasible", 0.0
    # CBC calls a search that time cut short before its first answer infeasible too.
    if model.lp.status == pulp.LpStatusInfeasible and time.perf_counter() - began < 0.9 * time_limit:
        return "infeasible", 0.0
    return "unknown", 0.0
