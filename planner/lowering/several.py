"""The loss outside the model in a step that calls it several times before one backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate as totals

from planner.core.step import Row, Step
from planner.lowering.build import ACCUMULATE, ADDED, LOSS, own_row
from solvers import Op, Problem


@dataclass(frozen=True, slots=True)
class Between:
    """What a loop does between the calls of a step, and between their backward passes; sizes in bytes.

    Attributes:
        regions: how many each call has.
        made: what it has made of the outputs of earlier calls, and holds while the next one runs.
        let_go: whether the outputs that it lets go of are gone before the next call runs.
        late: of so many of the first calls, the gradients of the outputs are made once the backward pass of the next
            call has run.
        forward: at most between one call and the next, with the outputs of the first.
        workspace: at most while gradients are made late.
    """

    regions: tuple[int, ...]
    made: int
    let_go: bool
    late: int
    forward: int
    workspace: int


def add_calls(step: Step, between: Between) -> Step:
    """Put what the loop does between the calls of a step into its problem. O(ops).

    Args:
        step: of all calls, with one loss after all of their forward passes.
        between: what it does.
    """
    problem, origins = step.problem, step.origins
    call_of = [call for call, regions in enumerate(between.regions) for _ in range(regions)]
    of_op = [None if at.region is None else call_of[at.region] for at in origins]
    forward = [i for i in range(problem.boundary) if of_op[i] is not None]
    ends = {call: max(i for i in forward if of_op[i] == call) for call in range(len(between.regions))}
    rows: list[Row] = [(_out_of_place(op, problem), at) for op, at in zip(problem.ops, origins, strict=True)]
    sizes, before = list(problem.sizes), dict[int, list[Row]]()
    if between.let_go or between.forward:
        _let_go_early(problem, rows, of_op, ends, between, before)
    if between.made:
        made = len(sizes)
        sizes.append(between.made)
        before.setdefault(ends[0] + 1, []).append(own_row(LOSS, "loss of a call", "forward", (), [made]))
        before.setdefault(max(ends.values()) + 1, []).insert(0, own_row(LOSS, "last call", "forward", [made]))
    for call in range(between.late):
        _make_late(problem, rows, of_op, call, between.workspace, before)
    shift = [0, *totals(len(before.get(i, ())) for i in range(len(rows)))]
    every = [row for i, own in enumerate(rows) for row in (*before.get(i, ()), own)]
    ops, table = zip(*every, strict=True)
    boundary = problem.boundary + shift[problem.boundary + 1]
    problem = replace(problem, ops=ops, sizes=tuple(sizes), boundary=boundary)
    return replace(step, problem=problem, origins=table, names=(*step.names, *[""] * (len(sizes) - len(step.names))))


def _out_of_place(op: Op, problem: Problem) -> Op:
    """Where a dispatch mode is on, as while the loop is looked at, autograd adds no gradient in place."""
    adds = op.region == ACCUMULATE and op.name == ADDED and not op.writes
    return replace(op, workspace=problem.sizes[op.reads[0]]) if adds else op


def _let_go_early(
    problem: Problem,
    rows: list[Row],
    of_op: Sequence[int | None],
    ends: dict[int, int],
    between: Between,
    before: dict[int, list[Row]],
) -> None:
    """What the loop does between calls; there it reads the outputs of the first last, if it lets go of them."""
    last, final = problem.boundary - 1, max(ends)
    held = set(problem.ops[problem.boundary].reads)
    lets_go = between.let_go and of_op[last] is None  # else it holds all of them
    gone = [v for v in problem.ops[last].reads if v not in held] if lets_go else []
    for call, end in ends.items():
        own = [v for v in gone if call != final and of_op[problem.producer[v]] == call]
        if call != final and (own or between.forward):
            row = own_row(LOSS, "loss of a call", "forward", own, (), between.forward)
            before.setdefault(end + 1, []).append(row)
        if own:
            op, origin = rows[last]
            rows[last] = replace(op, reads=tuple(v for v in op.reads if v not in own)), origin


def _make_late(
    problem: Problem,
    rows: list[Row],
    of_op: Sequence[int | None],
    call: int,
    workspace: int,
    before: dict[int, list[Row]],
) -> None:
    """The gradients of a call's outputs are made just before its backward pass."""
    op, origin = rows[problem.boundary]
    own = [v for v in op.writes if (of := {of_op[i] for i in problem.readers[v]} - {None}) and of == {call}]
    begins = [i for i in range(problem.boundary + 1, len(rows)) if of_op[i] == call]
    if own and begins:
        rows[problem.boundary] = replace(op, writes=tuple(v for v in op.writes if v not in own)), origin
        late = own_row(LOSS, "loss of a call", "backward", (), own, workspace)
        before.setdefault(begins[0], []).append(late)
