"""The only module that talks to MILP solvers: HiGHS through PuLP, or CBC where HiGHS is not installed."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from typing import Any, Literal

import pulp

from solvers.exact.checkmate_model import Model, values_of
from solvers.problem import Problem
from solvers.schedule import Schedule

Status = Literal["optimal", "feasible", "infeasible", "unknown"]
Tick = Callable[[float, float], None]  # best objective and its bound so far, in the problem's own unit


@dataclass(frozen=True, slots=True)
class Result:
    """The solver's status in our own words, the steps of its solution, and a proven bound on the objective."""

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
    the result's status and bound are about that neighbourhood.
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


@dataclass
class _Watch:
    """HiGHS calls it while it searches: it notes the best objective and its bound, and stops the search where asked."""

    best: float = math.inf
    bound: float = 0.0
    stop: threading.Event = field(default_factory=threading.Event)

    def __call__(self, kind: Any, message: str, out: Any, answer: Any, user: Any) -> None:
        self.best, self.bound = out.mip_primal_bound, out.mip_dual_bound
        if self.stop.is_set():
            answer.user_interrupt = True


def _highs(model: Model, time_limit: float, start: dict[str, float] | None, tick: Tick | None) -> tuple[Status, float]:
    """Run HiGHS through PuLP's solver object; `pulp.HiGHS` takes no start, so that it goes to the solver model itself.

    One thread: on these models more threads gain little, and the answer then does not depend on the number of cores.
    The gaps: by default HiGHS calls 1e-4 of the objective optimal.
    """
    import highspy  # here, as CBC does without it

    watch, lp = _Watch(), model.lp
    solver = pulp.HiGHS(
        msg=False,
        threads=1,
        timeLimit=max(0.1, time_limit),
        gapRel=0.0,
        gapAbs=1e-7,
        random_seed=1,
        callbackTuple=(watch, None),
        callbacksToActivate=[highspy.cb.HighsCallbackType.kCallbackMipInterrupt],
    )
    solver.createAndConfigureSolver(lp)
    solver.buildSolverModel(lp)
    highs = lp.solverModel
    if start is not None:
        solution = highspy.HighsSolution()
        solution.col_value = [start.get(v.name, 0.0) for v in lp.variables()]
        highs.setSolution(solution)

    def poll() -> None:
        if tick is not None:
            tick(watch.best * model.unit + model.offset, watch.bound * model.unit + model.offset)

    _in_thread(lambda: solver.callSolver(lp), poll, watch.stop)
    status, info = highs.getModelStatus(), highs.getInfo()
    if status in (highspy.HighsModelStatus.kInfeasible, highspy.HighsModelStatus.kUnboundedOrInfeasible):
        return "infeasible", 0.0
    bound = info.mip_dual_bound if math.isfinite(info.mip_dual_bound) else 0.0
    if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
        return "unknown", bound
    try:
        solver.findSolutionValues(lp)
    except KeyError:  # PuLP has no word for this status, as for a search that ran out of memory
        return "unknown", bound
    optimal = status == highspy.HighsModelStatus.kOptimal
    return ("optimal", highs.getObjectiveValue()) if optimal else ("feasible", bound)


def _in_thread(work: Callable[[], object], poll: Callable[[], object], stop: threading.Event) -> None:
    """Do some work in a thread of its own while this one polls; sets `stop` where polling raises, as Ctrl-C does.

    An event says when the work ends: a `join` that is interrupted takes the thread for ended (Python 3.11).
    """
    done = threading.Event()
    failures: list[Exception] = []

    def run() -> None:
        try:
            work()
        except Exception as e:
            failures.append(e)
        finally:
            done.set()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        while not done.wait(0.05):
            poll()
    except BaseException:
        stop.set()
        done.wait()
        raise
    finally:
        thread.join()
    if failures:
        raise failures[0]


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
