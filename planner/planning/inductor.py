"""From a checked request to a plan whose graphs Inductor compiles."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from planner.capture.trace.dynamo import GraphCompiler
from planner.capture.trace.step import TrainingGraph
from planner.compat.inductor import missing_parts
from planner.core.plan import GraphModules
from planner.core.recipe import PlannedRegion, Recipe
from planner.core.step import Step
from planner.costs.account import planned_step
from planner.errors import CaptureError, InfeasibleBudgetError, PlannerError, warn
from planner.inductor.backend import Source, capturing
from planner.inductor.emit import emit_planned
from planner.inductor.realise import costs_of, fuse
from planner.inductor.search import Estimates, Search, TooSmall, Tried, find, leaner, plainly, runs_under, search_of
from planner.planning.decisions import peak_account
from planner.planning.record import Unplanned, record_of
from planner.requests.planned import Known, Planned, source_of
from planner.requests.request import Request
from solvers import Schedule
from solvers.progress import bar, clock


@dataclass(frozen=True)
class FusedGraph(TrainingGraph):
    """A step that was captured inside Inductor's pipeline.

    Attributes:
        source: its one graph.
    """

    source: Source | None = None


def without_inductor() -> str:
    """Why a plan that is asked for in this mode is one of "aten", in words; empty where it need not be."""
    missing = missing_parts()
    return (
        f"Planned with mode='aten': mode='inductor' needs parts of torch that this one lacks ({', '.join(missing)})."
        if missing
        else ""
    )


def not_fused(request: Request, why: CaptureError) -> Request:
    """The request in mode "aten" for a model that torch.compile was given, and that this mode cannot plan; it warns."""
    name = type(request.model).__name__
    told = f"{name} was given to torch.compile(), and is planned with mode='aten', without fused kernels: {why}"
    warn(told)
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
) -> Planned:
    """Plan a checked request that has a batch, to be compiled by Inductor; raises as `plan()` does.

    Args:
        request: what to plan.
        graph: its step, as `fused_graph()` captures it.
        lower: as `pipeline.lower`.
        others: plans of the same model, whose schedules are tried first.
        known: as for `make_plan()`.
    """
    assert isinstance(graph, FusedGraph)
    assert graph.source is not None

    def lowered(of: TrainingGraph, estimates: Estimates) -> Step:
        return lower(request, of, planned_before=True, estimates=estimates)

    if known is not None and (same := _same(request, graph, known, lowered)) is not None:
        return same

    shown_as = "{desc}: {n} schedules looked at, {elapsed}"
    with bar("planning", request.options.progress, bar_format=shown_as) as shown, clock(shown):
        try:
            search = leaner(search_of(request, graph, graph.source, lowered, lambda: shown.update()))
            first = list(_schedules(search, [*([known] if known is not None else []), *others]))
            best, everything, solution = find(search, first)
        except TooSmall as e:
            lean = e.leanest
            takes = {**lean.step.account, **peak_account(lean.step, lean.replay)}
            takes = dict(sorted(takes.items(), key=lambda line: -line[1]))
            raise InfeasibleBudgetError(request.budget_gb, lean.peak, takes) from None
        except (PlannerError, MemoryError):
            raise
        except Exception as e:
            raise CaptureError(
                f"Inductor does not compile {type(request.model).__name__}: {type(e).__name__}: {e}. Plan with "
                "mode='aten'"
            ) from e
    planned = best.planned
    if known is not None and (best.schedule, planned.near) in first:
        solution = replace(solution, note=f"Taken from {source_of(known)}: the same step and budget.")
    note = f"{solution.note} {graph.note} {LATER}".strip()
    recipe = _recipe(graph, planned)
    unplanned = Unplanned(everything.step, runs_under(search, everything, best))
    record = record_of(request, best.step, best.replay, replace(solution, note=note), recipe, unplanned)
    return Planned(replace(record, eager_peak_bytes=None), request, _graphs(graph, planned), captured=graph)


def _recipe(graph: FusedGraph, planned: PlannedRegion) -> Recipe:
    calls = {key: tuple(None if r is None else planned for r in order) for key, order in graph.order.items()}
    return Recipe(calls, graph.detached, {}, None, graph.asked, graph.paths.apart, graph.paths.inner, graph.written)


def _graphs(graph: FusedGraph, planned: PlannedRegion) -> Callable[[], tuple[GraphModules, ...]]:
    def graphs() -> tuple[GraphModules, ...]:
        written = emit_planned(graph.regions[0], planned)
        assert written is not None
        return (GraphModules(*written),)

    return graphs


def planned_in_vain(request: Request, graph: TrainingGraph) -> bool:
    """Whether gradients of the model's outputs have a place in a plan that did not come in each backward pass."""
    cut = {at for key, order in graph.order.items() if 0 in order for at in graph.detached.get(key, ())}
    missing = (*request.loop.unreached, *request.loop.by_turns)
    found = (graph.outputs[at] for at in missing if at < len(graph.outputs))
    return any(output is not None and output[1] not in cut for output in found)


def _same(
    request: Request, graph: FusedGraph, known: Known, lower: Callable[[TrainingGraph, Estimates], Step]
) -> Planned | None:
    """A known plan, where it is of this step, budget and torch, so that Inductor is not asked what it makes of it."""
    record, region = known.record, graph.regions[0]
    planned = next(iter(_regions(known)), None)
    if planned is None or planned.realised is None or record.recipe != _recipe(graph, planned):
        return None
    if planned.fingerprint != region.fingerprint or record.budget_bytes != request.budget_bytes:
        return None
    if planned.settings not in (request.settings, plainly(request)):
        return None
    fused = fuse(region, planned.realised)
    step = lower(replace(graph, regions=(fused.coarse,)), (costs_of(fused, request.device, {}),))
    here = planned_step(request, step.account["optimizer state"], step.optimizer_step)
    if step.problem.resident != record.resident_bytes or here != record.step:
        return None
    note = f"Taken from {source_of(known)}: the same step and budget. {LATER}"
    record = replace(record, note=note, options=request.options, solver=request.options.solver)
    return Planned(record, request, _graphs(graph, planned), captured=graph)


def _regions(plan: Known) -> list[PlannedRegion]:
    recipe = plan.record.recipe
    return [r for calls in recipe.calls.values() for r in calls if r] if isinstance(recipe, Recipe) else []


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
    if len(graph.regions) != 1 or len(sources) == 0:
        raise CaptureError(
            f"{type(request.model).__name__} is captured as {len(graph.regions)} graphs (torch.compile breaks it), and "
            "mode='inductor' plans one: plan with mode='aten', or a submodule without a break"
        )
    source = next((s for s in reversed(sources) if s.region.joint is graph.regions[0].joint), None)
    if source is None:
        raise CaptureError("mode='inductor' plans steps of one graph: plan with mode='aten'")
    source.region = graph.regions[0]
    return FusedGraph(**{name: getattr(graph, name) for name in TrainingGraph.__dataclass_fields__}, source=source)


def _schedules(search: Search, plans: Sequence[Known]) -> Iterator[Tried]:
    """The schedules of plans that are of this step."""
    step = search.step
    number = {o.index: i for i, o in enumerate(step.origins) if o.region is not None}
    own = [i for i, o in enumerate(step.origins) if o.region is None]
    for plan in plans:
        for region in _regions(plan):
            fused = search.fused
            if region.realised == fused.realised and region.fingerprint == fused.fine.fingerprint:
                loss = [i for i in own if step.origins[i].phase == "loss"]
                after = [i for i in own if i not in loss]
                forward = [number[i] for i in region.forward]
                yield Schedule((*forward, *loss, *(number[i] for i in region.backward), *after)), region.near
