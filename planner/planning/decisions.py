"""A solution, read back in the user's words: decisions, and what takes the room."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from planner.capture.provenance import origins
from planner.capture.recomputability import is_random
from planner.capture.regions.region import Region
from planner.core.plan import Decision
from planner.lowering.build import Lowered
from solvers import Problem, Schedule, Solution, Timeline, simulate
from solvers.schedule import waiting_bytes

REPLAYED = "drawn again under the saved state of the generator"


def decisions(
    regions: Sequence[Region], lowered: Lowered, solution: Solution, modules: Collection[str]
) -> tuple[Decision, ...]:
    """One decision per forward value that the backward pass needs, in their order; `modules` are the model's paths."""
    problem = lowered.problem
    times = Counter(solution.schedule.steps)
    kept = carried(problem, solution.schedule)
    own = [(i, o) for i, o in enumerate(lowered.origin[: problem.boundary]) if o.region >= 0]
    nodes = [(regions[o.region].ops[o.index].node, regions[o.region].module) for _, o in own]
    found = []
    for (i, origin), (module, source) in zip(own, origins(nodes, modules), strict=True):
        op, region = problem.ops[i], regions[origin.region]
        graph_op = region.ops[origin.index]
        if graph_op.kind != "call":
            continue
        needed = [v for v in op.writes if any(r > problem.boundary for r in problem.readers[v])]
        again = [v for v in needed if v not in kept]  # made by one run of the op: they share its time
        if not again and times[i] > 1:  # dropped and made again within the forward pass
            again = needed
        for v in needed:
            found.append(
                Decision(
                    name=region.values[v - lowered.value_offset[origin.region]].owner.name,
                    action="recompute" if v in again else "keep",
                    nbytes=problem.sizes[v],
                    recompute_seconds=op.cost * (times[i] - 1) / len(again) if v in again else 0.0,
                    module=module,
                    source=source,
                    reason=graph_op.keep_because or (REPLAYED if v in again and is_random(graph_op.node) else ""),
                    op=lowered.kinds[i],
                )
            )
    return tuple(found)


def carried(problem: Problem, schedule: Schedule) -> set[int]:
    """Values held when the first backward op starts."""
    if problem.boundary not in schedule.steps:
        return set()
    return held_before(problem, schedule, simulate(problem, schedule), schedule.steps.index(problem.boundary))


def held_before(problem: Problem, schedule: Schedule, timeline: Timeline, at: int) -> set[int]:
    """Values held when a step starts."""
    live: set[int] = set()
    for i, gone in zip(schedule.steps[:at], timeline.frees[:at], strict=True):
        live.update(problem.ops[i].writes)
        live.difference_update(gone)
    return live


def peak_account(lowered: Lowered, schedule: Schedule) -> dict[str, int]:
    """What the step's own memory is made of at its peak: name -> bytes; sums to peak less resident."""
    problem = lowered.problem
    timeline = simulate(problem, schedule)
    if not schedule.steps:
        return {}
    at = timeline.held.index(timeline.peak)
    live = held_before(problem, schedule, timeline, at)
    i = schedule.steps[at]
    op = problem.ops[i]
    made_forward = {v for v in live if problem.producer[v] < problem.boundary} - lowered.gathered
    gathered = live & lowered.gathered
    others, waiting = waiting_bytes(problem, schedule.steps)[at], problem.waiting
    wait = waiting is not None and any(number for number, _ in (*waiting.forward, *waiting.backward))
    beside = "microbatches in flight" if wait else "gradients of the step before"
    return {
        **({"parameters gathered for use": sum(problem.sizes[v] for v in gathered)} if lowered.gathered else {}),
        "activations": sum(problem.sizes[v] for v in made_forward),
        "gradients": sum(problem.sizes[v] for v in live - made_forward - gathered),
        **({beside: others} if others else {}),
        f"the op at the peak ({lowered.kinds[i].strip('_')})": op.workspace + sum(problem.sizes[v] for v in op.writes),
    }
