"""The trade-off of memory for time around a plan: other plans, a proven bound, and simpler placements."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from planner.core.plan import BaselineMoment, Curve, PlanRecord, Point
from solvers import Problem, ProblemError, Solution, validate
from solvers.search.blocks import checkpointed
from solvers.search.quick_curve import quick_curve

LEAST = 3  # ops of a block, on average
KEPT, SEGMENTS, BLOCKS = "everything kept", "√L segments", "each block checkpointed"


def curve_of(plan: PlanRecord) -> Curve:
    """The trade-off curve of a plan's step: that of `pareto()` where it is known, else a sketch of it.

    The sketch takes about a second, more for thousands of ops; `pareto()` searches more, and finds better plans.
    Without a problem (in eager mode) only keeping everything is known.
    """
    own, everything = Point(plan.peak_bytes, plan.overhead), Point(plan.baseline_peak_bytes, 0.0, KEPT)
    if plan.problem is None:
        return Curve((), peers=(everything,), about=f"what is between is not known in {plan.options.mode} mode")
    problem = plan.problem.with_budget(None)
    rough = quick_curve(problem)
    peers = [everything]
    if rough.segments is not None:
        peers.append(Point(rough.segments[0], _over(problem, rough.segments[1]), SEGMENTS))
    if (block := _per_block(problem, plan.baseline_timeline)) is not None:
        peers.append(block)
    proven = Point(plan.budget_bytes, max(0.0, _over(problem, plan.bound)))
    if (known := plan.known_curve) is not None:
        return replace(known, bound=_bounds([proven, *known.bound]), peers=tuple(peers))
    found = [Point(peak, _over(problem, cost)) for peak, cost in rough.points]
    return Curve(
        _front([own, *found]),
        _bounds([proven, *(Point(budget, _over(problem, cost)) for budget, cost in rough.bounds)]),
        tuple(peers),
        "other plans, of a quick search",
    )


def curve_from(problem: Problem, found: Sequence[tuple[int, Solution]]) -> Curve:
    """The curve that `pareto()` found: budgets, ascending, with their solutions."""
    points = [Point(s.timeline.peak, _over(problem, s.timeline.cost)) for _, s in found]
    bound = tuple(Point(budget, _over(problem, s.bound)) for budget, s in found)
    return Curve(_front(points), bound, about=f"{len(found)} plans of pareto()")


def _over(problem: Problem, cost: float) -> float:
    return cost / (problem.total_cost or 1.0) - 1


def _front(points: Sequence[Point]) -> tuple[Point, ...]:
    front: list[Point] = []
    for p in sorted(points, key=lambda p: (p.peak_bytes, p.overhead)):
        if not front or p.overhead < front[-1].overhead:
            front.append(p)
    return tuple(front)


def _bounds(points: Sequence[Point]) -> tuple[Point, ...]:
    """Lower bounds by ascending budget; what is proven for a budget holds for every smaller one."""
    most, bounds = 0.0, []
    for p in sorted(points, key=lambda p: -p.peak_bytes):
        most = max(most, p.overhead)
        bounds.append(replace(p, overhead=most))
    return tuple(reversed(bounds))


def _per_block(problem: Problem, ops: Sequence[BaselineMoment]) -> Point | None:
    """Every repeated block checkpointed, simulated; None where there are none, or one spans several graphs."""
    blocks = [list(block) for block in blocks_of(ops[: problem.boundary]).values()]
    if not blocks:
        return None
    try:
        timeline = validate(problem, checkpointed(problem, blocks))
    except ProblemError:
        return None
    return Point(timeline.peak, _over(problem, timeline.cost), BLOCKS)


def blocks_of(ops: Sequence[BaselineMoment]) -> Mapping[str, Sequence[int]]:
    """The repeated blocks of a model, by path: the outermost modules with numbers for names, at least two in a row.

    Args:
        ops: of the forward pass.

    Returns:
        For each block, the positions of its ops.
    """
    found: dict[str, list[int]] = defaultdict(list)
    lists: dict[str, set[str]] = defaultdict(set)
    for i, op in enumerate(ops):
        parts = op.module.split(".")
        at = next((n for n, part in enumerate(parts) if part.isdigit()), None)
        if at is not None:
            path = ".".join(parts[: at + 1])
            lists[".".join(parts[:at])].add(path)
            found[path].append(i)
    blocks = {path: found[path] for paths in lists.values() if len(paths) > 1 for path in sorted(paths)}
    return blocks if sum(map(len, blocks.values())) >= LEAST * len(blocks) else {}
