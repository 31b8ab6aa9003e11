"""The interface of a solver: a callable from a `Problem` to an `Answer`; a judged `Answer` is a `Solution`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from solvers.errors import ProblemError
from solvers.problem import Problem
from solvers.schedule import Schedule, Timeline


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of a solver, before `solvers.solve` judges it.

    Attributes:
        schedule: the cheapest schedule within the budget that the solver reached.
        bound: the highest lower bound on the cost of any schedule that the solver proved; 0 where it proved none.
        note: a remark for the user: the problem was coarsened, or time ran out.
        brief: whether the search ended early, as it was asked to be brief.
    """

    schedule: Schedule
    bound: float = 0.0
    note: str = ""
    brief: bool = False


@dataclass(frozen=True, slots=True)
class Solution:
    """An answer, judged.

    Attributes:
        schedule: the schedule to run.
        timeline: its replay by `simulate`.
        solver: the solver's name.
        seconds: how long the solver took.
        bound: proven lower bound on the cost of any schedule within the budget.
        note: the solver's remark for the user (the problem was coarsened, or time ran out).
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


class Solver(Protocol):
    """A callable that schedules a problem within its budget; `solvers.register_solver` gives it a name.

    `solve` replays the schedule by `validate` before it believes it, and takes the larger of the answer's bound and
    `cost_bound`. The bound of an answer is taken on trust: it must hold for every schedule, also for those that move
    values where the problem has a link. A solver that knows no moves ignores the link and proves no bound then (0): its
    schedules are valid with a link, too. `auto` moves values; `chen` and `ilp` do not.

    Args:
        problem: what to schedule.
        time_limit: seconds that the solver may take, positive; None for its default. A solver that does not search by
            the clock may ignore it.
        progress: show a progress bar; None for only where a terminal is watching.

    Raises:
        InfeasibleError: the solver knows no schedule within the budget.
    """

    def __call__(
        self, problem: Problem, *, time_limit: float | None = None, progress: bool | None = None
    ) -> Answer: ...


def check_time_limit(seconds: float | None) -> None:
    """Raise ProblemError where a time limit is neither None nor a positive number of seconds."""
    if seconds is not None and not (math.isfinite(seconds) and seconds > 0):
        raise ProblemError(f"time limit {seconds!r} is not a positive number of seconds")
