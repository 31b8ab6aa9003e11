"""One call for every solver: look it up in the registry, run it, and judge its answer."""

from __future__ import annotations

import time
from functools import partial

from solvers.auto import auto
from solvers.bounds.cost import cost_bound
from solvers.errors import SolverError, UnknownSolverError
from solvers.exact.checkmate import ilp
from solvers.problem import Problem
from solvers.protocol import Answer, Solution, Solver, check_time_limit
from solvers.schedule import validate
from solvers.search.chen import chen


def _chen(problem: Problem, *, time_limit: float | None = None, progress: bool | None = None) -> Answer:
    return Answer(chen(problem))


BRIEF = "auto, briefly"  # the name of `auto` where it gave a schedule for a moment
SOLVERS: dict[str, Solver] = {"auto": auto, "chen": _chen, "ilp": ilp}  # the registry: the names that `solve` knows


def register_solver(name: str, solver: Solver) -> None:
    """Give a solver a name, by which `solve`, `planner.plan` and the command lines know it from then on.

    Args:
        name: not the name of another solver.
        solver: see `Solver`.

    Raises:
        SolverError: the name is empty or another solver has it, or `solver` cannot be called.

    Examples:
        >>> from solvers.schedule import every_op_once
        >>> register_solver("once", lambda problem, *, time_limit=None, progress=None: Answer(every_op_once(problem)))
        >>> {'auto', 'chen', 'ilp', 'once'} <= set(SOLVERS)
        True
        >>> del SOLVERS["once"]
    """
    if not (isinstance(name, str) and name):
        raise SolverError(f"{name!r} is no name of a solver; give a string that is not empty")
    if not callable(solver):
        raise SolverError(
            f"solver {name!r} is {solver!r:.60}, which cannot be called; give a function, see solvers.Solver"
        )
    if SOLVERS.get(name, solver) is not solver:
        raise SolverError(f"another solver has the name {name!r}; give a name that is none of {', '.join(SOLVERS)}")
    SOLVERS[name] = solver


def solve(
    problem: Problem,
    solver: str = "auto",
    *,
    time_limit: float | None = None,
    progress: bool | None = None,
    brief: bool = False,
) -> Solution:
    """Solve a problem within its budget.

    Args:
        problem: what to schedule.
        solver: the name of a registered solver: a key of `SOLVERS`.
        time_limit: seconds that a solver which searches by the clock may take; None for its default.
        progress: show a progress bar; None for only where a terminal is watching.
        brief: whether a schedule will do that is used for a moment only: `auto` then gives its first one that fits, and
            the solution's solver is named `BRIEF` if a full search may find a cheaper one.

    Raises:
        UnknownSolverError: no solver of this name is registered.
        ProblemError: the time limit is not a positive number, or the solver's schedule breaks a rule.
        SolverError: the solver returned something else than an `Answer`.
        InfeasibleError: the solver knows no schedule within the budget.
    """
    if solver not in SOLVERS:
        raise UnknownSolverError(f"solver {solver!r} is not known; the known ones are {', '.join(SOLVERS)}")
    check_time_limit(time_limit)
    start = time.perf_counter()
    run = partial(auto, brief=True) if brief and SOLVERS[solver] is auto else SOLVERS[solver]
    answer = run(problem, time_limit=time_limit, progress=progress)
    if not isinstance(answer, Answer):
        raise SolverError(f"solver {solver!r} returned {answer!r:.60}; a solver returns solvers.Answer(schedule)")
    timeline = validate(problem, answer.schedule)
    bound = min(timeline.cost, max(answer.bound, cost_bound(problem)))
    name = BRIEF if answer.brief else solver
    return Solution(answer.schedule, timeline, name, time.perf_counter() - start, bound, answer.note)
