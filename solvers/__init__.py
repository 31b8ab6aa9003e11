"""Solvers for rematerialization problems. Knows no torch: `Problem` in, `Schedule` out.

`solve` looks a solver up by name; `simulate` is the one judge of every answer; `register_solver` adds a solver.
"""

from solvers.auto import auto
from solvers.bounds.cost import cost_bound, relaxation_bound
from solvers.bounds.peak import first_runs_bound, minimum_peak_bound
from solvers.errors import ProblemError, SolverError, UnknownSolverError
from solvers.exact.checkmate import ilp
from solvers.instances import from_json, load, to_json
from solvers.link import Link
from solvers.moves import Copy, Move
from solvers.problem import Op, Problem, Waiting
from solvers.protocol import Answer, Solution, Solver
from solvers.schedule import InfeasibleError, Schedule, Timeline, every_op_once, simulate, validate
from solvers.search.chen import chen
from solvers.search.curve import pareto
from solvers.search.leanest import Minimum, lean_peak, minimum_peak
from solvers.solve import BRIEF, SOLVERS, register_solver, solve

__all__ = [
    "BRIEF",
    "SOLVERS",
    "Answer",
    "Copy",
    "InfeasibleError",
    "Link",
    "Minimum",
    "Move",
    "Op",
    "Problem",
    "ProblemError",
    "Schedule",
    "Solution",
    "Solver",
    "SolverError",
    "Timeline",
    "UnknownSolverError",
    "Waiting",
    "auto",
    "chen",
    "cost_bound",
    "every_op_once",
    "first_runs_bound",
    "from_json",
    "ilp",
    "lean_peak",
    "load",
    "minimum_peak",
    "minimum_peak_bound",
    "pareto",
    "register_solver",
    "relaxation_bound",
    "simulate",
    "solve",
    "to_json",
    "validate",
]
