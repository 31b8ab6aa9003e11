"""Microbatches in flight: bytes that wait for a backward pass while another microbatch runs, as part of the problem.

The activations that each of them saves depend on the plan, so that it is for the solver to weigh (`solvers.Waiting`).
Bytes that each holds whatever is planned - saved by the loss, inputs, gradients that are there already, buffers - are
counted here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from planner.core.occupancy import ALONE, CLEARED_LATE, Occupancy
from planner.core.step import Replay, Step, with_line
from planner.costs.account import batch_of
from planner.costs.static_memory import batch_tensors, storage_bytes, trained_bytes
from planner.errors import gb
from planner.lowering.build import OPTIMIZER, own_row
from planner.requests.request import Request
from solvers import Problem, Waiting

BUFFERS, TARGETS = "buffers of the pipeline stage", "targets"  # lines of the account
Pairs = tuple[tuple[int, int], ...]


def occupancy_of(request: Request) -> Occupancy:
    """The occupancy that `in_flight` and `accumulate` of `plan()` mean: so many forward passes, then as many backward.

    Where gradients of earlier microbatches are there, they are so all the time; else from the first of these on.
    """
    if request.occupancy is not None:
        return request.occupancy
    if request.loop.gradients == "cleared late" and request.in_flight == 1 and not request.gradients_copied:
        return CLEARED_LATE
    others = request.in_flight - 1
    again = () if request.accumulates or not others else ((others - 1, 1),)
    used = int(request.loop.gradients == "cleared late")  # of the step before, until its backward pass begins
    return Occupancy(((others, used),), ((others, 0), *again))


def add_microbatches(step: Step, request: Request, *, waits: tuple[int, int], loss_left: int, stays: int = 0) -> Step:
    """Put the problem of one microbatch beside others that are in flight. O(ops).

    Args:
        step: one microbatch alone.
        request: what was asked for.
        waits: held by each waiting microbatch and its loss outside the model, whatever is planned, in the forward and
            in the backward pass.
        loss_left: held by it once that has run.
        stays: held in the forward pass by outputs of the step before, whose names this step's outputs take over.
    """
    occupancy = occupancy_of(request)
    if occupancy == ALONE and not stays:
        return step
    incoming = step.problem.ops[step.problem.boundary].writes[:-1]
    outputs = sum(step.problem.sizes[v] for v in incoming)
    args, kwargs = batch_of(request)
    inputs = batch_tensors(args, kwargs, request.model_device)
    buffers = occupancy.inputs * sum(t.nbytes for t in inputs) + occupancy.received * outputs
    lines = {BUFFERS: buffers, TARGETS: storage_bytes(getattr(request.loss_fn, "held", ()))}
    for name, nbytes in lines.items():
        if nbytes:
            step = with_line(step, name, nbytes)
    differentiable = sum(t.nbytes for t in inputs if t.requires_grad)
    gradients = _gradients(request)

    def beside(pairs: Pairs, each: int, sent: int = 0) -> Pairs:
        """For each number of waiting microbatches, the most bytes that do not depend on the plan."""
        most: dict[int, int] = {}
        for others, done in pairs:
            left = min(done, occupancy.leaves_inputs) * differentiable + min(done, occupancy.leaves_outputs) * outputs
            held = others * each + done * loss_left + left + (gradients if done else 0) + min(others, sent) * outputs
            most[others] = max(held, most.get(others, 0))
        return _highest(most.items())

    problem = step.problem
    forward = tuple((number, nbytes + stays) for number, nbytes in beside(occupancy.forward, waits[0], occupancy.sent))
    waiting = Waiting(forward, beside(occupancy.backward, waits[1]), _optimizer_at(step))
    sizes = tuple(0 if occupancy.received and v in incoming else size for v, size in enumerate(problem.sizes))
    problem = replace(problem, sizes=sizes, waiting=waiting)
    last = problem.boundary - 1
    if stays and step.origins[last].phase == "loss":  # the names are taken over by then
        problem = _with_workspace(problem, last, -stays)
    if occupancy == CLEARED_LATE and request.loop.loss is None:
        # gone before the backward pass makes new ones
        problem = _with_workspace(problem, problem.boundary, max(0, gradients - outputs))
    step = replace(step, problem=problem)
    return _merging(step, occupancy.merged, outputs) if occupancy.merged else step


def add_second_backward(step: Step, request: Request, loss_bytes: int) -> Step:
    """Count backward passes that keep their graph (`retain_graph=True`), and the one that frees it. O(ops).

    Args:
        step: with one backward pass.
        request: what was asked for, and what was seen of the loop.
        loss_bytes: saved by a loss outside the model, which its graph keeps as well.
    """
    problem, at = step.problem, step.problem.boundary
    until = _optimizer_at(step)
    waiting = problem.waiting or Waiting(((0, 0),), ((0, 0),), until)
    loop = request.loop
    kept = loop.kept_beside
    if loop.asks_first and loop.gradients == "cleared late":
        kept += _gradients(request)
    results = sum(problem.sizes[v] for v in step.final) if loop.freed_beside is None else loop.freed_beside
    saved = len(problem.sizes)
    reader = max(i for i in range(until) if step.origins[i].phase == "backward")
    ops = list(problem.ops)
    made = (*ops[at].writes[:-1], saved, ops[at].writes[-1])
    ops[at] = replace(ops[at], writes=made, workspace=max(0, ops[at].workspace - loss_bytes))
    ops[reader] = replace(ops[reader], reads=(*ops[reader].reads, saved))
    backward = tuple((number, beside + kept) for number, beside in waiting.backward)
    waiting = replace(waiting, backward=backward, again=max(0, results - kept))
    problem = replace(problem, ops=tuple(ops), sizes=(*problem.sizes, loss_bytes), waiting=waiting)
    return replace(step, problem=problem, names=(*step.names, ""))


def _optimizer_at(step: Step) -> int:
    return next((i for i, o in enumerate(step.origins) if o.phase == "optimizer"), len(step.problem.ops))


def _gradients(request: Request) -> int:
    """Bytes of the gradients that microbatches which are done leave behind, beside the account."""
    if request.gradients_copied:
        return 0
    if request.loop.late is not None and occupancy_of(request) == CLEARED_LATE:  # some parameters have none
        return -(-request.loop.late // request.options.shard)
    return trained_bytes(request.model, request.options.shard)


def _with_workspace(problem: Problem, at: int, more: int) -> Problem:
    """The problem with so much more workspace for an op, or less, but not less than none."""
    op = replace(problem.ops[at], workspace=max(0, problem.ops[at].workspace + more))
    return replace(problem, ops=(*problem.ops[:at], op, *problem.ops[at + 1 :]))


def _highest(pairs: Iterable[tuple[int, int]]) -> Pairs:
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


def _merging(step: Step, count: int, outputs: int) -> Step:
    """The outputs of all microbatches, held while they become one tensor, and while the optimizer steps."""
    problem, others = step.problem, (count - 1) * outputs
    assert problem.waiting is not None
    until = problem.waiting.until
    merge, origin = own_row(OPTIMIZER, "merge outputs", "optimizer", workspace=others + count * outputs)
    last = tuple(replace(op, workspace=op.workspace + others) for op in problem.ops[until:])
    return replace(
        step,
        problem=replace(problem, ops=(*problem.ops[:until], merge, *last)),
        origins=(*step.origins[:until], origin, *step.origins[until:]),
    )


def in_words(problem: Problem, planned: Replay) -> str:
    """A sentence on the microbatches that wait, for the note of a plan; empty where none does."""
    waiting = problem.waiting
    others = max(number for number, _ in (*waiting.forward, *waiting.backward)) if waiting else 0
    if not others:
        return ""
    kept = sum(problem.sizes[v] for v in planned.saved_for_backward)
    return f"{others + 1} microbatches in flight: each that waits for its backward pass keeps {gb(kept)}."
