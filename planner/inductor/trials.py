"""Schedules of a captured step, and what Inductor makes of each: trials, whose peaks are exact."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import NoReturn

from planner.capture.regions.region import Region
from planner.capture.trace.step import TrainingGraph
from planner.core.recipe import PlannedRegion, Settings
from planner.core.step import Replay, Runs, Step, replay
from planner.costs.measure_op import Allocated
from planner.costs.ops import OpEstimate, estimate
from planner.errors import CaptureError
from planner.inductor.backend import Look, Source, look
from planner.inductor.emit import OP, emit_planned
from planner.inductor.observe import Observed, observe, told, workspaces
from planner.inductor.realise import DRAWS, Fused, costs_of, fuse, realised_ops
from planner.lowering.build import split_by_region
from planner.requests.request import Request
from solvers import Schedule, Solution, every_op_once

Estimates = Sequence[Sequence[OpEstimate]]
Lower = Callable[[TrainingGraph, Estimates], Step]


@dataclass(frozen=True)
class Part:
    """A region of the step that Inductor compiles.

    Attributes:
        source: its graph.
        fused: the region with fused ops.
        default: what Inductor makes of it by its own partition.
    """

    source: Source
    fused: Fused
    default: Look


@dataclass(frozen=True)
class Trial:
    """A schedule, and what Inductor makes of it.

    Attributes:
        schedule: of the modelled step's ops.
        planned: the same for each region.
        observed: the launches of each; None for one that runs outside of compiled graphs.
        step: the step that they are, each once.
        replay: of that.
    """

    schedule: Schedule
    planned: tuple[PlannedRegion, ...]
    observed: tuple[Observed | None, ...]
    step: Step
    replay: Replay

    @property
    def peak(self) -> int:
        """Bytes, everything that the budget counts, exactly."""
        return self.replay.timeline.peak

    @property
    def seconds(self) -> float:
        """Estimated time."""
        return self.replay.timeline.cost


@dataclass(frozen=True)
class Trials:
    """A captured step, to try schedules on.

    Attributes:
        request: what is planned.
        graph: the step.
        parts: for each region, how Inductor runs it; None for one that runs outside of compiled graphs.
        step: the step as it is modelled: fused ops, and the values that they realise.
        lower: a graph with such regions, and estimates -> the step.
        tried: after each trial, called.
        solved: what the solver has found, for so many bytes of its model.
    """

    request: Request
    graph: TrainingGraph
    parts: tuple[Part | None, ...]
    step: Step
    lower: Lower
    tried: Callable[[], None]
    solved: dict[int, Solution | None] = field(default_factory=dict, compare=False)

    def trial(self, schedule: Schedule, near: int) -> Trial:
        """What Inductor makes of a schedule. Raises CaptureError where it cannot compile the graphs.

        Args:
            schedule: of the modelled step's ops.
            near: how many of its steps apart is what may be fused, at most.
        """
        planned = tuple(replace(each, near=near) for each in self.planned(schedule))
        seen = [
            None if part is None else _look(part.source, each.settings, each)
            for part, each in zip(self.parts, planned, strict=True)
        ]
        return self._seen(schedule, planned, seen)

    @cached_property
    def own(self) -> Trial:
        """What Inductor makes of the step by its own partition: the step as torch.compile runs it without a plan."""
        schedule = every_op_once(self.step.problem)
        planned = tuple(replace(each, own=True) for each in self.planned(schedule))
        return self._seen(schedule, planned, [None if part is None else part.default for part in self.parts])

    def planned(self, schedule: Schedule) -> tuple[PlannedRegion, ...]:
        """A schedule of the modelled step's ops as those of the regions."""
        passes = split_by_region(self.step, schedule, len(self.parts))
        return tuple(
            PlannedRegion("", *each)
            if part is None
            else replace(planned_region(part.fused, *each), settings=self.request.settings)
            for part, each in zip(self.parts, passes, strict=True)
        )

    def _seen(self, schedule: Schedule, planned: tuple[PlannedRegion, ...], seen: Sequence[Look | None]) -> Trial:
        """The trial of a schedule whose regions were looked at."""
        request = self.request
        taken = workspaces(filter(None, seen), request.measure_on, request.options.progress)
        observed = tuple(
            None if part is None or each is None else observe(part.fused, each, request.device, taken)
            for part, each in zip(self.parts, seen, strict=True)
        )
        estimates = _estimates(request, self.graph, [None if own is None else own.estimates for own in observed])
        graph = with_regions(self.graph, [None if own is None else own.region for own in observed])
        step = told(self.lower(graph, estimates), observed)
        self.tried()
        return Trial(schedule, planned, observed, step, replay(step.problem, every_op_once(step.problem)))


def _unplanned() -> NoReturn:
    raise CaptureError("the step has another graph each time that it is traced: plan with mode='aten'")


def with_regions(graph: TrainingGraph, regions: Sequence[Region | None]) -> TrainingGraph:
    """The step with other ops for some of its regions; None for one that stays."""
    found = tuple(own if other is None else other for own, other in zip(graph.regions, regions, strict=True))
    held = tuple(
        each
        if each.until is None or regions[each.until[0]] is None
        else replace(each, until=(each.until[0], found[each.until[0]].boundary - 1))  # a compiled graph's last op
        for each in graph.held
    )
    return replace(graph, regions=found, held=held)


def trials_of(
    request: Request,
    graph: TrainingGraph,
    sources: Sequence[Source | None],
    lower: Lower,
    tried: Callable[[], None],
) -> Trials:
    """The trials of a captured step; what Inductor realises by its own partition are the values.

    Args:
        request: what is planned.
        graph: the step.
        sources: for each of its regions, its graph; None for one that runs outside of compiled graphs.
        lower: a graph with other regions, and estimates -> the step.
        tried: called after each trial.
    """
    looks = {source: _look(source, request.settings) for source in dict.fromkeys(sources) if source is not None}
    parts = tuple(
        None if source is None else Part(source, fused_as(region, looks[source]), looks[source])
        for region, source in zip(graph.regions, sources, strict=True)
    )
    taken = workspaces(looks.values(), request.measure_on, request.options.progress)
    of_nodes = [{} if part is None else _bytes_of(part.default, taken) for part in parts]
    step = modelled(request, graph, [None if part is None else part.fused for part in parts], lower, of_nodes)
    return Trials(request, graph, parts, step, lower, tried)


def _look(source: Source, settings: Settings, planned: PlannedRegion | None = None) -> Look:
    """What Inductor makes of a graph by a schedule, or by its own partition for None; each is asked for once."""
    known = settings if planned is None else planned
    if known not in source.looks:
        if planned is None:
            source.looks[known] = look(source, None, settings)
        else:
            emitted = partial(emit_planned, planned=planned)
            source.looks[known] = look(source, lambda region: emitted(region) or _unplanned(), settings, planned.near)
    return source.looks[known]


def modelled(
    request: Request,
    graph: TrainingGraph,
    fused: Sequence[Fused | None],
    lower: Lower,
    workspaces: Sequence[Mapping[str, int]] = (),
) -> Step:
    """The step of fused ops; arguments as for `trials_of()`.

    Args:
        request: what is planned.
        graph: the step.
        fused: its regions; None for one that runs outside of compiled graphs.
        lower: a graph with other regions, and estimates -> the step.
        workspaces: for each region, bytes that nodes take which are no kernels, by name; none if they do not matter.
    """
    of_nodes = workspaces or [{}] * len(fused)
    pairs = zip(fused, of_nodes, strict=True)
    costs = [None if each is None else costs_of(each, request.device, own) for each, own in pairs]
    return lower(
        with_regions(graph, [None if each is None else each.coarse for each in fused]),
        _estimates(request, graph, costs),
    )


def _estimates(request: Request, graph: TrainingGraph, own: Sequence[Sequence[OpEstimate] | None]) -> Estimates:
    """The costs of all regions: where there are none yet, those of single ops."""
    here, shown = request.measure_on, request.options.progress
    return [
        estimate((region,), request.device, measure_on=here, progress=shown)[0] if costs is None else costs
        for region, costs in zip(graph.regions, own, strict=True)
    ]


def _bytes_of(looked: Look, taken: Mapping[str, Allocated]) -> dict[str, int]:
    """The workspaces of the nodes that are no kernels, by name."""
    both, found = (looked.forward, looked.backward), dict[str, int]()
    for launch in looked.run.launches:
        realised = both[launch.backward].realised
        for name in launch.made:
            if launch.call is not None and launch.call.key in taken and name in realised:
                found[realised[name].name] = taken[launch.call.key].workspace
    return found


def planned_region(fused: Fused, forward: Sequence[int], backward: Sequence[int]) -> PlannedRegion:
    """The schedule of a region's fused ops as the runtime reads it."""
    draws = any(op.keep_because == DRAWS for op in fused.fine.ops)
    return PlannedRegion(fused.fine.fingerprint, tuple(forward), tuple(backward), fused.realised, draws=draws)


def fused_as(region: Region, looked: Look) -> Fused:
    """The region with the ops that Inductor fuses by its own partition, whose nodes are tagged with them."""
    realised = [node for generated in (looked.forward, looked.backward) for node in generated.realised.values()]
    fused = fuse(region, realised_ops(region, {node.name for node in realised}))
    writer = {v: i for i, op in enumerate(fused.coarse.ops) for v in op.writes}
    held = {node.name: fused.coarse.value_of[node] for node in region.joint.graph.nodes}
    for node in realised:
        for v in held.get(node.name, ())[:1]:
            if v in writer:
                node.meta[OP] = writer[v]
    return fused


def runs_under(trials: Trials, everything: Trial, best: Trial) -> Runs:
    """What a trial makes of the launches of another one, which recomputes nothing. O(launches)."""
    problem = trials.step.problem
    planned = replay(problem, best.schedule)
    counts = [0] * len(problem.ops)
    for i in best.schedule.steps:
        counts[i] += 1
    number: dict[tuple[int | None, int], int] = {(o.region, o.index): i for i, o in enumerate(trials.step.origins)}
    saved = {problem.producer[v] for v in planned.saved_for_backward}
    times, kept, first = {}, set(), 0
    for i, origin in enumerate(everything.step.origins):
        own = None if origin.region is None else everything.observed[origin.region]
        at = (origin.index,) if own is None else own.steps[origin.index]
        times[i] = max((counts[number[origin.region, step]] for step in at), default=1)
    for r, own in enumerate(everything.observed):
        makers = _makers(trials.graph.regions[r]) if own is None else own.makers
        for v, step in enumerate(makers, first):
            # a storage may be written into again by another op, whose result is what is kept
            if step is None or number[r, step] in saved or counts[number[r, step]] == 1:
                kept.add(v)
        first += len(makers)
    return Runs(times, frozenset(kept))


def _makers(region: Region) -> list[int | None]:
    """For each value of a region, the op that makes it."""
    writer = {v: i for i, op in enumerate(region.ops) for v in op.writes}
    return [writer.get(v) for v in range(len(region.values))]
