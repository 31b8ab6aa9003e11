"""One call for every solver: look it up, run it, judge its answer, say how good it is."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from solvers.auto import auto
from solvers.bounds import cost_bound
from solvers.chen import chen
from solvers.errors import ProblemError, UnknownSolverError
from solvers.ilp import ilp
from solvers.problem import Problem
from solvers.schedule import Answer, Schedule, Timeline, validate


@dataclass(frozen=True, slots=True)
class Solution:
    """A schedule, judged.

    Attributes:
        schedule: what to run.
        timeline: its replay by `simulate`.
        solver: the solver's name.
        seconds: how long it took.
        bound: proven lower bound on the cost of any schedule within the budget.
        note: what the solver wants known (what it coarsened, that it ran out of time).
    """

    schedule: Schedule
    timeline: Timeline
    solver: str
    seconds: float
    bound: float
    note: str = ""

    @property
    def gap(self) -> float:
        """Cost over bound, less one: 0.02 means at most 2 % above the best possible."""
        return self.timeline.cost / self.bound - 1 if self.bound else 0.0


SOLVERS: dict[str, Callable[[Problem, float | None, bool | None], Answer]] = {
    "auto": lambda problem, time_limit, progress: auto(problem, time_limit=time_limit, progress=progress),
    "chen": lambda problem, time_limit, progress: Answer(chen(problem)),
    "ilp": lambda problem, time_limit, progress: ilp(problem, time_limit=time_limit, progress=progress),
}


def solve(
    problem: Problem, solver: str = "auto", *, time_limit: float | None = None, progress: bool | None = None
) -> Solution:
    """Solve a problem within its budget.

    Args:
        problem: what to schedule.
        solver: one of `SOLVERS`.
        time_limit: seconds that a solver which searches by the clock may take; None for its default.
        progress: show a progress bar; None for only where a terminal is watching.

    Raises:
        UnknownSolverError: `solver` is not one of `SOLVERS`.
        ProblemError: the time limit is not a positive number.
        InfeasibleError: no schedule within the budget was found.
    """
    if solver not in SOLVERS:
        raise UnknownSolverError(f"solver {solver!r} is not known; the known ones are {', '.join(SOLVERS)}")
    check_time_limit(time_limit)
    start = time.perf_counter()
    answer = SOLVERS[solver](problem, time_limit, progress)
    timeline = validate(problem, answer.schedule)
    bound = min(timeline.cost, max(answer.bound, cost_bound(problem)))
    return Solution(answer.schedule, timeline, solver, time.perf_counter() - start, bound, answer.note)


def check_time_limit(seconds: float | None) -> None:
    """Raise ProblemError where a time limit is neither None nor a positive number of seconds."""
    if seconds is not None and not (math.isfinite(seconds) and seconds > 0):
        raise ProblemError(f"time limit {seconds!r} is not a positive number of seconds")
