"""Policies with moves: judged, walked among, and written as schedules."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from solvers.moves import Move
from solvers.problem import Problem
from solvers.schedule import Schedule
from solvers.search.annealing import Anneal, Search, Walk, chain_of
from solvers.search.arrays import Chain, Goal, Ints, Policy, Scratch
from solvers.search.evaluation import Candidate
from solvers.search.machine import machine_code, move_code
from solvers.search.policy import choices, copy, droppable, scratch
from solvers.search.wires import AWAY, Line, wires, yard


class MoveSearch(Search):
    """A `Search` whose policies also say which values stay on the host, see `wires.AWAY`.

    Attributes:
        both: the gaps of values that may be recomputed, and the gaps of these and of values that may leave.
        movable: the gaps of values that may leave, those that take longest first.
    """

    def __init__(self, problem: Problem, tick: Callable[[float], object]) -> None:
        super().__init__(problem, tick)
        self.wires = wires(problem)
        self.room = scratch(self.tables)
        self.line = self._line()
        movable = np.flatnonzero(self.wires.movable).tolist()
        self.both = (self.choices, choices(problem, self.tables, {*droppable(problem), *movable}))
        self.choices = self.both[1]
        self.movable = self._movable()

    def _movable(self) -> Ints:
        t, gaps = self.tables, self.both[1].gaps
        clock = np.concatenate(([0.0], np.cumsum(t.cost)))
        gaps = gaps[(self.wires.movable[t.value[gaps]] == 1) & (t.uses[gaps] < len(t.cost))]
        longest: Ints = gaps[np.argsort(clock[t.start[gaps]] - clock[t.uses[gaps]], kind="stable")]
        return longest

    def _line(self) -> Line:
        return Line(self.wires, yard(self.tables, len(self.room.steps)))

    def judge(self, policy: Policy, budget: float | None = None) -> Candidate | None:
        """The peak and cost of a policy, laid out within a budget in bytes; None for that of the problem."""
        within = float(self.problem.budget or 0) if budget is None else budget
        return self._judge(policy, within, self.room, self.line)[0]

    def leaner(self, candidate: Candidate) -> Candidate:
        """The candidate with all values away that may leave, as long as they can be."""
        return self.away(candidate.policy, self.movable, 0.0) or candidate

    def away(self, policy: Policy, gaps: Ints, budget: float | None = None) -> Candidate | None:
        """The policy with the values away that it keeps in some gaps."""
        changed = copy(policy)
        changed.keep[gaps[changed.keep[gaps] > 0]] = AWAY
        return self.judge(changed, budget)

    def schedule(self, candidate: Candidate) -> Schedule:
        """A candidate's schedule."""
        _, steps = self._judge(candidate.policy, candidate.room, self.room, self.line)
        order = tuple(int(i) if i >= 0 else -1 - int(i) for i in self.room.steps[:steps])
        return Schedule(order, self._moves(steps))

    def _judge(self, policy: Policy, budget: float, room: Scratch, line: Line) -> tuple[Candidate | None, int]:
        t, code = self.tables, machine_code()
        code.link_all(policy, room)
        steps, extra = code.unroll(t, policy, room, np.inf)
        if steps < 0:
            return None, steps
        peak, stall = move_code().judge_moves(
            t, line.wires, policy, room, line.yard, steps, self.problem.resident, budget
        )
        return Candidate(policy, peak, extra + stall, budget), steps

    def _moves(self, steps: int) -> tuple[Move, ...]:
        """The moves that were laid out last."""
        y = self.line.yard
        value, sends, fetches = y.value.tolist(), y.next_send.tolist(), y.next_fetch.tolist()
        freed: list[list[int]] = [[] for _ in range(steps)]
        for k in range(int(y.used[0])):
            if value[k] >= 0:
                freed[int(y.free[k])].append(value[k])
        moves: list[Move] = []
        for at in range(steps):
            moves += [Move("send", value[k], at) for k in _listed(int(y.at_send[at]), sends)]
            moves += [Move("free", v, at) for v in freed[at]]
            moves += [Move("fetch", value[k], at) for k in _listed(int(y.at_fetch[at]), fetches)]
        return tuple(moves)

    def _begin(self, walk: Walk, goal: Goal) -> tuple[Chain, Anneal]:
        room, line = scratch(self.tables), self._line()
        start, _ = self._judge(walk.start, goal.budget, room, line)
        assert start is not None, "walks begin at policies that were judged"
        own, both = (c._replace(tied=walk.tied) for c in self.both)
        anneal = partial(move_code().anneal_moves, self.tables, line, (own, both))
        return chain_of(walk, goal, start, room), anneal


def _listed(first: int, following: list[int]) -> list[int]:
    found = []
    while first >= 0:
        found.append(first)
        first = following[first]
    return found


def search_of(problem: Problem, tick: Callable[[float], object]) -> Search:
    """The search for a problem, with moves where it has a link."""
    return Search(problem, tick) if problem.link is None else MoveSearch(problem, tick)
