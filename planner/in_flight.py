"""Microbatches in flight: what forward passes hold that wait for their backward pass, as part of the problem.

What one of them keeps depends on the plan, so that it is for the solver to weigh (`solvers.Waiting`). What it holds
whatever is planned - what the loss saves, inputs, gradients that are there already, buffers - is counted here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from solvers import Problem, Schedule, Waiting
from solvers.schedule import kept_bytes

from .account import batch_of
from .capture.call import tensors_in
from .errors import gb
from .estimate.resident import storage_bytes
from .lowering import OPTIMIZER, Lowered

if TYPE_CHECKING:
    from .request import Request

BUFFERS = "buffers of the pipeline stage"  # a line of the account


@dataclass(frozen=True, slots=True)
class Flight:
    """What is in flight, and done, while one microbatch runs; what a stage of a pipeline holds beside the plan.

    Attributes:
        forward: pairs (others that wait for their backward pass, others that are done) during a forward pass; of these,
            what holds most counts.
        backward: the same during a backward pass.
        inputs: microbatches whose inputs are held all the time, beside the batch itself.
        received: microbatches for whose gradients of the outputs there are buffers all the time, so that no op makes
            them; 0 where the loss makes them.
        leaves_inputs: whether each microbatch that is done leaves the gradients of its inputs.
        leaves_outputs: whether it leaves its outputs.
    """

    forward: tuple[tuple[int, int], ...]
    backward: tuple[tuple[int, int], ...]
    inputs: int = 0
    received: int = 0
    leaves_inputs: bool = False
    leaves_outputs: bool = False


def flight_of(request: Request) -> Flight:
    """What `in_flight` and `accumulate` of `plan()` mean: so many forward passes, then as many backward passes.

    Where gradients of earlier microbatches are there, they are so all the time; else from the first of these on.
    """
    if request.flight is not None:
        return request.flight
    others = request.in_flight - 1
    again = () if request.accumulate or not others else ((others - 1, 1),)
    return Flight(((others, 0),), ((others, 0), *again))


def with_others(
    request: Request, lowered: Lowered, lines: Mapping[str, int], loss_bytes: int
) -> tuple[Lowered, dict[str, int]]:
    """The problem of one microbatch beside others, and the lines of the account that are held all the time.

    Args:
        request: what was asked for.
        lowered: the problem of one microbatch alone.
        lines: of the account, which has what is in `lowered.problem.resident`.
        loss_bytes: held by a loss outside the model while it waits for its backward pass.
    """
    if request.in_flight == 1 and request.flight is None:
        return lowered, dict(lines)
    flight, problem = flight_of(request), lowered.problem
    sizes, incoming = list(problem.sizes), problem.ops[problem.boundary].writes[:-1]
    outputs = sum(sizes[v] for v in incoming)
    args, kwargs = batch_of(request)
    inputs = [t for t in tensors_in((args, dict(kwargs))) if request.where.type != "cuda" or t.is_cuda]
    buffers = flight.inputs * sum(t.nbytes for t in inputs) + flight.received * outputs
    if flight.received:
        for v in incoming:
            sizes[v] = 0
    left = flight.leaves_inputs * sum(t.nbytes for t in inputs if t.requires_grad) + flight.leaves_outputs * outputs
    trained = [p for p in request.model.parameters() if p.requires_grad]
    gradients = 0 if request.accumulate else storage_bytes(trained, request.shard)

    def pairs(given: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
        return tuple((others, others * loss_bytes + done * left + (gradients if done else 0)) for others, done in given)

    until = next((i for i, o in enumerate(lowered.origin) if o.region == OPTIMIZER), len(problem.ops))
    waiting = Waiting(pairs(flight.forward), pairs(flight.backward), until)
    problem = replace(problem, sizes=tuple(sizes), resident=problem.resident + buffers, waiting=waiting)
    return replace(lowered, problem=problem), {**lines, **({BUFFERS: buffers} if buffers else {})}


def in_words(problem: Problem, schedule: Schedule) -> str:
    """What waits, for the note of a plan; empty where nothing does."""
    waiting = problem.waiting
    others = max(number for number, _ in (*waiting.forward, *waiting.backward)) if waiting else 0
    if not others:
        return ""
    kept = kept_bytes(problem, schedule.steps)
    return f"{others + 1} microbatches in flight: each that waits for its backward pass keeps {gb(kept)}."
