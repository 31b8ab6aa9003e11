"""Chooses which sets of ops run in pieces, and in how many: only where the budget, or the time, asks for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from planner.capture.regions.region import Region
from planner.capture.trace.step import TrainingGraph
from planner.core.pieces import Split
from planner.core.plan import InPieces, PlanRecord
from planner.core.recipe import Recipe
from planner.core.step import Step
from planner.errors import InfeasibleBudgetError, gb
from planner.pieces.candidates import Candidate, candidates
from planner.pieces.rewrite import in_pieces
from solvers import Solution, every_op_once, minimum_peak_bound, simulate

SMALLEST = 256  # no piece is smaller than the largest value by more than this factor
LOWER = 0.98  # finer pieces that lower the bound on the peak by less are not looked at
CHEAPER = 0.97  # of the time of the plan without pieces: only below it are pieces chosen where that fits, too

Solved = tuple[TrainingGraph, Step, Solution]


def with_splits(graph: TrainingGraph, splits: Sequence[tuple[Split, ...]]) -> TrainingGraph | None:
    """The step with sets of each region's ops in pieces; None where they are not of it."""
    regions = [in_pieces(region, own) for region, own in zip(graph.regions, splits, strict=True)]
    return None if None in regions else replace(graph, regions=tuple(r for r in regions if r is not None))


def as_in(graph: TrainingGraph, record: PlanRecord) -> TrainingGraph:
    """The step with those of its ops in pieces that a plan of it has so; as it is where the plan is of another step."""
    recipe = record.recipe
    planned = [r for calls in recipe.calls.values() for r in calls if r] if isinstance(recipe, Recipe) else []
    of = {r.fingerprint: r.splits for r in planned}
    splits = [of.get(region.fingerprint, ()) for region in graph.regions]
    return (with_splits(graph, splits) or graph) if any(splits) else graph


def solve_in_pieces(
    graph: TrainingGraph, lower: Callable[[TrainingGraph], Step], solve: Callable[[TrainingGraph, Step], Solved]
) -> Solved:
    """Solve a step; where its budget does not allow that, with as few and as large pieces as it takes.

    Pieces become smaller step by step, every large value at once, in an order that does not depend on the budget: what
    an error names as the least budget is feasible.

    Args:
        graph: the step, whole.
        lower: a step -> its problem.
        solve: a step and its problem -> its solution; InfeasibleBudgetError where there is none.

    Raises:
        InfeasibleBudgetError: with the least budget of all that was looked at.
    """
    whole = lower(graph)
    try:
        solved = solve(graph, whole)
    except InfeasibleBudgetError as e:
        least, at_least = e, e.minimum_bytes
    else:
        return _cheaper(solved, lower, solve)
    why = f"With every op whole, the leanest schedule found needs {gb(at_least)}"
    bound, leanest = minimum_peak_bound(whole.problem), None
    for finer in _ladder(graph, candidates(graph.regions)):
        step = lower(finer)
        lowest = minimum_peak_bound(step.problem)
        if lowest > LOWER * bound:
            continue
        bound, leanest = lowest, (finer, step)
        if step.problem.budget is not None and lowest > step.problem.budget:
            continue
        leanest = None
        try:
            return _because(solve(finer, step), why, whole)
        except InfeasibleBudgetError as e:
            least = min(least, e, key=lambda each: each.minimum_bytes)
    if leanest is not None:
        try:
            return _because(solve(*leanest), why, whole)
        except InfeasibleBudgetError as e:
            least = min(least, e, key=lambda each: each.minimum_bytes)
    raise least


def _ladder(graph: TrainingGraph, found: Sequence[Candidate]) -> Iterator[TrainingGraph]:
    """The step in smaller and smaller pieces."""
    largest = max((each.nbytes for each in found), default=0)
    before: list[tuple[Split, ...]] = [() for _ in graph.regions]
    pieces = 2
    while pieces <= SMALLEST and found:
        pairs = [(each.region, each.at(largest / pieces)) for each in found]
        splits = [tuple(s for r, s in pairs if r == at and s is not None) for at in range(len(graph.regions))]
        pieces *= 2
        if splits != before and (finer := with_splits(graph, splits)) is not None:
            yield finer
        before = splits


def _cheaper(
    solved: Solved, lower: Callable[[TrainingGraph], Step], solve: Callable[[TrainingGraph, Step], Solved]
) -> Solved:
    """A solved step, or the same with the largest values in pieces where nothing has to be recomputed then and it takes
    clearly less time; no search runs for it.
    """
    graph, step, solution = solved
    problem = step.problem
    if problem.budget is None or solution.timeline.cost * CHEAPER <= problem.total_cost:
        return solved
    for finer in _ladder(graph, candidates(graph.regions)):
        cut = lower(finer)
        once = simulate(cut.problem, every_op_once(cut.problem))
        if once.cost > CHEAPER * solution.timeline.cost:
            break
        if once.peak <= problem.budget:
            more = solution.timeline.cost / once.cost - 1
            return _because(solve(finer, cut), f"With every op whole, the step would take {more:.0%} longer", step)
    return solved


def _because(solved: Solved, why: str, whole: Step) -> Solved:
    """A solution with a remark on why it is in pieces, and on what they cost."""
    graph, step, solution = solved
    more = step.problem.total_cost / whole.problem.total_cost - 1
    cost = f"{more:.1%} more" if more >= 0 else f"{-more:.1%} less"
    note = f"{solution.note} {why}; in pieces, ops take {cost} time, as estimated.".strip()
    return graph, step, replace(solution, note=note)


def described(graph: TrainingGraph, step: Step) -> tuple[InPieces, ...]:
    """The ops of a solved step that run in pieces."""
    rows = []
    for op, origin in zip(step.problem.ops, step.origins, strict=True):
        region: Region | None = None if origin.region is None else graph.regions[origin.region]
        if region is None or origin.kind != "run_in_pieces":
            continue
        node = region.ops[origin.index].node
        lengths: tuple[int, ...] = node.args[2]  # type: ignore[assignment]
        rows.append(
            InPieces(
                op.name, origin.phase, len(lengths), sum(lengths), op.workspace, op.cost, origin.module, origin.source
            )
        )
    return tuple(rows)


def in_words(rows: Sequence[InPieces]) -> str:
    """What runs in pieces, as a remark for the user; empty for nothing."""
    if not rows:
        return ""
    sets = "1 set of ops runs" if len(rows) == 1 else f"{len(rows)} sets of ops run"
    return (
        f"{sets} in pieces, whose sums are added in another order: gradients are those without a plan but for rounding."
    )
