"""Microbatches in flight: what forward passes hold that wait for their backward pass, as part of the problem.

What one of them keeps depends on the plan, so that it is for the solver to weigh (`solvers.Waiting`). What it holds
whatever is planned - what the loss saves, inputs, gradients that are there already, buffers - is counted here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from planner.core.occupancy import CLEARED_LATE, Occupancy
from planner.costs.account import batch_of
from planner.costs.static_memory import batch_tensors, storage_bytes
from planner.errors import gb
from planner.lowering.build import OPTIMIZER, Lowered, LoweredOp
from planner.parallel.sharded import parameters_of
from solvers import Op, Problem, Schedule, Waiting
from solvers.schedule import kept_bytes

if TYPE_CHECKING:
    from planner.requests.request import Request

BUFFERS, TARGETS = "buffers of the pipeline stage", "targets"  # lines of the account


def flight_of(request: Request) -> Occupancy:
    """What `in_flight` and `accumulate` of `plan()` mean: so many forward passes, then as many backward passes.

    Where gradients of earlier microbatches are there, they are so all the time; else from the first of these on.
    """
    if request.occupancy is not None:
        return request.occupancy
    others = request.options.in_flight - 1
    again = () if request.options.accumulate or not others else ((others - 1, 1),)
    return Occupancy(((others, 0),), ((others, 0), *again))


def with_others(
    request: Request, lowered: Lowered, lines: Mapping[str, int], loss_bytes: int, loss_left: int
) -> tuple[Lowered, dict[str, int]]:
    """The problem of one microbatch beside others, and the lines of the account that are held all the time.

    Args:
        request: what was asked for.
        lowered: the problem of one microbatch alone.
        lines: of the account, which has what is in `lowered.problem.resident`.
        loss_bytes: held by a loss outside the model while it waits for its backward pass.
        loss_left: held by it once that has run.
    """
    if request.options.in_flight == 1 and request.occupancy is None:
        return lowered, dict(lines)
    flight, problem = flight_of(request), lowered.problem
    sizes, incoming = list(problem.sizes), problem.ops[problem.boundary].writes[:-1]
    outputs = sum(sizes[v] for v in incoming)
    args, kwargs = batch_of(request)
    inputs = batch_tensors(args, kwargs, request.model_device)
    buffers = flight.inputs * sum(t.nbytes for t in inputs) + flight.received * outputs
    if flight.received:
        for v in incoming:
            sizes[v] = 0
    differentiable = sum(t.nbytes for t in inputs if t.requires_grad)
    trained = [p for p in parameters_of(request.model) if p.requires_grad]
    gradients = 0 if request.gradients_copied else storage_bytes(trained, request.options.shard)

    def pairs(given: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
        beside: dict[int, int] = {}
        for others, done in given:
            left = min(done, flight.leaves_inputs) * differentiable + min(done, flight.leaves_outputs) * outputs
            most = others * loss_bytes + done * loss_left + left + (gradients if done else 0)
            beside[others] = max(most, beside.get(others, 0))
        return _highest(beside.items())

    until = next((i for i, o in enumerate(lowered.origin) if o.region == OPTIMIZER), len(problem.ops))
    waiting = Waiting(pairs(flight.forward), pairs(flight.backward), until)
    more = {BUFFERS: buffers, TARGETS: storage_bytes(getattr(request.loss_fn, "held", ()))}
    lines = {**lines, **{name: size for name, size in more.items() if size}}
    resident = problem.resident + sum(more.values())
    ops = problem.ops
    if flight == CLEARED_LATE:  # they are there while the loss is computed, and gone before it makes gradients
        loss = ops[problem.boundary]
        loss = replace(loss, workspace=loss.workspace + max(0, gradients - outputs))
        ops = (*ops[: problem.boundary], loss, *ops[problem.boundary + 1 :])
    problem = replace(problem, ops=ops, sizes=tuple(sizes), resident=resident, waiting=waiting)
    lowered = replace(lowered, problem=problem)
    return (_merging(lowered, flight.merged, outputs, until) if flight.merged else lowered), lines


def _highest(pairs: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """The pairs (number, beside) of which `number * kept + beside` is the most for some `kept` from 0 on."""
    found: list[tuple[int, int]] = []
    for number, beside in sorted(pairs, reverse=True):
        if found and beside <= found[-1][1]:
            continue
        while len(found) > 1 and _crossing(found[-2], (number, beside)) >= _crossing(found[-2], found[-1]):
            found.pop()
        found.append((number, beside))
    return tuple(found)


def _crossing(steep: tuple[int, int], flat: tuple[int, int]) -> float:
    """How much is kept where two pairs come to the same; with more, the first of them is higher."""
    return (flat[1] - steep[1]) / (steep[0] - flat[0])


def _merging(lowered: Lowered, count: int, outputs: int, until: int) -> Lowered:
    """The outputs of all microbatches, held while they become one tensor, and while the optimizer steps."""
    problem, others = lowered.problem, (count - 1) * outputs
    merge = Op("merge outputs", (), (), 0.0, others + count * outputs, False, OPTIMIZER)
    last = tuple(replace(op, workspace=op.workspace + others) for op in problem.ops[until:])
    return replace(
        lowered,
        problem=replace(problem, ops=(*problem.ops[:until], merge, *last)),
        origin=(*lowered.origin[:until], LoweredOp(OPTIMIZER, 0), *lowered.origin[until:]),
        kinds=(*lowered.kinds[:until], merge.name, *lowered.kinds[until:]),
    )


def in_words(problem: Problem, schedule: Schedule) -> str:
    """What waits, for the note of a plan; empty where nothing does."""
    waiting = problem.waiting
    others = max(number for number, _ in (*waiting.forward, *waiting.backward)) if waiting else 0
    if not others:
        return ""
    kept = kept_bytes(problem, schedule.steps)
    return f"{others + 1} microbatches in flight: each that waits for its backward pass keeps {gb(kept)}."
