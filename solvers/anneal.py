"""Simulated annealing over the keep and hold bits of a policy, judged by the exact peak and cost of its schedule.

Kirkpatrick et al., "Optimization by simulated annealing" (1983). The random numbers are seeded and the work is
counted in simulated steps, so the answer depends on the problem alone.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from .policy import droppable, realize
from .problem import Problem
from .schedule import Schedule, peak_and_cost

CHANGES = 300  # of each value: small problems are settled long before
Energy = Callable[[int, float], float]  # peak in bytes, cost -> what to make small


@dataclass(frozen=True, slots=True)
class Candidate:
    """A policy and what its schedule comes to."""

    keep: frozenset[int]
    hold: frozenset[int]
    schedule: Schedule
    peak: int
    cost: float


class Search:
    """Tries policies and counts the simulated steps that this takes."""

    def __init__(self, problem: Problem, tick: Callable[[int], object]) -> None:
        self.problem = problem
        self.values = droppable(problem)
        self.steps = 0
        self.tick = tick

    def attempt(self, keep: frozenset[int], hold: frozenset[int] | None = None) -> Candidate:
        """The candidate of a policy; `hold` None holds everything recomputed."""
        schedule = realize(self.problem, keep, hold)
        peak, cost = peak_and_cost(self.problem, schedule)
        self.steps += len(schedule.steps)
        self.tick(len(schedule.steps))
        return Candidate(keep, frozenset(self.values) if hold is None else hold, schedule, peak, cost)


def anneal(
    search: Search,
    start: Candidate,
    energy: Energy,
    hottest: float,
    steps: int,
    fits: Callable[[Candidate], bool] = lambda _: True,
) -> Candidate:
    """The candidate of least energy that fits, met on a walk of single changes from `start`; `start` if none was met.

    A value changes between kept, recomputed and held, and recomputed for each use. Changes for the worse by d are
    taken with probability exp(-d / t), where the temperature t falls from `hottest` to a thousandth of it.

    Args:
        search: the problem, and the count of steps.
        start: where the walk begins.
        energy: what to make small.
        hottest: temperature at the start, in units of energy.
        steps: simulated steps to spend; fewer where a few hundred changes of each value are done before.
        fits: what may be returned; the walk goes over others too.
    """
    values, rng = search.values, random.Random(0)
    here = best = start
    e_here = energy(start.peak, start.cost)
    e_best = e_here if fits(start) else math.inf
    begin = search.steps
    steps = min(steps, CHANGES * len(values) * len(start.schedule.steps))
    while steps and (spent := (search.steps - begin) / steps) < 1:
        v = rng.choice(values)
        keep, hold = here.keep ^ {v}, here.hold
        if v not in here.keep and rng.random() < 0.4:
            keep, hold = here.keep, here.hold ^ {v}
        there = search.attempt(keep, hold)
        e_there = energy(there.peak, there.cost)
        rise = e_there - e_here
        if rise <= 0 or rng.random() < math.exp(-rise / (hottest * 1e-3**spent)):
            here, e_here = there, e_there
            if e_here < e_best and fits(here):
                best, e_best = here, e_here
    return best
