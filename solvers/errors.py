"""Errors that solvers raise; `InfeasibleError`, which carries a schedule, is in `solvers.schedule`."""


class SolverError(Exception):
    """Base of every error that `solvers` raises on purpose."""


class ProblemError(SolverError, ValueError):
    """A problem, schedule or file is not well formed; the message names the place."""


class UnknownSolverError(SolverError, ValueError):
    """No solver of this name is registered; the message lists the registered ones."""
