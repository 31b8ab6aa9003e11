"""Steps that run without torch.compile: those that fit the budget as they are, and those that it does not serve."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from planner.capture.trace.step import TrainingGraph
from planner.core.recipe import Choice
from planner.core.step import Step
from planner.errors import CaptureError, InfeasibleBudgetError, PlannerError, gb
from planner.lowering.margin import add_margin
from planner.parallel.fsdp import groups_of
from planner.parallel.group import world_size
from planner.planning.eager import make_eager_plan
from planner.planning.unreached import counting_trained
from planner.requests.planned import Known, Planned
from planner.requests.request import Request
from solvers import every_op_once, simulate

OFF = 0.001  # how much more than the captured graphs the step may take


def fits_uncompiled(request: Request, graph: TrainingGraph, everything: Callable[[], int]) -> bool:
    """Whether the step takes no more than the budget in eager mode, by the trace of that step.

    False where it takes more than the captured graphs, whose peak the plan has told. False where the trace is not all
    of the step: where calls wait for their backward pass together, where outputs that others are computed from get
    no gradient, where sizes may be smaller, and where the way through the code depends on values. False, too, where
    eager mode computes again what a plan keeps: parts that the model checkpoints itself.

    Args:
        request: for the step, with what the loop was seen to do.
        graph: the captured step.
        everything: gives the peak of the captured step with everything kept, in bytes; asked for where all else suits.
    """
    loop, eager = request.loop, graph.eager
    if eager is None or eager.peak_bytes > request.budget_bytes:
        return False
    unreached = any(at < len(graph.outputs) for at in loop.unreached)
    seen = loop.loss is not None and not (unreached or loop.unused or loop.left_over)
    alone = not (graph.calls or graph.maxima or graph.asked)
    if not (seen and alone and _plainly(request)) or any(region.checkpointed for region in graph.regions):
        return False
    return eager.peak_bytes <= (1 + OFF) * (kept := everything()) and kept <= request.budget_bytes


def _plainly(request: Request) -> bool:
    """Whether nothing is asked for that a step in eager mode would not do."""
    options, alone = request.options, request.in_flight == 1 and request.occupancy is None
    moves = options.mode != "aten" or options.offload is not None or options.step_in_backward or options.shard > 1
    return alone and not (moves or groups_of(request.model) or request.foreign)


def make_checkpointed(
    request: Request, why: CaptureError | InfeasibleBudgetError, known: Known | None
) -> Planned | None:
    """The plan of mode "eager", which checkpoints modules, for a step that torch.compile does not serve.

    None where such a plan does no better. The error is not raised here: a frame that has its own error among its names
    stays, with the batch, until Python's collector comes.

    Args:
        request: for the step.
        why: nothing was captured, or it does not fit as it was captured.
        known: as for `make_plan()`.
    """
    compiled = "what torch.compile captures of it, with what runs outside, does not fit"
    said = str(why) if isinstance(why, CaptureError) else f"{type(request.model).__name__}: {compiled}."
    if (instead := checkpointed(request, said)) is None:
        return None
    least = why.minimum_bytes if isinstance(why, InfeasibleBudgetError) else None
    del why
    try:
        return make_eager_plan(instead, known=known)
    except InfeasibleBudgetError as e:
        if least is not None and e.minimum_bytes >= least:
            return None
        raise
    except PlannerError:
        return None


def outside(graph: TrainingGraph) -> bool:
    """Whether something that is trained runs outside of all captured graphs."""
    return not all(region.fingerprint for region in graph.regions)


def may_do_better(graph: TrainingGraph, why: InfeasibleBudgetError) -> bool:
    """Whether a step that does not fit as it was captured may fit by checkpointed modules, or as it is.

    Eager mode takes less than the captured graphs at the least, or nobody knows what it takes, or something runs
    outside of all graphs.
    """
    return outside(graph) or graph.eager is None or graph.eager.peak_bytes < why.minimum_bytes


def checkpointed(request: Request, why: str) -> Request | None:
    """The request for mode "eager" in the place of torch.compile's graphs, and why; None where that is not for it."""
    apart = request.options.pieces or request.maxima is not None or world_size() > 1
    if not (request.any_mode and _plainly(request)) or apart:
        return None
    options = replace(request.options, mode="eager")
    return replace(request, options=options, instead=f"It is planned as by mode='eager'. {why}")


def peak_of_all(lowered: Callable[[], Step], request: Request) -> int:
    """The peak of a step with everything kept, in bytes; `lowered` gives it without a margin for fragmentation."""
    problem = add_margin(lowered(), request).problem
    return simulate(problem, every_op_once(problem)).peak


def make_uncompiled(request: Request, graph: TrainingGraph, known: Known | None) -> Planned | None:
    """The plan by which a step that fits runs as it is; None where it does not fit after all.

    Args:
        request: for the step.
        graph: the captured step.
        known: as for `make_plan()`.
    """
    try:
        counted = counting_trained(request, graph)
        planned = make_eager_plan(replace(counted, options=replace(request.options, mode="eager")), known=known)
    except PlannerError:
        return None
    record = planned.record
    if not isinstance(record.recipe, Choice) or record.recipe.kept:
        return None
    note = (
        f"Eager mode takes {gb(record.peak_bytes)}, within the budget: the model runs as it is, without torch.compile."
    )
    record = replace(record, options=request.options, note=f"{record.note} {note}".strip())
    return Planned(record, request, captured=graph)
