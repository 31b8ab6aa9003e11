"""Simulated annealing over policies, judged by the exact peak and cost of their schedules.

Kirkpatrick et al., "Optimization by simulated annealing" (1983). Work is counted in simulated steps and random numbers
are seeded, so that what is found depends on the problem alone; walks run in threads, each by itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from threading import Event

import numpy as np

from solvers.compiled import Choices, Goal, Journal, Policy, Scratch, Tables, anneal, link_all, peak_of, unroll
from solvers.policy import choices, copy, keep_only, nest, realize, scratch, tables
from solvers.problem import Op, Problem
from solvers.schedule import Schedule

THREADS = 2
PAUSES = 20  # how often a walk looks at the clock and shows its progress
CHANGES = 1024  # gaps that one move changes, at most
RATE = 40e6  # simulated steps a second and thread, about: how a time limit becomes a count


@dataclass(frozen=True, slots=True)
class Effort:
    """How much to search: simulated steps of each thread, and the time.monotonic() by which to be done, or None."""

    steps: float
    deadline: float | None = None

    @classmethod
    def within(cls, seconds: float) -> Effort:
        """What a time limit allows; the rest of it is for relaxations, and for a machine slower than expected."""
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


@dataclass(frozen=True, slots=True)
class Found:
    """A policy and what its schedule comes to: bytes, and the cost of its re-runs."""

    policy: Policy
    peak: int
    extra: float


@dataclass(frozen=True, slots=True)
class Walk:
    """Where to begin, how hot (in units of energy), for how many steps and seconds at most, seed of random numbers."""

    start: Policy
    hot: float
    cold: float
    steps: float
    seconds: float | None
    seed: int


def energy_of(goal: Goal, found: Found) -> float:
    """What a walk makes small."""
    return goal.price * found.extra + goal.penalty * max(0.0, found.peak - goal.budget)


class Search:
    """A problem made ready for walks."""

    def __init__(self, problem: Problem, tick: Callable[[float], object]) -> None:
        self.problem = problem
        self.tables: Tables = tables(problem)
        self.choices: Choices = choices(problem, self.tables)
        self.scratch: Scratch = scratch(self.tables)
        self.tick = tick
        self.late = False
        self.stopped = Event()

    def keep_only(self, keep: Iterable[int] | None = None, hold: Iterable[int] | None = None) -> Found | None:
        """A policy of two sets of values, see `policy.keep_only`; None where it runs far too long."""
        sets = (None if s is None else frozenset(s) for s in (keep, hold))
        return self.judge(keep_only(self.problem, self.tables, *sets))

    def nest(self, keep: Iterable[int], hold: Iterable[int], at: Sequence[int]) -> Found | None:
        """A policy of segments inside segments, see `policy.nest`; None where it runs far too long."""
        return self.judge(nest(self.problem, self.tables, frozenset(keep), frozenset(hold), at))

    def judge(self, policy: Policy) -> Found | None:
        """What a policy comes to; None where it runs far too long."""
        return self._judge(policy, self.scratch)

    def _judge(self, policy: Policy, room: Scratch) -> Found | None:
        link_all(policy, room)
        steps, extra = unroll(self.tables, policy, room, np.inf)
        if steps < 0:
            return None
        return Found(policy, peak_of(self.tables, room, steps, self.problem.resident, np.inf), extra)

    def schedule(self, policy: Policy) -> Schedule:
        """A policy's schedule."""
        found = realize(self.tables, policy, self.scratch)
        assert found is not None
        return found

    def walk(self, walks: Sequence[Walk], goal: Goal, enough: float = -np.inf) -> list[Found]:
        """What walks found: for each the policy of least energy with a peak up to the goal's ceiling, where it met one.

        A walk ends early when an energy of `enough` is reached. One that runs late cools down faster.
        """
        if not len(self.choices.gaps):
            return []
        with ThreadPoolExecutor(THREADS) as pool:
            try:
                policies = list(pool.map(lambda w: self._walk(w, goal, enough), walks))
            except BaseException:
                self.stopped.set()  # the other walks end at their next pause
                raise
        return [found for p in policies if p is not None and (found := self.judge(p)) is not None]

    def _walk(self, walk: Walk, goal: Goal, enough: float) -> Policy | None:
        room = scratch(self.tables)
        here, best = (copy(walk.start) for _ in range(2))
        start = self._judge(here, room)
        assert start is not None, "walks begin at policies that were judged"
        energy = energy_of(goal, start)
        now = np.array([energy, energy if start.peak <= goal.ceiling else np.inf])
        journal = Journal(np.zeros(CHANGES, np.int32), np.zeros((CHANGES, 4), np.int32), np.zeros(1, np.int32))
        rng = np.array([88172645463325252 + 2654435761 * walk.seed], np.uint64)
        began, progress = time.monotonic(), 0.0
        while progress < 1.0 and now[1] > enough and not self.stopped.is_set():
            before = progress
            progress = anneal(
                self.tables,
                here,
                best,
                room,
                self.choices,
                journal,
                rng,
                goal,
                now,
                walk.hot,
                walk.cold,
                progress,
                min(1.0, progress + 1 / PAUSES),
                float(walk.steps),
            )
            if walk.seconds is not None and (gone := (time.monotonic() - began) / walk.seconds) > progress:
                progress, self.late = gone, True
            self.tick((min(1.0, progress) - before) * walk.steps)
        return best if now[1] < np.inf else None


@cache
def ready() -> None:
    """Compile, or load what was compiled before, so that no time limit pays for it: about 10 s, once on a machine."""
    ops = [Op("f", (), (0,), 1.0), Op("g", (0,), (1,), 1.0), Op("dg", (1,), (2,), 1.0), Op("df", (0, 2), (3,), 1.0)]
    search = Search(Problem(tuple(ops), (1, 1, 1, 1), boundary=2), lambda _: None)
    start = keep_only(search.problem, search.tables)
    search.walk([Walk(start, 1.0, 0.1, 10.0, None, 0)], Goal(1.0, 1.0, 0.0, np.inf, 0))
