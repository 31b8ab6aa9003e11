"""Several calls of the model in one step, each of another kind, before one backward pass: planned as one problem."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate as totals

from planner.capture.regions.calls import Link
from planner.capture.trace.apart import COMPILED
from planner.capture.trace.step import TrainingGraph
from planner.core.loop import LaidOut
from planner.core.plan import GraphModules
from planner.core.recipe import Recipe
from planner.planning.inductor import FusedGraph, with_sources
from planner.requests.planned import Planned
from planner.requests.request import Request


def may_go_together(request: Request, graphs: Sequence[TrainingGraph]) -> bool:
    """Whether one plan can be made of such calls, each of which was captured, in the loop that was seen."""
    options, loop = request.options, request.loop
    plain = options.mode != "eager" and not options.pieces and options.offload is None
    alone = request.occupancy is None and options.in_flight == 1 and not options.step_in_backward
    several = loop.in_flight == len(graphs) > 1 and not (loop.graph_retained or loop.asks_first or loop.unused)
    return plain and alone and several and loop.loss is not None and all(map(_is_plain, graphs))


def _is_plain(graph: TrainingGraph) -> bool:
    whole = all(region.fingerprint for region in graph.regions)
    return whole and graph.maxima is None and not (graph.asked or graph.written) and graph.paths == COMPILED


def joined(graphs: Sequence[TrainingGraph]) -> TrainingGraph:
    """The step that makes these calls one after the other, and one backward pass through all of them. O(links)."""
    regions = tuple(region for graph in graphs for region in graph.regions)
    first = [0, *totals(len(graph.regions) for graph in graphs)]
    leaves = [0, *totals(len(graph.outputs) for graph in graphs)]
    order: dict[str, tuple[int | None, ...]] = {}
    shared: dict[str, list[tuple[int, int]]] = defaultdict(list)
    links: list[Link] = []
    outputs: list[tuple[int, int] | None] = []
    fed: dict[int, int] = {}
    detached: dict[str, tuple[int, ...]] = {}
    laid_out: dict[str, LaidOut] = {}
    parameters: dict[tuple[int, int], str] = {}
    for start, leaf, graph in zip(first, leaves, graphs, strict=False):
        for key, own in graph.order.items():
            order[key] = (*order.get(key, ()), *(None if r is None else start + r for r in own))
        for (r, at), name in graph.parameters.items():
            parameters[start + r, at] = name
            shared[name].append((start + r, at))
        links += [_moved(link, start) for link in graph.links if graph.parameters.keys().isdisjoint(link.uses)]
        outputs += [None if at is None else (start + at[0], at[1]) for at in graph.outputs]
        fed |= {leaf + at: nbytes for at, nbytes in graph.fed.items() if at < len(graph.outputs)}
        detached |= graph.detached
        laid_out |= graph.laid_out
    links += [Link(None, tuple(uses), True) for uses in shared.values() if len(uses) > 1]
    step = TrainingGraph(
        regions=regions,
        order=order,
        detached=detached,
        laid_out=laid_out,
        loss=graphs[0].loss,
        links=tuple(links),
        outputs=tuple(outputs),
        fed=fed,
        output_bytes=graphs[0].output_bytes,  # a loop's loss is recorded with the outputs of the first call
        parameters=parameters,
        calls=tuple((len(graph.regions), len(graph.outputs)) for graph in graphs),
    )
    fused = [graph for graph in graphs if isinstance(graph, FusedGraph)]
    return with_sources(step, [source for graph in fused for source in graph.sources]) if fused else step


def _moved(link: Link, start: int) -> Link:
    producer = link.producer and (start + link.producer[0], link.producer[1])
    return replace(link, producer=producer, uses=tuple((start + r, at) for r, at in link.uses), aside=None)


def plans_of_calls(planned: Planned, calls: Sequence[tuple[Request, TrainingGraph]]) -> list[Planned]:
    """The plan of a step as one for each of its calls: all have its figures, each has its own graphs.

    Args:
        planned: for the step that `joined()` makes of these calls.
        calls: the request for each, without its batch, and the graphs of it.
    """
    recipe = planned.record.recipe
    assert isinstance(recipe, Recipe)
    told = f"One of {len(calls)} calls of the model in a step, which are planned together: the peak is that of all."
    taken: Counter[str] = Counter()
    found, first = [], 0
    for request, graph in calls:
        own = {key: recipe.calls[key][taken[key] : taken[key] + len(order)] for key, order in graph.order.items()}
        taken.update({key: len(order) for key, order in graph.order.items()})
        record = replace(
            planned.record,
            note=f"{planned.record.note} {told}".strip(),
            recipe=Recipe(own, graph.detached, graph.laid_out),
            step=replace(planned.record.step, batch=request.batch_kinds, loop=request.loop),
        )
        here = slice(first, first + len(graph.regions))
        first = here.stop
        found.append(Planned(record, request, partial(_graphs_of, planned, here), captured=graph))
    return found


def _graphs_of(planned: Planned, regions: slice) -> tuple[GraphModules, ...]:
    return planned.graphs()[regions]
