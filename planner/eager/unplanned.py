"""What the step takes in eager mode without a plan: the trace of that step, on fake tensors."""

from __future__ import annotations

from contextlib import suppress

from planner.capture.trace.quiet import quietly
from planner.core.account import EagerStep
from planner.core.recipe import Choice
from planner.costs.static_memory import trained_bytes
from planner.eager.pipeline import tracer_of, warn_of_others
from planner.eager.step import StepFailed
from planner.errors import PlannerError
from planner.parallel.fsdp import groups_of
from planner.requests.request import Request


def eager_step(request: Request, chance: float | None) -> EagerStep | None:
    """The peak and the time of the step as it runs without a plan, with nothing checkpointed but by the model itself.

    Python code decides by a random number as if that were `chance`. None where such a trace is not the step of the
    request: it asks for values of tensors, is spread over processes, has several microbatches in flight, gradients that
    `torch.autograd.grad` returns, which are seen where graphs are compiled, a graph that is kept for other than two
    backward passes that add to `.grad`, or sizes that may be smaller than the batch's.
    """
    several = request.occupancy is not None or request.in_flight > 1
    if several or _has_others(request) or request.maxima is not None or groups_of(request.model):
        return None
    try:
        with quietly():
            tracer = tracer_of(request, lambda: None)
            tracer.answers.chance = chance
            trial, _ = tracer.trial(Choice(), {}, tracer.trace(Choice()))
    except (StepFailed, PlannerError):
        return None
    return EagerStep(trial.peak, trial.replay.timeline.cost)


def look_at_other_ways(request: Request, chance: float | None) -> None:
    """Warn where random numbers decide what the step runs, and by others than `chance` it runs something else."""
    with quietly(), suppress(PlannerError):
        warn_of_others(tracer_of(request, lambda: None), chance)


def _has_others(request: Request) -> bool:
    """Whether the loop has other gradients than in `.grad`, or keeps graphs, and more than one pass leaves beside."""
    loop, left = request.loop, trained_bytes(request.model)
    return loop.asks_first or (loop.graph_retained and (loop.kept_beside > 0 or loop.freed_beside not in (None, left)))
