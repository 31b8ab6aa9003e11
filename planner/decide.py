"""A solution, read back in the user's words: decisions, timeline, what takes the room."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Sequence

from torch import fx

from solvers import Problem, Schedule, Solution, Timeline, simulate

from .capture.region import Region
from .capture.safety import is_random
from .lowering import LOSS, OPTIMIZER, Lowered
from .plan import Decision, Moment

REPLAYED = "drawn again under the saved state of the generator"


def decisions(
    regions: Sequence[Region], lowered: Lowered, solution: Solution, modules: Collection[str]
) -> tuple[Decision, ...]:
    """One decision per forward value that the backward pass needs, in their order; `modules` are the model's paths."""
    problem = lowered.problem
    times = Counter(solution.schedule.steps)
    carried = _carried(problem, solution.schedule)
    found = []
    for i, op in enumerate(problem.ops[: problem.boundary]):
        origin = lowered.origin[i]
        region = regions[origin.region]
        graph_op = region.ops[origin.index]
        if graph_op.kind != "call":
            continue
        needed = [v for v in op.writes if any(r > problem.boundary for r in problem.readers[v])]
        again = [v for v in needed if v not in carried]  # made by one run of the op: they share its time
        if not again and times[i] > 1:  # dropped and made again within the forward pass
            again = needed
        for v in needed:
            found.append(
                Decision(
                    name=region.values[v - lowered.value_offset[origin.region]].owner.name,
                    action="recompute" if v in again else "keep",
                    nbytes=problem.sizes[v],
                    recompute_seconds=op.cost * (times[i] - 1) / len(again) if v in again else 0.0,
                    module=module_path(graph_op.node, modules),
                    source=source_line(graph_op.node),
                    reason=graph_op.keep_because or (REPLAYED if v in again and is_random(graph_op.node) else ""),
                )
            )
    return tuple(found)


def _carried(problem: Problem, schedule: Schedule) -> set[int]:
    """Values held when the first backward op starts."""
    if problem.boundary not in schedule.steps:
        return set()
    return _held_before(problem, schedule, simulate(problem, schedule), schedule.steps.index(problem.boundary))


def _held_before(problem: Problem, schedule: Schedule, timeline: Timeline, at: int) -> set[int]:
    """Values held when a step starts."""
    live: set[int] = set()
    for i, gone in zip(schedule.steps[:at], timeline.frees[:at], strict=True):
        live.update(problem.ops[i].writes)
        live.difference_update(gone)
    return live


def moments(lowered: Lowered, solution: Solution) -> tuple[Moment, ...]:
    """The timeline, with what runs at each step."""
    problem, seen = lowered.problem, set()
    found = []
    backward = False
    for i, held in zip(solution.schedule.steps, solution.timeline.held, strict=True):
        region = lowered.origin[i].region
        backward = backward or region == LOSS
        phase = {LOSS: "loss", OPTIMIZER: "optimizer"}.get(region, "backward" if backward else "forward")
        found.append(Moment(problem.ops[i].name, phase, i in seen, held))  # type: ignore[arg-type]
        seen.add(i)
    return tuple(found)


def peak_account(problem: Problem, schedule: Schedule) -> dict[str, int]:
    """What the step's own memory is made of at its peak: name -> bytes; sums to peak less resident."""
    timeline = simulate(problem, schedule)
    if not schedule.steps:
        return {}
    at = timeline.held.index(timeline.peak)
    live = _held_before(problem, schedule, timeline, at)
    op = problem.ops[schedule.steps[at]]
    made_forward = {v for v in live if problem.producer[v] < problem.boundary}
    return {
        "activations": sum(problem.sizes[v] for v in made_forward),
        "gradients": sum(problem.sizes[v] for v in live - made_forward),
        f"the op at the peak ({op.name})": op.workspace + sum(problem.sizes[v] for v in op.writes),
    }


def module_path(node: fx.Node, names: Collection[str]) -> str:
    """Path of the module that made a node, as `named_modules()` names it; "" for the model itself.

    Args:
        node: of a joint graph.
        names: the paths of the model's modules.
    """
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    path = str(next(reversed(stack.values()))[0]) if stack else ""
    # Dynamo's own name for it, as L['model']._modules['h']._modules['0']: the user's is the longest end of it
    parts = [p for p in re.split(r"[\[\].'\"]+", path) if p and p != "_modules"]
    return next((end for i in range(len(parts)) if (end := ".".join(parts[i:])) in names), "")


def source_line(node: fx.Node) -> str:
    """The innermost line outside torch that made a node: "file:line: code"; "" where none is known."""
    frames = re.findall(r'File "([^"]+)", line (\d+), in .*\n\s*(.*)', node.meta.get("stack_trace") or "")
    own = [f for f in frames if "/torch/" not in f[0]]
    if not own:
        return ""
    path, line, code = own[-1]
    return f"{path}:{line}: {code.strip()}"
