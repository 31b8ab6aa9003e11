"""What people arrange by hand for long sequences, as schedules of a captured step: blocks checkpointed, their inputs on
the host, the loss in chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from planner.capture.trace.quiet import collector_paused
from planner.capture.trace.state_guard import fakes_forgotten
from planner.capture.trace.step import TrainingGraph
from planner.core.pieces import Split
from planner.core.step import Step
from planner.lowering.margin import EXPANDABLE
from planner.lowering.offload import add_link
from planner.pieces.candidates import candidates
from planner.pieces.known import Known
from planner.planning.curve import blocks_of
from planner.planning.pieces import with_splits
from planner.planning.pipeline import graph_of, lower
from planner.requests.check import check
from planner.requests.request import Request
from solvers import Link, Move, Problem, Schedule
from solvers.search.blocks import checkpointed

CHUNK = 256  # tokens of the loss at a time, as trl's chunked_nll
CHECKPOINTED, OFFLOADED, CHUNKED = "each block checkpointed", "+ block inputs on the host", "+ loss in chunks"


@dataclass(frozen=True)
class Captured:
    """A captured step of a model, whole and with its loss in chunks.

    Attributes:
        model: the model.
        ids: the sequence.
        length: of the sequence.
        whole: the step.
        chunked: the same with the loss in chunks.
    """

    model: nn.Module
    ids: torch.Tensor
    length: int
    whole: TrainingGraph
    chunked: TrainingGraph


@dataclass(frozen=True)
class Way:
    """A way to run a step by hand.

    Attributes:
        name: of the way.
        problem: the step.
        schedule: of it.
        margin: for the allocator, as a share of the peak.
        room: bytes of the card.
        step: with the account.
    """

    name: str
    problem: Problem
    schedule: Schedule
    margin: float
    room: int
    step: Step


def capture(model: nn.Module, ids: torch.Tensor, length: int) -> Captured:
    """Capture a step, and put its loss in chunks."""
    with fakes_forgotten(), collector_paused():
        graph = graph_of(_request(model, ids, "h100"))
    largest = candidates(graph.regions, [Known() for _ in graph.regions])[0]
    split = Split(largest.split.seed, largest.split.first, largest.split.last, length // CHUNK)
    own = [(split,) if at == largest.region else () for at in range(len(graph.regions))]
    chunked = with_splits(graph, own)
    assert chunked is not None
    return Captured(model, ids, length, graph, chunked)


def ways_of(captured: Captured, card: str) -> list[Way]:
    """The ways by hand, each with what those before it do."""
    request = _request(captured.model, captured.ids, card)
    device = request.device
    link = Link(device.link, device.link, latency=device.launch)
    whole, chunked = (add_link(lower(request, g), g.regions, link) for g in (captured.whole, captured.chunked))
    found = []
    for name, step in ((CHECKPOINTED, whole), (OFFLOADED, whole), (CHUNKED, chunked)):
        problem, blocks = step.problem, blocks_in(step)
        schedule = checkpointed(problem, blocks)
        if name == CHECKPOINTED:
            problem = problem.without_link()
        else:
            schedule = replace(schedule, moves=moves_of(problem, schedule, inputs_of(problem, blocks)))
        found.append(Way(name, problem, schedule, EXPANDABLE, request.budget_bytes, step))
    return found


def _request(model: nn.Module, ids: torch.Tensor, card: str) -> Request:
    return check(model, ids, None, device=card, optimizer="adamw-fused", progress=False)


def blocks_in(step: Step) -> list[list[int]]:
    """The repeated blocks of a model: the numbers of their forward ops."""
    ops = step.origins[: step.problem.boundary]
    return [list(block) for block in blocks_of(ops).values()]  # type: ignore[arg-type]


def inputs_of(problem: Problem, blocks: Sequence[Sequence[int]]) -> list[int]:
    """The largest value that each block reads from outside."""
    found: dict[int, None] = {}
    for block in blocks:
        own = set(block)
        outside = {v for i in block for v in problem.ops[i].reads if problem.producer[v] not in own}
        found[max(outside, key=lambda v: problem.sizes[v])] = None
    return list(found)


def moves_of(problem: Problem, schedule: Schedule, values: Sequence[int]) -> tuple[Move, ...]:
    """Each value leaves after its last use in the forward pass, and comes back for its first in the backward pass."""
    wanted, places = set(values), dict[int, list[int]]()
    forward = problem.boundary
    for at, i in enumerate(schedule.steps):
        for v in {*problem.ops[i].reads, *problem.ops[i].writes} & wanted:
            places.setdefault(v, []).append(at)
    moves = []
    for v, uses in places.items():
        last = max(at for at in uses if at < forward)
        back = min(at for at in uses if at >= forward)
        moves += [Move("send", v, uses[0] + 1), Move("free", v, last + 1), Move("fetch", v, back)]
    order = {"free": 0, "send": 1, "fetch": 2}
    return tuple(sorted(moves, key=lambda move: (move.at, order[move.kind])))
