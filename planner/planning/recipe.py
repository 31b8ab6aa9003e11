"""A solution as what the runtime reads, and the room that it takes where values go that leave."""

from __future__ import annotations

from collections.abc import Sequence

from planner.capture.trace.step import TrainingGraph
from planner.codegen.moving import slab_of
from planner.core.options import GB
from planner.core.recipe import PlannedRegion, Recipe
from planner.errors import OffloadError, gb
from planner.requests.request import Request
from solvers import Move

Passes = tuple[tuple[int, ...], tuple[int, ...]]


def room_taken(
    request: Request,
    graph: TrainingGraph,
    passes: Sequence[Passes],
    moves: Sequence[tuple[Move, ...]],
) -> int:
    """Bytes that a step takes where values go that leave. Raises OffloadError where `host_gb` allows less."""
    rows = zip(graph.regions, passes, moves, strict=True)
    taken = sum(slab_of(region, *each, own)[1] for region, each, own in rows)
    most = request.options.host_gb
    if most is not None and taken > most * GB:
        raise OffloadError(f"host_gb={most!r} is too small: what leaves takes {gb(taken)} there; give that much")
    return taken


def recipe_of(
    graph: TrainingGraph,
    passes: Sequence[Passes],
    moves: Sequence[tuple[Move, ...]],
) -> Recipe:
    """What the runtime reads: for each region the ops of its passes, and its moves."""
    planned = [
        PlannedRegion(r.fingerprint, *each, moves=own, splits=r.splits)
        for r, each, own in zip(graph.regions, passes, moves, strict=True)
    ]
    calls = {key: tuple(None if r is None else planned[r] for r in order) for key, order in graph.order.items()}
    return Recipe(calls, graph.detached, graph.maxima, graph.asked, graph.paths.apart, graph.paths.inner)
