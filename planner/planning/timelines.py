"""A solution's timeline, moment by moment: what runs, whose it is, and what the bytes held are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from planner.capture.provenance import origins
from planner.capture.regions.region import Region
from planner.core.account import resident
from planner.core.plan import Action, BaselineMoment, Held, Moment, Phase
from planner.lowering.build import LOSS, OPTIMIZER, Lowered
from solvers import Problem, Solution, every_op_once, simulate
from solvers.schedule import waiting_bytes

_PLACES = {kind: at for at, kind in enumerate(Held._fields)}
KEPT, PASSING, RECOMPUTED = _PLACES["kept"], _PLACES["passing"], _PLACES["recomputed"]
PARAMETERS, GRADIENTS, BACKWARD = _PLACES["parameters"], _PLACES["gradients"], _PLACES["backward"]


def timelines(
    regions: Sequence[Region],
    lowered: Lowered,
    solution: Solution,
    lines: Mapping[str, int],
    modules: Collection[str],
    kept: Collection[int],
) -> tuple[tuple[Moment, ...], tuple[BaselineMoment, ...]]:
    """The timeline of a solution, and that of every op once. O(steps + reads).

    Args:
        regions: of the step.
        lowered: its problem.
        solution: a schedule of it.
        lines: what is held all the time: name -> bytes; they add up to `problem.resident`.
        modules: the model's paths.
        kept: values held when the first backward op starts.
    """
    problem, steps = lowered.problem, solution.schedule.steps
    own = [(i, o) for i, o in enumerate(lowered.origin) if o.region >= 0]
    nodes = ((regions[o.region].ops[o.index].node, regions[o.region].module) for _, o in own)
    named = dict(zip((i for i, _ in own), origins(nodes, modules), strict=True))
    ops = [(lowered.kinds[i], _phase(lowered, i), *named.get(i, ("", ""))) for i in range(len(problem.ops))]
    seen: set[int] = set()
    timeline = []
    for i, held in zip(steps, by_kind(lowered, solution, resident(lines)), strict=True):
        kind, phase, module, source = ops[i]
        # what is dropped early may run again in the forward pass, and the forward ops of one graph after another's
        phase = "backward" if i in seen and problem.boundary in seen else phase
        timeline.append(Moment(kind, phase, i in seen, held, problem.ops[i].cost, module, source))
        seen.add(i)
    times = Counter(steps)
    unplanned = []
    for i, (op, held_bytes) in enumerate(zip(problem.ops, simulate(problem, every_op_once(problem)).held, strict=True)):
        kind, phase, module, source = ops[i]
        action: Action | None = None
        if i < problem.boundary and times[i] > 1:
            action = "recompute"
        elif i < problem.boundary and any(
            v in kept and max(problem.readers[v], default=0) > problem.boundary for v in op.writes
        ):
            action = "keep"
        made = sum(problem.sizes[v] for v in op.writes)
        reads = tuple(dict.fromkeys(problem.producer[v] for v in op.reads))
        unplanned.append(
            BaselineMoment(kind, phase, held_bytes, op.cost, module, source, made, times[i], action, reads)
        )
    return tuple(timeline), tuple(unplanned)


def _phase(lowered: Lowered, i: int) -> Phase:
    region = lowered.origin[i].region
    if region == LOSS:
        return "loss"
    if region == OPTIMIZER:
        return "optimizer"
    return "forward" if i < lowered.problem.boundary else "backward"


def by_kind(lowered: Lowered, solution: Solution, always: Held) -> list[Held]:
    """`solution.timeline.held`, by kind. O(steps + reads)."""
    problem, steps, frees = lowered.problem, solution.schedule.steps, solution.timeline.frees
    passing = _passing(problem, solution)
    live = list(always)
    kind_of: dict[int, int] = {}  # of the values held
    seen: set[int] = set()
    found = []
    for i, gone, beside in zip(steps, frees, waiting_bytes(problem, steps), strict=True):
        op, again = problem.ops[i], i in seen
        replaced = []  # values that are still held: their old copies go when the op has ended
        for v in op.writes:
            if v in lowered.gathered:
                kind = PARAMETERS
            elif again:
                kind = RECOMPUTED
            elif i < problem.boundary:
                kind = PASSING if v in passing else KEPT
            elif i == problem.boundary and v == op.writes[-1]:
                kind = KEPT  # what the loss itself holds
            else:
                kind = GRADIENTS if v in lowered.gradients else BACKWARD
            if v in kind_of:
                replaced.append((v, kind_of[v]))
            kind_of[v] = kind
            live[kind] += problem.sizes[v]
        found.append(Held._make([*live[:-2], beside, op.workspace]))
        for v, kind in replaced:
            live[kind] -= problem.sizes[v]
        for v in gone:
            live[kind_of.pop(v)] -= problem.sizes[v]
        seen.add(i)
    return found


def _passing(problem: Problem, solution: Solution) -> set[int]:
    """Forward values that are freed, or made again, before the first backward op, once they were made."""
    steps = solution.schedule.steps
    end = steps.index(problem.boundary) if problem.boundary in steps else len(steps)
    seen: set[int] = set()
    found: set[int] = set()
    for i, gone in zip(steps[:end], solution.timeline.frees[:end], strict=True):
        if i in seen:
            found.update(problem.ops[i].writes)
        found.update(gone)
        seen.add(i)
    return found
