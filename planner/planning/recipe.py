"""A solution as what the runtime reads."""

from __future__ import annotations

from collections.abc import Sequence

from planner.capture.trace.step import TrainingGraph
from planner.core.recipe import Choice, PlannedRegion, Recipe
from solvers import Move

Passes = tuple[tuple[int, ...], tuple[int, ...]]


def recipe_of(
    graph: TrainingGraph,
    passes: Sequence[Passes],
    moves: Sequence[tuple[Move, ...]],
    made_again: Sequence[tuple[int, ...]],
) -> Recipe:
    """What the runtime reads: for each region the ops of its passes, its moves, and what is made again."""
    planned = [
        PlannedRegion(r.fingerprint, *each, moves=own, splits=r.splits, rnns_in_parts=r.rnns_in_parts, made_again=again)
        for r, each, own, again in zip(graph.regions, passes, moves, made_again, strict=True)
    ]
    calls = {key: tuple(None if r is None else planned[r] for r in order) for key, order in graph.order.items()}
    gradients = graph.detached, graph.laid_out
    return Recipe(calls, *gradients, graph.maxima, graph.asked, graph.paths.apart, graph.paths.inner, graph.written)


def in_parts(recipe: Recipe | Choice) -> bool:
    """Whether a recipe is of graphs that were traced with recurrent layers in parts of their sequences."""
    calls = recipe.calls.values() if isinstance(recipe, Recipe) else ()
    return any(region is not None and region.rnns_in_parts for order in calls for region in order)
