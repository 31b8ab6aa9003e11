"""Solve, emit, look, solve again: a schedule of fused ops whose exact peak is within the budget."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import starmap
from typing import NoReturn

from planner.capture.joint_graph import tensors
from planner.capture.regions.region import Region
from planner.capture.trace.step import TrainingGraph
from planner.core.recipe import PlannedRegion, Settings
from planner.core.step import Replay, Runs, Step, replay
from planner.costs.ops import CONVOLUTIONS, OpEstimate
from planner.errors import CaptureError, PlannerError
from planner.inductor.backend import Look, Source, look
from planner.inductor.emit import OP, emit_planned
from planner.inductor.observe import Observed, observe, told, workspaces
from planner.inductor.realise import DRAWS, Fused, costs_of, fuse, realised_ops
from planner.lowering.build import split_by_region
from planner.requests.request import Request
from solvers import InfeasibleError, Schedule, Solution, every_op_once, minimum_peak, simulate, solve

ROUNDS = 3  # of solving, and looking at what Inductor makes of the schedule
ROOM = 0.05  # of the budget: what is left is not looked for again, nor is what can save no more: a look takes seconds
# steps of a schedule that may come together in the code: few kernels, and no more memory than is modelled
WIDE, NARROW = 6, 1
# convolutions have the layouts of eager mode; for channels last, Inductor copies their weights, and keeps the copies
PLAIN = ("layout_optimization", False)

Tried = tuple[Schedule, int]  # and how near each other steps come together
Estimates = Sequence[Sequence[OpEstimate]]
Lower = Callable[[TrainingGraph, Estimates], Step]


@dataclass(frozen=True)
class Trial:
    """A schedule, and what Inductor makes of it.

    Attributes:
        schedule: of the modelled step's ops.
        planned: the same for the region.
        observed: the launches.
        step: the step that they are, each once.
        replay: of that.
    """

    schedule: Schedule
    planned: PlannedRegion
    observed: Observed
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
class Search:
    """A captured step, to try schedules on.

    Attributes:
        request: what is planned.
        graph: the step.
        source: its graph.
        fused: the region with fused ops.
        step: the step as it is modelled: fused ops, and the values that they realise.
        lower: a graph with such regions, and estimates -> the step.
        tried: after each trial, called.
        default: what Inductor makes of the step by its own partition.
    """

    request: Request
    graph: TrainingGraph
    source: Source
    fused: Fused
    step: Step
    lower: Lower
    tried: Callable[[], None]
    default: Look

    def trial(self, schedule: Schedule, near: int) -> Trial:
        """What Inductor makes of a schedule. Raises CaptureError where it cannot compile the graphs.

        Args:
            schedule: of the modelled step's ops.
            near: how many of its steps apart is what may be fused, at most.
        """
        planned = replace(self.planned(schedule), near=near)
        emitted = partial(emit_planned, planned=planned)
        seen = look(self.source, lambda region: emitted(region) or _unplanned(), planned.settings, near)
        return self.seen(schedule, planned, seen)

    @cached_property
    def own(self) -> Trial:
        """What Inductor makes of the step by its own partition: the step as torch.compile runs it without a plan."""
        schedule = every_op_once(self.step.problem)
        return self.seen(schedule, replace(self.planned(schedule), own=True), self.default)

    def planned(self, schedule: Schedule) -> PlannedRegion:
        """A schedule of the modelled step's ops as that of the region."""
        planned = planned_region(self.fused, *split_by_region(self.step, schedule, 1)[0])
        return replace(planned, settings=self.request.settings)

    def seen(self, schedule: Schedule, planned: PlannedRegion, seen: Look) -> Trial:
        """The trial of a schedule that was looked at."""
        fused, request = self.fused, self.request
        taken = workspaces(seen.run, request.measure_on, request.options.progress)
        observed = observe(fused, seen, request.device, taken)
        step = told(self.lower(replace(self.graph, regions=(observed.region,)), (observed.estimates,)), observed)
        self.tried()
        return Trial(schedule, planned, observed, step, replay(step.problem, every_op_once(step.problem)))


def _unplanned() -> NoReturn:
    raise CaptureError("the step has another graph each time that it is traced: plan with mode='aten'")


def search_of(
    request: Request, graph: TrainingGraph, source: Source, lower: Lower, tried: Callable[[], None]
) -> Search:
    """The search for a captured step; what Inductor realises by its own partition are the values."""
    looked = look(source, None, request.settings)
    both = (looked.forward, looked.backward)
    fused = fused_as(source.region, looked)
    taken = workspaces(looked.run, request.measure_on, request.options.progress)
    bytes_of: dict[str, int] = {}
    for launch in looked.run.launches:
        realised = both[launch.backward].realised
        for name in launch.made:
            if launch.call is not None and launch.call.key in taken and name in realised:
                bytes_of[realised[name].name] = taken[launch.call.key].workspace
    estimates = (costs_of(fused, request.device, bytes_of),)
    step = lower(replace(graph, regions=(fused.coarse,)), estimates)
    return Search(request, graph, source, fused, step, lower, tried, looked)


def leaner(search: Search) -> Search:
    """A search as it is, or in `PLAIN` layouts, where the step takes more than its budget and less in these.

    Where convolutions take and make too few bytes to matter, that is not tried.
    """
    request = search.request
    if search.own.peak <= request.budget_bytes or PLAIN[0] in dict(request.settings):
        return search
    if _convolved_bytes(search.fused.fine) <= ROOM * search.own.peak:
        return search
    plain = replace(request, settings=plainly(request))
    return min(
        search, search_of(plain, search.graph, search.source, search.lower, search.tried), key=lambda s: s.own.peak
    )


def _convolved_bytes(region: Region) -> int:
    """Bytes of what convolutions take and make: what copies of it in another layout can hold at once."""
    nodes = {x for op in region.ops if op.node.target in CONVOLUTIONS for x in (op.node, *op.node.all_input_nodes)}
    return sum(t.nbytes for node in nodes for t in tensors(node))


def plainly(request: Request) -> Settings:
    """A request's settings of Inductor, with `PLAIN` layouts."""
    return tuple(sorted((*request.settings, PLAIN)))


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


def find(search: Search, first: Iterable[Tried]) -> tuple[Trial, Trial, Solution]:
    """The fastest trial within the budget, that of Inductor's own partition, and what the solver said.

    Inductor's own is taken where it is within the budget: the step is then what torch.compile runs without a plan. Else
    schedules are looked at as they are fused widely, and narrowly where that takes too much. The solver's model of
    memory is not exact: it is given less, or more, by as much as the exact peak of its last schedule was off.

    Args:
        search: the step.
        first: schedules to try before the solver is asked.

    Raises:
        TooSmall: the leanest schedule is above the budget.
    """
    budget = search.request.budget_bytes
    own = search.own
    best = own if own.peak <= budget else next((t for t in starmap(search.trial, first) if t.peak <= budget), None)
    if best is not None:
        return best, own, _solution(search, best, own, "", 0.0)
    note, seconds, target = "", 0.0, budget
    tried: list[Trial] = []
    for _ in range(ROUNDS):
        found = _solved(search, target)
        if found is None or any(t.schedule == found.schedule for t in tried):
            break
        note, seconds = found.note, seconds + found.seconds
        before = best_of(tried, budget)
        for near in (WIDE, NARROW):
            tried.append(search.trial(found.schedule, near))
            if tried[-1].peak <= budget:
                break
        left = budget - tried[-1].peak
        if before is not None or 0 <= left <= ROOM * budget:
            break
        target = found.timeline.peak + left
    best = best_of(tried, budget) or _lean(search, [own, *tried])
    return best, own, _solution(search, best, own, note, seconds)


def best_of(trials: Sequence[Trial], budget: int) -> Trial | None:
    """The fastest trial within a budget, by its estimate; None where none is."""
    return min((t for t in trials if t.peak <= budget), key=lambda t: t.seconds, default=None)


def _lean(search: Search, tried: Sequence[Trial]) -> Trial:
    """A trial of little memory, where none that was tried is within the budget.

    Raises:
        TooSmall: the leanest schedule is above the budget.
    """
    budget = search.request.budget_bytes
    lean = search.trial(_leanest(search), NARROW)
    if lean.peak > budget:
        raise TooSmall(min((lean, *tried), key=lambda t: t.peak))
    found = _solved(search, _modelled(search, lean) + budget - lean.peak)
    return lean if found is None else best_of([lean, search.trial(found.schedule, NARROW)], budget) or lean


class TooSmall(PlannerError):
    """No schedule that was tried is within the budget; whoever asked says so in words.

    Attributes:
        leanest: the trial with the lowest peak.
    """

    def __init__(self, leanest: Trial) -> None:
        super().__init__("the budget is too small")
        self.leanest = leanest


def _solved(search: Search, target: int) -> Solution | None:
    """The solver's answer for so many bytes of its model; None where it knows none."""
    options = search.request.options
    problem = search.step.problem.with_budget(max(0, target))
    try:
        return solve(problem, options.solver, time_limit=options.time_limit, progress=options.progress)
    except InfeasibleError:
        return None


def _modelled(search: Search, trial: Trial) -> int:
    """The peak of a trial's schedule in the model of memory, in bytes."""
    return simulate(search.step.problem, trial.schedule).peak


def _leanest(search: Search) -> Schedule:
    """The schedule with the lowest peak, as it is modelled."""
    options = search.request.options
    return minimum_peak(search.step.problem, time_limit=options.time_limit, progress=options.progress).schedule


def _solution(search: Search, best: Trial, own: Trial, note: str, seconds: float) -> Solution:
    """The trial as a solution; no more is known than that Inductor's own partition is made to take the least time."""
    bound = min(best.seconds, own.seconds)
    return Solution(best.replay.schedule, best.replay.timeline, search.request.options.solver, seconds, bound, note)


def runs_under(search: Search, everything: Trial, best: Trial) -> Runs:
    """What a trial makes of the launches of another one, which recomputes nothing. O(launches)."""
    problem = search.step.problem
    planned = replay(problem, best.schedule)
    counts = [0] * len(problem.ops)
    for i in best.schedule.steps:
        counts[i] += 1
    number = {o.index: i for i, o in enumerate(search.step.origins) if o.region is not None}
    saved = {problem.producer[v] for v in planned.saved_for_backward}
    times, kept = {}, set()
    for i, origin in enumerate(everything.step.origins):
        at = () if origin.region is None else everything.observed.steps[origin.index]
        times[i] = max((counts[number[coarse]] for coarse in at), default=1)
    for v, coarse in enumerate(everything.observed.makers):
        # a storage may be written into again by another op, whose result is what is kept
        if coarse is None or number[coarse] in saved or counts[number[coarse]] == 1:
            kept.add(v)
    return Runs(times, frozenset(kept))
