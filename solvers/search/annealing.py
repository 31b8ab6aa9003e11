"""Simulated annealing over policies, by the exact peak and cost of their schedules.

Kirkpatrick et al., "Optimization by simulated annealing" (1983). Work is counted in simulated steps and random numbers
are seeded, so that the result depends on the problem alone; walks run in threads, independent of one another.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from threading import Event

import numpy as np

from solvers.problem import Op, Problem
from solvers.schedule import Schedule
from solvers.search.arrays import Chain, Choices, Cooling, Goal, Journal, Policy, Scratch, Tables
from solvers.search.effort import THREADS
from solvers.search.evaluation import Candidate, Evaluator
from solvers.search.machine import machine_code
from solvers.search.policy import choices, copy, keep_only, nest, scratch

PAUSES = 20  # how often a walk looks at the clock and shows its progress
Anneal = Callable[[Chain, Goal, Cooling, float, float], float]  # as `walk.anneal`, the problem aside

LARGEST_MOVE = 1024  # gaps that one move changes, at most


@dataclass(frozen=True, slots=True)
class Walk:
    """One walk to do.

    Attributes:
        start: the policy where it begins.
        hot, cold: its first and its last temperature, in units of energy.
        steps, seconds: it simulates so many steps, and cools down faster where the seconds run out before; None for no
            limit.
        seed: of its random numbers.
        tied: it decides on so many repeated blocks together.
    """

    start: Policy
    hot: float
    cold: float
    steps: float
    seconds: float | None
    seed: int
    tied: int = 1


def energy_of(goal: Goal, candidate: Candidate) -> float:
    """The energy that walks minimise: the price of re-runs, and a penalty for each byte above the budget."""
    return goal.price * candidate.extra + goal.penalty * max(0.0, candidate.peak - goal.budget)


class Search:
    """A problem as arrays, with the working memory to judge policies and walk among them.

    Attributes:
        late: whether a walk ran out of time before the end of its work.
    """

    def __init__(self, problem: Problem, tick: Callable[[float], object]) -> None:
        self.problem = problem
        self.evaluator = Evaluator(problem)
        self.tables: Tables = self.evaluator.tables
        self.choices: Choices = choices(problem, self.tables)
        self.tick = tick
        self.late = False
        self.stopped = Event()

    def keep_only(self, keep: Iterable[int] | None = None, hold: Iterable[int] | None = None) -> Candidate | None:
        """A policy of two sets of values, see `policy.keep_only`; None where its schedule is far too long."""
        sets = (None if s is None else frozenset(s) for s in (keep, hold))
        return self.judge(keep_only(self.problem, self.tables, *sets))

    def nest(self, keep: Iterable[int], hold: Iterable[int], at: Sequence[int]) -> Candidate | None:
        """A policy of segments inside segments, see `policy.nest`; None where its schedule is far too long."""
        return self.judge(nest(self.problem, self.tables, frozenset(keep), frozenset(hold), at))

    def judge(self, policy: Policy, budget: float | None = None) -> Candidate | None:
        """The peak and cost of a policy; None where its schedule is far too long.

        Args:
            policy: what to judge.
            budget: bytes that its schedule may take, None for the problem's; only matters where values may leave.
        """
        return self.evaluator.judge(policy)

    def leaner(self, candidate: Candidate) -> Candidate:
        """The candidate with all values away that may leave."""
        return candidate

    def schedule(self, candidate: Candidate) -> Schedule:
        """A candidate's schedule."""
        schedule = self.evaluator.schedule(candidate.policy)
        assert schedule is not None
        return schedule

    def walk(self, walks: Sequence[Walk], goal: Goal, enough: float = -np.inf) -> list[Candidate]:
        """Do some walks; returns for each the policy of least energy among those up to the goal's ceiling, if any.

        A walk ends early when it reaches an energy of `enough`.
        """
        if not len(self.choices.gaps):
            return []
        with ThreadPoolExecutor(THREADS) as pool:
            try:
                policies = list(pool.map(lambda w: self._walk(w, goal, enough), walks))
            except BaseException:
                self.stopped.set()  # the other walks end at their next pause
                raise
        return [best for p in policies if p is not None and (best := self.judge(p, goal.budget)) is not None]

    def _walk(self, walk: Walk, goal: Goal, enough: float) -> Policy | None:
        chain, anneal = self._begin(walk, goal)
        cooling = Cooling(walk.hot, walk.cold, float(walk.steps))
        began, progress = time.monotonic(), 0.0
        while progress < 1.0 and chain.energy[1] > enough and not self.stopped.is_set():
            before = progress
            pause = min(1.0, progress + 1 / PAUSES)
            progress = anneal(chain, goal, cooling, progress, pause)
            if walk.seconds is not None and (gone := (time.monotonic() - began) / walk.seconds) > progress:
                progress, self.late = gone, True
            self.tick((min(1.0, progress) - before) * walk.steps)
        return chain.best if chain.energy[1] < np.inf else None

    def _begin(self, walk: Walk, goal: Goal) -> tuple[Chain, Anneal]:
        room = scratch(self.tables)
        start = self.evaluator.judge(walk.start, room)
        assert start is not None, "walks begin at policies that were judged"
        choices = self.choices._replace(tied=walk.tied)
        return chain_of(walk, goal, start, room), partial(machine_code().anneal, self.tables, choices)


def chain_of(walk: Walk, goal: Goal, start: Candidate, room: Scratch) -> Chain:
    """The state of a walk at its beginning; `room` has the event lists of its start."""
    energy = energy_of(goal, start)
    energies = np.array([energy, energy if start.peak <= goal.ceiling else np.inf])
    journal = Journal(np.zeros(LARGEST_MOVE, np.int32), np.zeros((LARGEST_MOVE, 4), np.int64), np.zeros(1, np.int32))
    rng = np.array([88172645463325252 + 2654435761 * walk.seed], np.uint64)
    return Chain(copy(walk.start), copy(walk.start), energies, room, journal, rng)


@cache
def ready() -> None:
    """Compile the kernels (some seconds), or load them from the cache, so that no time limit pays for it."""
    ops = [Op("f", (), (0,), 1.0), Op("g", (0,), (1,), 1.0), Op("dg", (1,), (2,), 1.0), Op("df", (0, 2), (3,), 1.0)]
    search = Search(Problem(tuple(ops), (1, 1, 1, 1), boundary=2), lambda _: None)
    start = keep_only(search.problem, search.tables)
    search.walk([Walk(start, 1.0, 0.1, 10.0, None, 0)], Goal(1.0, 1.0, 0.0, np.inf, 0))
