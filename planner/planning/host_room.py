"""Plans whose values find room on the host as they are laid out there, which may take more than is there at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from planner.capture.trace.step import TrainingGraph
from planner.codegen.moving import slab_of
from planner.core.options import GB
from planner.core.step import Step
from planner.errors import InfeasibleBudgetError, OffloadError, gb
from planner.lowering.build import split_by_region
from planner.lowering.offload import moves_by_region
from planner.planning.recipe import Passes
from planner.requests.request import Request
from solvers import Move, Solution

ROUNDS = 4  # solves with less and less of the host, where what is laid out takes more than there is


def room_taken(graph: TrainingGraph, passes: Sequence[Passes], moves: Sequence[tuple[Move, ...]]) -> int:
    """Bytes that a step takes where values go that leave."""
    rows = zip(graph.regions, passes, moves, strict=True)
    return sum(slab_of(region, *each, own)[1] for region, each, own in rows)


def solve_within_host(
    step: Step, request: Request, graph: TrainingGraph, solve: Callable[[Step], tuple[Step, Solution]]
) -> tuple[Step, Solution]:
    """Solve; and solve again with less of the host where what leaves, as laid out there, takes more than `host_gb`.

    Solvers count what is on the host at once. In a slab, room also lies between values that come and go, and what the
    forward pass sends stays until the step ends.

    Args:
        step: with a link, where values may leave.
        request: what is planned.
        graph: the step, as captured.
        solve: a step -> the step as it was solved, and its solution.

    Raises:
        OffloadError: no schedule was found whose values have room there.
    """
    found, solution = solve(step)
    most, link = request.options.host_gb, step.problem.link
    if most is None or link is None:
        return found, solution
    first = taken = _taken(graph, found, solution)
    bound, host = solution.bound, link.host or round(most * GB)
    for _ in range(ROUNDS):
        if taken <= most * GB:
            break
        host = int(min(host, solution.timeline.host_peak) * most * GB / taken)
        try:
            found, solution = solve(replace(step, problem=replace(step.problem, link=replace(link, host=host))))
        except InfeasibleBudgetError:
            break
        bound, taken = min(bound, solution.bound), _taken(graph, found, solution)
    if taken > most * GB:
        raise OffloadError(f"host_gb={most!r} is too small: what leaves takes {gb(first)} there; give that much")
    return replace(found, problem=replace(found.problem, link=link)), replace(solution, bound=bound)


def _taken(graph: TrainingGraph, step: Step, solution: Solution) -> int:
    passes = split_by_region(step, solution.schedule, len(graph.regions))
    return room_taken(graph, passes, moves_by_region(step, solution.schedule, graph.regions))
