"""Chooses which sets of ops run in pieces, and in how many: only where the budget, or the time, asks for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from torch import fx

from planner.capture.regions.region import Region
from planner.capture.trace.step import TrainingGraph
from planner.core.pieces import Split
from planner.core.plan import InPieces, PlanRecord
from planner.core.recipe import Recipe
from planner.core.step import Step
from planner.errors import InfeasibleBudgetError, gb
from planner.pieces.around import Needs, Surroundings
from planner.pieces.candidates import candidates
from planner.pieces.known import Known
from planner.pieces.rewrite import in_pieces
from solvers import Solution, cost_bound, every_op_once, first_runs_bound, lean_peak, minimum_peak_bound, simulate

SMALLER = 8  # the ops that take the most are sought down to this share of it, by this factor at a time:
STEP = 0.8
PATIENCE = 2  # so many finer steps in a row of no lower bound end a search
SMALLEST = 256  # no piece is smaller than the largest value by more than this factor
LOWER = 0.98  # finer pieces that lower the bound on the peak by less are not looked at
CHEAPER = 0.97  # of the time of the plan without pieces: only below it are pieces chosen where that fits, too

Solved = tuple[TrainingGraph, Step, Solution]
Splits = tuple[tuple[Split, ...], ...]  # of each region


def with_splits(
    graph: TrainingGraph, splits: Sequence[tuple[Split, ...]], known: Sequence[Known] | None = None
) -> TrainingGraph | None:
    """The step with sets of each region's ops in pieces; None where they are not of it."""
    rows = zip(graph.regions, splits, known or [Known() for _ in splits], strict=True)
    regions = [in_pieces(*row) for row in rows]
    return None if None in regions else replace(graph, regions=tuple(r for r in regions if r is not None))


def as_in(graph: TrainingGraph, record: PlanRecord) -> TrainingGraph:
    """The step with those of its ops in pieces that a plan of it has so; as it is where the plan is of another step."""
    recipe = record.recipe
    planned = [r for calls in recipe.calls.values() for r in calls if r] if isinstance(recipe, Recipe) else []
    of = {r.fingerprint: r.splits for r in planned}
    splits = [of.get(region.fingerprint, ()) for region in graph.regions]
    return (with_splits(graph, splits) or graph) if any(splits) else graph


@dataclass(frozen=True)
class _Rung:
    """A step with some of its ops in pieces, its problem, and a lower bound on its peak, in bytes."""

    graph: TrainingGraph
    step: Step
    bound: int


def solve_in_pieces(
    graph: TrainingGraph,
    lower: Callable[[TrainingGraph], Step],
    solve: Callable[[TrainingGraph, Step], Solved],
    roomy: Callable[[Step], Step],
) -> Solved:
    """Solve a step; where its budget does not allow that, with as few and as large pieces as it surely takes.

    Pieces become smaller step by step, in an order that does not depend on the budget: what an error names as the least
    budget is feasible. In pieces, only what has a schedule that fits at once is solved; where nothing has, the leanest.

    Args:
        graph: the step, whole.
        lower: a step -> its problem.
        solve: a step and its problem -> its solution; InfeasibleBudgetError where there is none.
        roomy: a step -> the step as it is solved first, with a margin for the allocator.

    Raises:
        InfeasibleBudgetError: with the least budget, of the step whole or in the leanest pieces.
    """
    known, ends = tuple(Known() for _ in graph.regions), dict[int, InfeasibleBudgetError]()
    step, end = lower(graph), None
    budget = step.problem.budget
    sizes = _Lowered(_by_size(graph, known, tuple(region.splits for region in graph.regions)), lower)
    if budget is None or first_runs_bound(step.problem) <= budget:
        try:
            if (found := _solve_fitting(graph, step, sizes, solve, roomy)) is not None:
                return found
        except InfeasibleBudgetError as e:
            end = e
    rungs = _descent(graph, step, lower, sizes, known)
    whole = rung = next(rungs)
    if end is not None:
        ends[whole.bound] = end
    why = f"With every op whole, the step needs {gb(whole.bound)} at least"
    for rung in rungs:
        if budget is not None and rung.bound <= budget and lean_peak(roomy(rung.step).problem) <= budget:
            try:
                return _because(solve(rung.graph, rung.step), why, whole.step)
            except InfeasibleBudgetError as e:
                ends[rung.bound] = e
    for each in (rung, whole):  # for these alone, a budget that is their least leads to them again
        if each.bound not in ends and all(each.bound < e.minimum_bytes for e in ends.values()):
            try:
                return _because(solve(each.graph, each.step), why, whole.step)
            except InfeasibleBudgetError as e:
                ends[each.bound] = e
    raise min((ends[each.bound] for each in (rung, whole) if each.bound in ends), key=lambda e: e.minimum_bytes)


class _Lowered:
    """Steps in smaller and smaller pieces, each with its problem; made once, when they are first asked for."""

    def __init__(self, graphs: Iterator[TrainingGraph], lower: Callable[[TrainingGraph], Step]) -> None:
        self._made: list[tuple[TrainingGraph, Step]] = []
        self._rest = ((graph, lower(graph)) for graph in graphs)

    def __iter__(self) -> Iterator[tuple[TrainingGraph, Step]]:
        yield from self._made
        for pair in self._rest:
            self._made.append(pair)
            yield pair

    def used_up(self) -> Iterator[tuple[TrainingGraph, Step]]:
        """The same for the last time: no step is held."""
        made, self._made = self._made, []
        yield from made
        yield from self._rest


def _descent(
    graph: TrainingGraph, step: Step, lower: Callable[[TrainingGraph], Step], sizes: _Lowered, known: Sequence[Known]
) -> Iterator[_Rung]:
    """The whole step, then the same in pieces: each takes clearly less than all before, as far as the bounds say."""
    leanest = _Rung(graph, step, minimum_peak_bound(step.problem))
    yield leanest

    def needs() -> Iterator[tuple[TrainingGraph, Step]]:
        splits = tuple(region.splits for region in leanest.graph.regions)
        return _Lowered(_by_need(graph, known, splits, _needs(graph, step)), lower).used_up()

    for ladder in (sizes.used_up, needs):
        misses = 0
        for finer, cut in ladder():
            bound = minimum_peak_bound(cut.problem)
            misses = misses + 1 if bound > LOWER * leanest.bound else 0
            if not misses:
                leanest = _Rung(finer, cut, bound)
                yield leanest
            if misses == PATIENCE:
                break


def _needs(graph: TrainingGraph, step: Step) -> tuple[Needs, ...]:
    """For each region of a step that is whole, the bytes that each of its ops takes while it runs."""
    needs: list[dict[fx.Node, int]] = [{} for _ in graph.regions]
    sizes = step.problem.sizes
    for op, origin in zip(step.problem.ops, step.origins, strict=True):
        if origin.region is not None and graph.regions[origin.region].fingerprint:
            node = graph.regions[origin.region].ops[origin.index].node
            needs[origin.region][node] = sum(sizes[v] for v in {*op.reads, *op.writes}) + op.workspace
    return tuple(needs)


def _by_need(
    graph: TrainingGraph, known: Sequence[Known], splits: Splits, needs: Sequence[Needs]
) -> Iterator[TrainingGraph]:
    """The step with smaller and smaller needs of single ops, beside what runs in pieces already."""
    around = [Surroundings(*row) for row in zip(graph.regions, known, needs, splits, strict=True)]
    most = float(max((each.most for each in around), default=0))
    least, before = most / SMALLER, splits
    while most > least:
        most *= STEP
        finer = tuple((*own, *each.above(most)) for own, each in zip(splits, around, strict=True))
        if finer != before and (cut := with_splits(graph, finer, known)) is not None:
            yield cut
        before = finer


def _by_size(graph: TrainingGraph, known: Sequence[Known], splits: Splits) -> Iterator[TrainingGraph]:
    """The step, whole, with its largest values in smaller and smaller pieces."""
    found = candidates(graph.regions, known)
    largest = max((each.nbytes for each in found), default=0)
    before = splits
    pieces = 2
    while pieces <= SMALLEST and found:
        pairs = [(each.region, each.at(largest / pieces)) for each in found]
        finer = tuple(tuple(s for r, s in pairs if r == at and s is not None) for at in range(len(graph.regions)))
        pieces *= 2
        if finer != before and (cut := with_splits(graph, finer, known)) is not None:
            yield cut
        before = finer


def _solve_fitting(
    graph: TrainingGraph,
    step: Step,
    sizes: _Lowered,
    solve: Callable[[TrainingGraph, Step], Solved],
    roomy: Callable[[Step], Step],
) -> Solved | None:
    """Solve a step whose ops may all be whole; or the same with the largest values in pieces where nothing has to be
    recomputed then and it takes clearly less time: no search runs for it, nor for the whole step where a bound says so.
    None where a bound says that the whole step does not fit.
    """
    if (found := _cheaper(step, cost_bound(step.problem), sizes, solve, roomy)) is not None:
        return found
    budget = step.problem.budget
    if budget is not None and minimum_peak_bound(step.problem) > budget:
        return None
    solved = solve(graph, step)
    return _cheaper(step, solved[2].timeline.cost, sizes, solve, roomy) or solved


def _cheaper(
    step: Step,
    cost: float,
    sizes: _Lowered,
    solve: Callable[[TrainingGraph, Step], Solved],
    roomy: Callable[[Step], Step],
) -> Solved | None:
    """The step with the largest values in pieces and nothing recomputed, where that fits in clearly less time than the
    whole step takes at least.
    """
    problem = step.problem
    if problem.budget is None or cost * CHEAPER <= problem.total_cost:
        return None
    for finer, cut in sizes:
        once = simulate(roomy(cut).problem, every_op_once(cut.problem))
        if once.cost > CHEAPER * cost:
            break
        if once.peak <= problem.budget:
            more = cost / once.cost - 1
            why = f"With every op whole, the step would take {more:.0%} longer at least"
            return _because(solve(finer, cut), why, step)
    return None


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
