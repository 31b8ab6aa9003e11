"""From a checked request to a plan whose graphs Inductor compiles."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from planner.capture.joint_graph import is_mutation
from planner.capture.trace.dynamo import GraphCompiler
from planner.capture.trace.step import TrainingGraph
from planner.compat.inductor import missing_parts
from planner.core.plan import GraphModules
from planner.core.recipe import PlannedRegion, Recipe
from planner.core.step import Step
from planner.costs.account import planned_step
from planner.errors import CaptureError, InfeasibleBudgetError, PlannerError
from planner.inductor.backend import Source, capturing
from planner.inductor.emit import emit_planned
from planner.inductor.realise import fuse
from planner.inductor.search import TooSmall, Tried, find_in_layouts, plainly
from planner.inductor.trials import Estimates, Lower, Part, Trials, modelled, runs_under, trials_of
from planner.planning.decisions import peak_account
from planner.planning.notes import notes
from planner.planning.record import Unplanned, record_of
from planner.planning.unreached import cut_outputs
from planner.requests.planned import Known, Planned, source_of
from planner.requests.request import Request
from solvers import Schedule
from solvers.progress import bar, clock


@dataclass(frozen=True)
class FusedGraph(TrainingGraph):
    """A step that was captured inside Inductor's pipeline.

    Attributes:
        sources: for each region, its graph; None for one that runs outside of compiled graphs.
    """

    sources: tuple[Source | None, ...] = ()


def without_inductor() -> str:
    """Why a plan that is asked for in this mode is one of "aten", in words; empty where it need not be."""
    missing = missing_parts()
    return (
        f"Planned with mode='aten': mode='inductor' needs parts of torch that this one lacks ({', '.join(missing)})."
        if missing
        else ""
    )


def not_fused(request: Request, why: CaptureError | str) -> Request:
    """The request in mode "aten" for a model that torch.compile was given, and why this mode is not for it."""
    name = type(request.model).__name__
    told = f"{name} was given to torch.compile(), and is planned with mode='aten', without fused kernels: {why}"
    return replace(in_aten(request), instead=told)


def in_aten(request: Request) -> Request:
    """The same request in mode "aten"."""
    return replace(request, options=replace(request.options, mode="aten"))


def make_inductor_plan(
    request: Request,
    graph: TrainingGraph,
    lower: Callable[..., Step],
    others: Sequence[Planned] = (),
    known: Known | None = None,
    earlier: TrainingGraph | None = None,
) -> Planned:
    """Plan a checked request that has a batch, to be compiled by Inductor; raises as `plan()` does.

    Args:
        request: what to plan.
        graph: its step, as `fused_graph()` captures it.
        lower: as `pipeline.lower`.
        others: plans of the same model, whose schedules are tried first.
        known: as for `make_plan()`.
        earlier: the same.
    """
    assert isinstance(graph, FusedGraph)
    graph = _as_seen_before(graph, earlier)

    def lowered(of: TrainingGraph, estimates: Estimates) -> Step:
        return lower(request, of, planned_before=True, estimates=estimates)

    if known is not None and (same := _same(request, graph, known, lowered)) is not None:
        return same

    shown_as = "{desc}: {n} schedules looked at, {elapsed}"
    with bar("planning", request.options.progress, bar_format=shown_as) as shown, clock(shown):
        try:
            trials = trials_of(request, graph, graph.sources, lowered, lambda: shown.update())
            plans = [*([known] if known is not None else []), *others]
            trials, best, everything, solution = find_in_layouts(trials, partial(_schedules, plans=plans))
        except TooSmall as e:
            lean = e.leanest
            takes = {**lean.step.account, **peak_account(lean.step, lean.replay)}
            raise InfeasibleBudgetError(request.budget_gb, lean.peak, takes) from None
        except (PlannerError, MemoryError):
            raise
        except Exception as e:
            raise CaptureError(
                f"Inductor does not compile {type(request.model).__name__}: {type(e).__name__}: {e}. Plan with "
                "mode='aten'"
            ) from e
    planned = best.planned
    if known is not None and (best.schedule, planned[0].near) in _schedules(trials, plans):
        solution = replace(solution, note=f"Taken from {source_of(known)}: the same step and budget.")
    note = " ".join(filter(None, [solution.note, graph.note, LATER, *notes(request, graph)]))
    recipe = _recipe(graph, planned)
    unplanned = Unplanned(everything.step, runs_under(trials, everything, best))
    record = record_of(request, best.step, best.replay, replace(solution, note=note), recipe, unplanned)
    return Planned(replace(record, eager_peak_bytes=None), request, _graphs(graph, planned), captured=graph)


def _recipe(graph: FusedGraph, planned: Sequence[PlannedRegion]) -> Recipe:
    calls = {key: tuple(None if r is None else planned[r] for r in order) for key, order in graph.order.items()}
    return Recipe(
        calls, graph.detached, {}, graph.maxima, graph.asked, graph.paths.apart, graph.paths.inner, graph.written
    )


def _graphs(graph: FusedGraph, planned: Sequence[PlannedRegion]) -> Callable[[], tuple[GraphModules, ...]]:
    def graphs() -> tuple[GraphModules, ...]:
        found = []
        for region, each, source in zip(graph.regions, planned, graph.sources, strict=True):
            if source is not None:
                written = emit_planned(region, each)
                assert written is not None
                found.append(GraphModules(*written))
        return tuple(found)

    return graphs


def planned_in_vain(request: Request, graph: TrainingGraph) -> bool:
    """Whether gradients of the model's outputs have a place in a plan that did not come in each backward pass."""
    missing = {*request.loop.unreached, *request.loop.by_turns} - cut_outputs(graph, graph.detached)
    return any(graph.outputs[at] is not None for at in missing if at < len(graph.outputs))


def gradients_of_written(graph: TrainingGraph) -> bool:
    """Whether graphs have places for gradients of inputs that they write into: these come where something else is
    computed from such an input afterwards.
    """
    tangents = (n for region in graph.regions if region.fingerprint for n in region.tangents if n.users)
    return any(is_mutation(getattr(n.meta.get("desc"), "output", None)) for n in tangents)


def _same(request: Request, graph: FusedGraph, known: Known, lower: Lower) -> Planned | None:
    """A known plan, where it is of this step, budget and torch, so that Inductor is not asked what it makes of it."""
    record, planned = known.record, _regions(known, graph)
    if planned is None or record.recipe != _recipe(graph, planned) or record.budget_bytes != request.budget_bytes:
        return None
    pairs = list(zip(graph.regions, planned, strict=True))
    if any(region.fingerprint != each.fingerprint for region, each in pairs):
        return None
    if any(each.settings not in (request.settings, plainly(request)) for each in planned if each.fingerprint):
        return None
    fused = [fuse(region, each.realised) if each.realised is not None else None for region, each in pairs]
    step = modelled(request, graph, fused, lower)
    here = planned_step(request, step.account["optimizer state"], step.optimizer_step)
    if step.problem.resident != record.resident_bytes or here != record.step:
        return None
    taken = f"Taken from {source_of(known)}: the same step and budget."
    note = " ".join([taken, LATER, *notes(request, graph)])
    record = replace(record, note=note, options=request.options, solver=request.options.solver)
    return Planned(record, request, _graphs(graph, planned), captured=graph)


def _regions(plan: Known, graph: FusedGraph) -> tuple[PlannedRegion, ...] | None:
    """The regions of a plan as those of a step; None where it is not of such a step."""
    recipe = plan.record.recipe
    if not isinstance(recipe, Recipe) or recipe.calls.keys() != graph.order.keys():
        return None
    found = dict[int | None, PlannedRegion | None]()
    for key, order in graph.order.items():
        if len(order) != len(recipe.calls[key]):
            return None
        found.update(zip(order, recipe.calls[key], strict=True))
    outside = PlannedRegion("", (), ())
    planned = [found.get(r, outside) for r in range(len(graph.regions))]
    if any(each is None or (each.realised is None and each is not outside) for each in planned):
        return None
    return tuple(each for each in planned if each is not None)


LATER = "The peak is that of the code which Inductor generates, run on fake tensors."


def fused_graph(
    request: Request,
    capture: Callable[[Request, GraphCompiler], TrainingGraph],
    captured: TrainingGraph | None = None,
) -> FusedGraph:
    """The step of a request, captured inside Inductor's pipeline; CaptureError where that is not one graph.

    Args:
        request: that has a batch.
        capture: captures its step with a compiler of graphs.
        captured: the step, where it may have been captured so before.
    """
    if isinstance(captured, FusedGraph):
        return captured
    sources: list[Source] = []
    graph = capture(request, capturing(sources, request.settings))
    latest = {id(source.region.joint): source for source in sources}
    found = tuple(latest.get(id(region.joint)) if region.fingerprint else None for region in graph.regions)
    if not any(found) or any(s is None and r.fingerprint for s, r in zip(found, graph.regions, strict=True)):
        raise CaptureError("mode='inductor' plans steps of compiled graphs: plan with mode='aten'")
    return with_sources(graph, found)


def with_sources(graph: TrainingGraph, sources: Sequence[Source | None]) -> FusedGraph:
    """A step whose regions have these graphs of Inductor's pipeline; None for one outside of compiled graphs."""
    fields = {name: getattr(graph, name) for name in TrainingGraph.__dataclass_fields__}
    return FusedGraph(**fields, sources=tuple(sources))


def _as_seen_before(graph: FusedGraph, earlier: TrainingGraph | None) -> FusedGraph:
    """The step with the graphs of an earlier one that are like its own, and what was seen of them."""
    if not isinstance(earlier, FusedGraph):
        return graph
    known = [source for source in earlier.sources if source is not None]
    found = (None if own is None else next(filter(own.is_like, known), own) for own in graph.sources)
    return replace(graph, sources=tuple(found))


def _schedules(trials: Trials, plans: Sequence[Known]) -> Iterator[Tried]:
    """The schedules of plans that are of this step."""
    graph = trials.graph
    assert isinstance(graph, FusedGraph)
    for plan in plans:
        planned = _regions(plan, graph)
        if planned is not None and all(map(_is_of, planned, trials.parts)):
            yield _schedule(trials.step, planned), max(each.near for each in planned)


def _is_of(planned: PlannedRegion, part: Part | None) -> bool:
    if part is None:
        return planned.realised is None
    return planned.realised == part.fused.realised and planned.fingerprint == part.fused.fine.fingerprint


def _schedule(step: Step, planned: Sequence[PlannedRegion]) -> Schedule:
    """The passes of regions as a schedule of the step; what no graph runs stays where it is."""
    number = {(o.region, o.index): i for i, o in enumerate(step.origins) if o.region is not None}
    steps, begun = list[int](), set[tuple[int, str]]()
    for i, origin in enumerate(step.origins):
        if origin.region is None or planned[origin.region].realised is None:
            steps.append(i)
        elif (origin.region, origin.phase) not in begun:
            begun.add((origin.region, origin.phase))
            own = planned[origin.region]
            passes = own.forward if origin.phase == "forward" else own.backward
            steps += [number[origin.region, at] for at in passes]
    return Schedule(tuple(steps))
