"""A problem whose ops run again in groups only, as plain data.

A schedule cannot say when such a step frees a value: a framework does, when its own references end. So the record says
what is known of the step with every op once, and a choice of groups is judged by what runs it, not by `simulate`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from solvers.errors import ProblemError
from solvers.problem import Problem

State = Mapping[str, frozenset[int]]  # name of each group that runs again -> those of its ops whose results are kept


@dataclass(frozen=True, slots=True)
class Group:
    """Consecutive ops of the forward pass that run again together, once, but for those whose results are kept.

    Attributes:
        name: tells it from the others.
        begin, stop: `ops[begin:stop]` would run again.
        starts, ends: the first op of the backward pass for which it has run again, and the first one after the last
            that needs what it saves.
        inputs: values that it is given; they are held until `ends`.
        saved: values that it makes and that are saved for the backward pass -> the op up to which they are needed.
        forced: ops whose results must be kept.
        optional: ops whose results may be kept, alone or together.
        inner: names of the groups that are part of it.
    """

    name: str
    begin: int
    stop: int
    starts: int
    ends: int
    inputs: frozenset[int]
    saved: Mapping[int, int]
    forced: frozenset[int] = frozenset()
    optional: tuple[tuple[int, ...], ...] = ()
    inner: frozenset[str] = frozenset()


@dataclass(frozen=True)
class GroupedProblem:
    """A step whose ops run again in groups only. Construction checks that all ops, values and names are there.

    Attributes:
        problem: the step with every op once; a value's last reader is the op at whose end the step frees it.
        groups: what may run again, outer ones before those in them.
        savers: for each value that a group saves, the names of the groups around each place that saves it: it is freed
            early if one of the groups around each of these runs again.
        turn: the op at which the values are counted that are held for the backward pass.

    Raises:
        ProblemError: naming the group that is wrong.
    """

    problem: Problem
    groups: tuple[Group, ...]
    savers: Mapping[int, frozenset[frozenset[str]]]
    turn: int

    def __post_init__(self) -> None:
        ops, values = len(self.problem.ops), len(self.problem.sizes)
        names = [group.name for group in self.groups]
        if len(set(names)) != len(names):
            raise ProblemError("two groups have the same name")
        for at, g in enumerate(self.groups):
            inside = g.forced.union(*g.optional)
            if not (0 <= g.begin <= g.stop <= ops and 0 <= g.starts <= ops and 0 <= g.ends <= ops):
                raise ProblemError(f"group {g.name!r:.60} names ops that are none of the {ops}")
            if not inside <= frozenset(range(g.begin, g.stop)):
                raise ProblemError(f"group {g.name!r:.60} keeps results of ops that are not its own")
            if not all(0 <= v < values for v in (*g.inputs, *g.saved)) or not self.savers.keys() >= g.saved.keys():
                raise ProblemError(f"group {g.name!r:.60} has values that do not exist, or that nothing saves")
            if not g.inner <= frozenset(names[at + 1 :]):
                raise ProblemError(f"group {g.name!r:.60} has groups in it that do not follow it")

    @cached_property
    def by_name(self) -> Mapping[str, Group]:
        """The groups, in their order."""
        return {group.name: group for group in self.groups}
