"""What a choice of groups would hold, from the step with every op once: fast, and nearly right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from solvers.groups.grouped import Group, GroupedProblem, State
from solvers.problem import Problem
from solvers.schedule import every_op_once, simulate


@dataclass(frozen=True)
class MemoryModel:
    """A step with every op once, and what would be held where groups of it run again.

    A value that is saved in a group that runs again is freed when the forward pass last reads it, and is there again
    from the time the group has run again on; what the group is given stays until its backward pass has ended.

    Attributes:
        grouped: the step and its groups.
        held: bytes that it holds while each op runs.
        freed: for each value, the op before which it is freed; the number of ops for one that outlives the step.
        last_read: for each value, the last op of the forward pass that reads or writes it.
        spikes: for each group, bytes that running it again takes for a moment, beyond what it saves.
    """

    grouped: GroupedProblem
    held: NDArray[np.int64]
    freed: Sequence[int]
    last_read: Sequence[int]
    spikes: Mapping[str, int]

    @property
    def groups(self) -> Mapping[str, Group]:
        """The groups by name, outer ones first."""
        return self.grouped.by_name

    @property
    def problem(self) -> Problem:
        """The step with every op once."""
        return self.grouped.problem

    def cost(self, state: State) -> float:
        """Time of what runs again."""
        return sum(self.cost_of(name, kept) for name, kept in state.items())

    def cost_of(self, name: str, kept: frozenset[int]) -> float:
        """Time of one group's ops that run again."""
        group, ops = self.groups[name], self.problem.ops
        return sum(ops[i].cost for i in range(group.begin, group.stop) if i not in kept)

    def runs_again(self, state: State) -> set[int]:
        """The ops that run again."""
        ranges = ((range(g.begin, g.stop), kept) for name, kept in state.items() for g in [self.groups[name]])
        return {i for ops, kept in ranges for i in ops if i not in kept}

    def timeline(self, state: State) -> tuple[NDArray[np.int64], dict[int, int]]:
        """Bytes held while each op runs; and, for each value that is freed early, the op before which it is."""
        problem, sizes, total = self.problem, self.problem.sizes, len(self.problem.ops)
        changes = np.zeros(total + 2, np.int64)
        again: dict[int, list[tuple[int, int]]] = {}  # value -> when it is there once more
        until: dict[int, int] = {}  # value -> how long it is held as an input, or because it is kept
        for name, kept in state.items():
            group = self.groups[name]
            for v in group.inputs:
                until[v] = max(until.get(v, 0), group.ends)
            for i in kept:
                for v in problem.ops[i].writes:
                    until[v] = max(until.get(v, 0), group.starts)
            for v, needed in group.saved.items():
                again.setdefault(v, []).append((group.starts, needed))
            changes[group.starts] += self.spikes[name]
            changes[group.starts + 1] -= self.spikes[name]
        chosen = frozenset(state)
        dropped: dict[int, int] = {}
        for v in until.keys() | again.keys():
            end = self.freed[v]
            if end >= total:
                continue
            if v in again and all(not chosen.isdisjoint(around) for around in self.grouped.savers[v]):
                end = dropped[v] = max(self.last_read[v] + 1, until.get(v, 0))
            end = max(end, until.get(v, 0))
            changes[self.freed[v]] += sizes[v]
            changes[end] -= sizes[v]
            for start, needed in again.get(v, ()):
                if start >= end:
                    changes[start] += sizes[v]
                    changes[needed] -= sizes[v]
        return self.held + np.cumsum(changes[:total]), dropped


def memory_model(grouped: GroupedProblem) -> MemoryModel:
    """The model of a step. O(ops + reads + summed lengths of the groups)."""
    problem = grouped.problem
    held = np.array(simulate(problem, every_op_once(problem)).held, np.int64)
    uses = [(made, *readers) for made, readers in zip(problem.producer, problem.readers, strict=True)]
    total = len(problem.ops)
    freed = [total if v in problem.pinned else max(each) + 1 for v, each in enumerate(uses)]
    last_read = [max((i for i in each if i < problem.boundary), default=each[0]) for each in uses]
    spikes = {group.name: _spike(group, problem, freed) for group in grouped.groups}
    return MemoryModel(grouped, held, freed, last_read, spikes)


def _spike(group: Group, problem: Problem, freed: Sequence[int]) -> int:
    """Bytes that running a group again takes at most, beyond what it saves."""
    sizes = problem.sizes
    changes = [0] * (group.stop - group.begin + 1)
    for i in range(group.begin, group.stop):
        for v in problem.ops[i].writes:
            changes[i - group.begin] += sizes[v]
            if v not in group.saved and freed[v] < group.stop:
                changes[freed[v] - group.begin] -= sizes[v]
    now = most = 0
    for i in range(group.begin, group.stop):
        now += changes[i - group.begin]
        most = max(most, now + problem.ops[i].workspace)
    return max(0, most - sum(sizes[v] for v in group.saved))
