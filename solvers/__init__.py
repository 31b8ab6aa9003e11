"""Solvers for rematerialization problems. Knows no torch: `Problem` in, `Schedule` out.

`solve` looks a solver up by name; `simulate` is the one judge of every answer.
"""

from solvers.auto import Minimum, auto, minimum_peak
from solvers.bounds import cost_bound, minimum_peak_bound, relaxation_bound
from solvers.chen import chen
from solvers.errors import InfeasibleError, ProblemError, SolverError, UnknownSolverError
from solvers.ilp import ilp
from solvers.pareto import pareto
from solvers.problem import Op, Problem, Waiting, from_json, load, to_json
from solvers.schedule import Schedule, Timeline, every_op_once, simulate, validate
from solvers.solve import SOLVERS, Solution, solve

__all__ = [
    "SOLVERS",
    "InfeasibleError",
    "Minimum",
    "Op",
    "Problem",
    "ProblemError",
    "Schedule",
    "Solution",
    "SolverError",
    "Timeline",
    "UnknownSolverError",
    "Waiting",
    "auto",
    "chen",
    "cost_bound",
    "every_op_once",
    "from_json",
    "ilp",
    "load",
    "minimum_peak",
    "minimum_peak_bound",
    "pareto",
    "relaxation_bound",
    "simulate",
    "solve",
    "to_json",
    "validate",
]
