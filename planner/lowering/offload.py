"""The link of `offload=`, and the values that may leave over it, as parts of the problem."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from planner.capture.regions.movable import movable
from planner.capture.regions.region import Region
from planner.core.step import Row, Step
from planner.lowering.build import LOSS, own_row
from solvers import Link, Move, Problem, Schedule


def add_link(step: Step, regions: Sequence[Region], link: Link) -> Step:
    """The step with a link, over which values of its regions may leave. O(ops + values).

    Nothing leaves where microbatches wait for their backward pass, or it runs twice: what waits meanwhile is counted by
    what the schedule keeps, which says nothing of values that are away.
    """
    constant = _with_constant_waiting(step)
    if constant is None:
        return step
    step = constant
    problem = step.problem
    may = [movable(region) for region in regions]
    found: set[int] = set()
    for op, origin in zip(problem.ops, step.origins, strict=True):
        if origin.region is not None:
            own = regions[origin.region].ops[origin.index].writes
            found.update(v for v, w in zip(op.writes, own, strict=True) if w in may[origin.region])
    held = problem.pinned.union(step.gathered, (v for _, v in step.holds))
    leaving = frozenset(v for v in found - held if problem.sizes[v])
    return replace(step, problem=replace(problem, link=link, movable=leaving))


def _with_constant_waiting(step: Step) -> Step | None:
    """The step in which bytes that wait are values of their own; None where they depend on the schedule.

    Those that do not are held by outputs of the step before and gradients that are cleared late. One value is held
    during the forward pass, another during the backward pass.
    """
    waiting = step.problem.waiting
    if waiting is None:
        return step
    if waiting.again is not None or any(number for number, _ in (*waiting.forward, *waiting.backward)):
        return None
    forward, backward = (max(beside for _, beside in pairs) for pairs in (waiting.forward, waiting.backward))
    return _held_beside(step, forward, backward, waiting.until)


def _held_beside(step: Step, forward: int, backward: int, until: int) -> Step:
    """The step with so many bytes beside it in each pass, up to op number `until`, and none that wait. O(ops)."""
    problem = step.problem
    first, second = len(problem.sizes), len(problem.sizes) + 1
    name, boundary = "bytes of the step before", problem.boundary
    rows: list[Row] = list(zip(problem.ops, step.origins, strict=True))
    loss, origin = rows[boundary]
    rows[until:until] = [own_row(LOSS, name, "backward", reads=(second,))]
    rows[boundary : boundary + 1] = [
        own_row(LOSS, name, "forward", reads=(first,)),
        (replace(loss, workspace=loss.workspace + backward), origin),
        own_row(LOSS, name, "backward", writes=(second,)),
    ]
    rows[:0] = [own_row(LOSS, name, "forward", writes=(first,))]
    ops, origins = zip(*rows, strict=True)
    shifted = [1 + (i >= boundary) + (i > boundary) + (i >= until) for i in range(len(problem.ops))]
    return replace(
        step,
        problem=replace(
            problem, ops=ops, sizes=(*problem.sizes, forward, backward), boundary=boundary + 2, waiting=None
        ),
        origins=origins,
        names=(*step.names, "", ""),
        groups=tuple(frozenset(i + shifted[i] for i in group) for group in step.groups),
        holds=frozenset((i + shifted[i], v) for i, v in step.holds),
    )


def nothing_leaves(problem: Problem) -> str:
    """In words, why nothing leaves in a step for which `offload=` was given; empty where something may."""
    if problem.link is not None:
        return ""
    return (
        "Several forward passes wait for their backward pass, or a backward pass keeps its graph (retain_graph=True): "
        "nothing is offloaded beside that, offload= or not. Where such calls need no gradient, run them under "
        "torch.no_grad(), or let go of their results."
    )


def moves_by_region(step: Step, schedule: Schedule, regions: Sequence[Region]) -> tuple[tuple[Move, ...], ...]:
    """For each region the moves of its values, numbered as in the region; `at` counts its steps in both passes."""
    problem = step.problem
    found: list[list[Move]] = [[] for _ in regions]
    done = [0] * len(regions)
    n = 0
    for at, i in enumerate(schedule.steps):
        while n < len(schedule.moves) and schedule.moves[n].at == at:
            move = schedule.moves[n]
            maker = problem.producer[move.value]
            r, index = step.origins[maker].region, step.origins[maker].index
            assert r is not None
            own = regions[r].ops[index].writes[problem.ops[maker].writes.index(move.value)]
            found[r].append(Move(move.kind, own, done[r]))
            n += 1
        if (of := step.origins[i].region) is not None:
            done[of] += 1
    return tuple(map(tuple, found))
