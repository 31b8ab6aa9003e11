"""The work of a search: counts of simulated steps, and a deadline where there is a time limit."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from solvers.problem import Problem
from solvers.progress import bar

THREADS = 2
RATE = 40e6  # simulated steps a second and thread, about: it turns a time limit into a count
STEPS = 80e6  # of each thread, without a time limit: 2 s; as many again for the lowest peak
STEPS_PER_OP = 45e3  # and for each op: 10 s for a decoder of 80 layers
CHANGES = 4000  # of each gap by a walk, at most: small problems are settled long before


@dataclass(frozen=True, slots=True)
class Effort:
    """The work allowed: simulated steps of each thread, and a deadline on `time.monotonic()`'s clock, or None."""

    steps: float
    deadline: float | None = None

    @classmethod
    def within(cls, seconds: float) -> Effort:
        """The work of a time limit; a fifth of it is for relaxations, and for a machine slower than expected."""
        return cls(0.8 * RATE * seconds, time.monotonic() + seconds)

    def part(self, share: float) -> Effort:
        """A share of the steps, and of the time that is left."""
        return Effort(share * self.steps, self.until(share))

    def until(self, share: float) -> float | None:
        """The time.monotonic() when a share of the time that is left has passed."""
        left = self.left()
        return None if left is None else time.monotonic() + share * left

    def left(self) -> float | None:
        """Seconds until the deadline, a little more than none where it has passed."""
        return None if self.deadline is None else max(1e-3, self.deadline - time.monotonic())


def effort_of(problem: Problem, time_limit: float | None) -> Effort:
    """The work of a time limit in seconds; None for the default, which depends on the problem alone."""
    default = Effort(STEPS + STEPS_PER_OP * len(problem.ops))
    return default if time_limit is None else Effort.within(time_limit)


def bar_of(effort: Effort, progress: bool | None) -> Any:
    """A bar for the steps of a search."""
    return bar("solving", progress, total=THREADS * effort.steps, unit=" steps", unit_scale=True)


def each_of(problem: Problem, gaps: int, effort: Effort, walks: int) -> tuple[float, float | None]:
    """Steps and seconds for each of the walks that share an effort, on a problem with so many gaps to decide on."""
    left = effort.left()
    longest = CHANGES * gaps * len(problem.ops)
    return min(longest, effort.steps * THREADS / walks), None if left is None else left * THREADS / walks
