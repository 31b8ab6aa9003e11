"""A solution, read back in the user's words: the decisions, and the account of the bytes at the peak."""

from __future__ import annotations

from planner.core.plan import Decision
from planner.core.step import Replay, Runs, Step, live_before, needed_in_backward

REPLAYED = "drawn again under the saved state of the generator"
ACTIVATIONS, GRADIENTS, AT_PEAK = "activations", "gradients", "the op at the peak ({})"  # lines of the account


def decisions(step: Step, runs: Runs) -> tuple[Decision, ...]:
    """One decision per forward value that the backward pass needs, in their order. O(steps + reads)."""
    problem, found = step.problem, list[Decision]()
    for i, (op, origin) in enumerate(zip(problem.ops[: problem.boundary], step.origins, strict=False)):
        needed = [v for v in op.writes if step.names[v] and needed_in_backward(step, v)]
        again = [v for v in needed if v not in runs.saved_for_backward]  # one run makes them: they share its time
        if not again and runs.times[i] > 1:  # dropped and made again within the forward pass
            again = [v for v in needed if v not in runs.copied]
        again = [v for v in again if v not in runs.away]
        for v in needed:
            leaves, returns = runs.away.get(v, (None, None))
            found.append(
                Decision(
                    name=step.names[v],
                    action="recompute" if v in again else "offload" if v in runs.away else "keep",
                    nbytes=problem.sizes[v],
                    recompute_seconds=op.cost * (runs.times[i] - 1) / len(again) if v in again else 0.0,
                    module=origin.module,
                    source=origin.source,
                    reason=origin.keep_because if v not in again else REPLAYED if origin.random else "",
                    op=origin.kind,
                    leaves=leaves,
                    returns=returns,
                )
            )
    return tuple(found)


def peak_account(step: Step, planned: Replay) -> dict[str, int]:
    """The lines of the step's own memory at its peak: name -> bytes; they add up to the peak less what is resident."""
    problem, schedule, timeline = step.problem, planned.schedule, planned.timeline
    if not schedule.steps:
        return {}
    at = timeline.held.index(timeline.peak)
    live = live_before(problem, schedule, timeline, at)
    i = schedule.steps[at]
    op, waiting = problem.ops[i], problem.waiting
    gathered = live & step.gathered
    makers = {v: step.origins[problem.producer[v]] for v in live}
    activations = {v for v, at in makers.items() if at.phase == "forward" or at.again} - gathered
    in_flight = waiting is not None and any(number for number, _ in (*waiting.forward, *waiting.backward))
    others = "microbatches in flight" if in_flight else "gradients of the step before"
    if waiting is not None and waiting.again is not None and not in_flight:
        others = "a graph that is kept (retain_graph=True), or the gradients of its first backward pass"
    return {
        **({"parameters gathered for use": sum(problem.sizes[v] for v in gathered)} if step.gathered else {}),
        ACTIVATIONS: sum(problem.sizes[v] for v in activations),
        GRADIENTS: sum(problem.sizes[v] for v in live - activations - gathered),
        **({others: planned.others[at]} if planned.others[at] else {}),
        AT_PEAK.format(step.origins[i].kind.strip("_")): op.workspace + sum(problem.sizes[v] for v in op.writes),
    }
