"""The bytes and the time of another decision: a plan's schedule, changed for some values and simulated."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import accumulate

from planner.core.plan import PlanRecord
from planner.core.step import live_before
from planner.core.what_if import Cost, WhatIf
from solvers import Move, Problem, ProblemError, Schedule, simulate


def costs_of(plan: PlanRecord) -> tuple[Cost, ...]:
    """One per decision; empty where the plan has no problem (eager mode), or one that does not suit its decisions."""
    problem, schedule = plan.problem, plan.schedule
    if problem is None or schedule is None:
        return ()
    makers = [
        (i, needed)
        for i, op in enumerate(problem.ops[: problem.boundary])
        if (needed := [v for v in op.writes if any(r > problem.boundary for r in problem.readers[v])])
    ]
    values = [v for _, needed in makers for v in needed]
    if len(values) != len(plan.decisions) or len(plan.timeline) != len(schedule.steps):
        return ()
    timeline = simulate(problem, schedule)
    at = timeline.held.index(timeline.peak)
    live = live_before(problem, schedule, timeline, at).union(problem.ops[schedule.steps[at]].writes)
    found = []
    for i, needed in makers:
        together = sum(problem.sizes[v] for v in needed)
        for v in needed:
            share = problem.sizes[v] / together if together else 1 / len(needed)
            found.append(Cost(v, problem.ops[i].cost * share, v in live, _bound_by(problem, v)))
    return tuple(found)


def _bound_by(problem: Problem, value: int) -> str:
    if value not in problem.lasting or not problem.ops[problem.producer[value]].recomputable:
        return ""
    if value in problem.pinned or problem.boundary in problem.readers[value]:
        return "it is an output, which the loss may read"
    return "another graph of the model reads it"


def what_if(plan: PlanRecord, values: Collection[int], *, kept: bool) -> WhatIf | None:
    """The plan's step with these values kept from the forward pass on (or not kept), simulated.

    Args:
        plan: a compiled one.
        values: forward values of its problem, as `costs_of` numbers them.
        kept: whether to keep or to recompute them.

    Returns:
        None in eager mode, where there is no problem to simulate, and where it would need what is offloaded meanwhile.
    """
    problem, schedule = plan.problem, plan.schedule
    if problem is None or schedule is None:
        return None
    changed = (keeping if kept else recomputing)(problem, schedule, values)
    moves = _moved_along(schedule, changed.steps, values)
    try:
        timeline = simulate(problem, changed := replace(changed, moves=moves))
    except ProblemError:
        return None
    at = timeline.held.index(timeline.peak)
    moment = dict(zip(schedule.steps, plan.timeline, strict=True))[changed.steps[at]]
    again = moment.phase == "forward" and at > changed.steps.index(problem.boundary)
    place = f", {moment.module}: {moment.op.strip('_')}" if moment.module else ""
    return WhatIf(timeline.peak, timeline.cost, f"{'backward' if again else moment.phase}{place}")


def _moved_along(schedule: Schedule, steps: Sequence[int], values: Collection[int]) -> tuple[Move, ...]:
    """The moves of other values than these, at the first runs of their ops in changed steps that are not before.

    Each stands before the run that has as many first runs before it as the one that it stood before.
    """
    places: dict[int, int] = {}
    for at, done in enumerate(_first_runs(steps)):
        places.setdefault(done, at)
    before = _first_runs(schedule.steps)
    return tuple(replace(m, at=places[before[m.at]]) for m in schedule.moves if m.value not in values)


def _first_runs(steps: Sequence[int]) -> list[int]:
    """For each step how many ops ran for the first time before it. O(steps)."""
    first = {i: at for at, i in reversed(list(enumerate(steps)))}
    return [0, *accumulate(first[i] == at for at, i in enumerate(steps))][:-1]


def keeping(problem: Problem, schedule: Schedule, values: Collection[int]) -> Schedule:
    """The schedule with the ops of these values run once, and without runs that only those runs needed.

    Everything else is read from the run that it is read from now. O(steps + reads).
    """
    once = {problem.producer[v] for v in values}
    first = {i: at for at, i in reversed(list(enumerate(schedule.steps)))}
    wanted: set[int] = set()  # read later; what is pinned is there since its first run
    kept: list[int] = []
    for at in range(len(schedule.steps) - 1, -1, -1):
        i = schedule.steps[at]
        op = problem.ops[i]
        if first[i] != at and (i in once or wanted.isdisjoint(op.writes)):
            continue
        wanted.difference_update(op.writes)
        wanted.update(v for v in op.reads if v not in problem.pinned)
        kept.append(i)
    return Schedule(tuple(reversed(kept)))


def recomputing(problem: Problem, schedule: Schedule, values: Collection[int]) -> Schedule:
    """The schedule with these values freed after the forward pass, and made again just before they are first needed.

    What their ops read is made again with them where it is not held, and freed; values that must last are left as they
    are. O(steps + reads), and the ops that run again for each value.
    """
    if problem.boundary not in schedule.steps:
        return schedule
    start = schedule.steps.index(problem.boundary) + 1
    lasting = problem.lasting
    absent = {v for v in values if v not in lasting}
    frees = simulate(problem, schedule).frees
    live: set[int] = set()
    steps: list[int] = []
    for at, i in enumerate(schedule.steps):
        op = problem.ops[i]
        if at >= start:
            for v in op.reads:
                if v in absent:
                    again = _again(problem, v, absent, live)
                    steps += again
                    absent.difference_update(w for j in again for w in problem.ops[j].writes)
        steps.append(i)
        live.update(op.writes)
        live.difference_update(frees[at])
        if at >= start:
            absent.difference_update(op.writes)
    return Schedule(tuple(steps))


def _again(problem: Problem, value: int, absent: Collection[int], live: Collection[int]) -> list[int]:
    """The ops that make a value again, in order, each once."""
    lasting = problem.lasting
    found: set[int] = set()
    waiting = [problem.producer[value]]
    while waiting:
        i = waiting.pop()
        if i not in found:
            found.add(i)
            waiting += [
                problem.producer[v] for v in problem.ops[i].reads if v not in lasting and (v in absent or v not in live)
            ]
    return sorted(found)
