"""What a solver can refuse. `planner` turns these into its own errors; nothing here knows torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from solvers.schedule import Schedule


class SolverError(Exception):
    """Base of every error that `solvers` raises on purpose."""


class ProblemError(SolverError, ValueError):
    """A problem, schedule or file that is not well formed; the message names the place."""


class UnknownSolverError(SolverError, ValueError):
    """A solver name that is not known; the message lists the known ones."""


class InfeasibleError(SolverError):
    """No schedule within the budget was found.

    Attributes:
        budget: the budget that was asked for, in bytes.
        minimum: the peak of the leanest schedule that the solver found, in bytes; solving again with this
            budget succeeds.
        bound: a proven lower bound on the peak of any schedule, in bytes.
        schedule: that leanest schedule.
    """

    def __init__(self, budget: int, minimum: int, bound: int, schedule: Schedule) -> None:
        super().__init__(
            f"budget of {budget} bytes: the leanest schedule found peaks at {minimum} bytes "
            f"(proven: none peaks under {bound}); raise the budget to {minimum} bytes or more"
        )
        self.budget = budget
        self.minimum = minimum
        self.bound = bound
        self.schedule = schedule
