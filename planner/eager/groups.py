"""Candidates of a traced step as groups of its problem, and the choices of a search among them as recipes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from planner.core.recipe import Choice
from planner.core.step import Step
from planner.eager.candidates import Candidate
from planner.eager.lower import values_of
from planner.eager.trace import Trace
from solvers import Problem
from solvers.groups.grouped import Group, GroupedProblem, State


def grouped_problem(trace: Trace, step: Step, candidates: Sequence[Candidate]) -> GroupedProblem:
    """The step without checkpoints, with its candidates as groups.

    Storages that were there before the step are values of no problem: whatever is checkpointed, they stay.

    Args:
        trace: of the step, a detailed one.
        step: the same, lowered.
        candidates: of the trace, outer ones before those in them.
    """
    values, total = values_of(trace), len(trace.ops)
    around: dict[int, set[str]] = {-1: set(), **{call: set() for call in range(len(trace.calls))}}
    for candidate in candidates:
        for call in candidate.calls:
            around[call].add(candidate.path)
    inner: dict[str, set[str]] = {candidate.path: set() for candidate in candidates}
    for candidate in candidates:
        for path in around[candidate.calls.start] - {candidate.path}:
            inner[path].add(candidate.path)
    groups = tuple(
        Group(
            c.path,
            c.begin,
            c.stop,
            c.starts,
            min(c.ends, total),
            frozenset(values[s] for s in c.inputs if s in values),
            {values[s]: min(needed, total) for s, needed in c.saved.items()},
            c.forced,
            c.optional,
            frozenset(inner[c.path]),
        )
        for c in candidates
    )
    savers: dict[int, set[frozenset[str]]] = {v: set() for group in groups for v in group.saved}
    for saved in trace.saved:
        if (v := values.get(saved.storage, -1)) in savers:
            savers[v].add(frozenset(around[saved.within]))
    turn = next((i for i, op in enumerate(trace.ops) if op.phase != "forward"), 0)
    problem = _passes(step.problem, total, len(values))
    return GroupedProblem(problem, groups, {v: frozenset(places) for v, places in savers.items()}, turn)


def _passes(problem: Problem, total: int, values: int) -> Problem:
    """The first ops and values of a problem alone.

    Beside them it has the optimizer's step, which no group changes, and bytes that are held from the first op to the
    last, which become resident.
    """
    ops = (
        replace(op, reads=tuple(v for v in op.reads if v < values), writes=tuple(v for v in op.writes if v < values))
        for op in problem.ops[:total]
    )
    resident = problem.resident + sum(problem.sizes[values:])
    return replace(problem, ops=tuple(ops), sizes=problem.sizes[:values], resident=resident)


def choice_of(candidates: Mapping[str, Candidate], trace: Trace, state: State) -> Choice:
    """What to checkpoint, in terms that the runtime can follow."""
    return Choice(
        {
            path: {at: trace.ops[i].target for at, i in enumerate(_counted(candidates[path], trace)) if i in kept}
            for path, kept in state.items()
        }
    )


def state_of(candidates: Mapping[str, Candidate], trace: Trace, choice: Choice) -> State | None:
    """A choice in numbers of this step's ops; None where the step differs from the one it was made for."""
    state = {}
    for path, kept in choice.kept.items():
        counted = dict(enumerate(_counted(candidates[path], trace))) if path in candidates else {}
        if path not in candidates or any(
            at not in counted or trace.ops[counted[at]].target != target for at, target in kept.items()
        ):
            return None
        state[path] = frozenset(counted[at] for at in kept)
    return state


def _counted(candidate: Candidate, trace: Trace) -> list[int]:
    """The ops of a call by which a choice numbers them."""
    return [i for i in range(candidate.begin, candidate.end) if not trace.ops[i].view]
