"""What is said of plans while they are made: one log line for each, and one warning where there is none."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from torch import nn, optim

from planner.core.loop import Loop
from planner.errors import PlannerError, gb, warn
from planner.requests.planned import Planned

log = logging.getLogger("planner")


def announce(planned: Planned, seconds: float, why: str = "") -> None:
    """Log that a plan was made, unless its user wants no progress shown.

    Args:
        planned: the plan.
        seconds: that planning took.
        why: it was made anew, in words that follow "because"; empty for the first plan of a model.
    """
    record = planned.record
    if record.options.progress is False:
        return
    anew = f" anew, because {why}," if why else ""
    log.info(
        "planned%s in %.1f s: peak %s of a budget of %s, %.1f%% more time, estimated",
        anew,
        seconds,
        gb(record.peak_bytes),
        gb(record.budget_bytes),
        100 * record.overhead,
    )
    if planned.request.instead and not why:
        log.info(planned.request.instead)


def why_anew(before: Loop, seen: Loop, optimizers: Sequence[optim.Optimizer]) -> str:
    """Why plans are made anew, in words that follow "because"."""
    if seen.gradients != before.gradients:
        there = {"accumulated": "added to", "cleared late": "cleared after the forward pass"}
        return f"gradients are there when a step begins, and are {there.get(seen.gradients, 'cleared')}"
    if optimizers:
        return f"{', '.join(type(o).__name__ for o in optimizers)} steps the model's parameters"
    if seen.in_flight > before.in_flight:
        return f"{seen.in_flight} calls of the model wait for their backward pass at once"
    if seen.in_flight < before.in_flight:
        return "the calls that waited when others came got no backward pass, and none has waited since then"
    if seen.unused > before.unused:
        return "the results of such calls are let go of without a backward pass"
    if seen.left_over > before.left_over:
        return "an earlier call, of which no backward pass comes, still holds what it saved"
    if (seen.unreached, seen.beside_loss) != (before.unreached, before.beside_loss):
        return "other outputs of the model get a gradient than those of which that was expected"
    if seen.laid_out != before.laid_out:
        return "gradients of the model's outputs come in another memory layout than was expected"
    if seen.stateless != before.stateless:
        return "other parameters than those of which that was expected get no gradient, and no optimizer state"
    if seen.graph_retained > before.graph_retained:
        return "a backward pass keeps its graph (retain_graph=True)"
    return "the first step showed what the training loop holds beside the model"


def note_waiting(error: PlannerError, in_flight: int) -> None:
    """Say in an error what calls are counted, where several wait for their backward pass."""
    if in_flight > 1:
        error.add_note(
            f"{in_flight} calls of the model are counted whose results were there at once, to be "
            "differentiated. One that is not, such as an evaluation, runs under torch.no_grad()"
        )


def warn_over(nbytes: int, budget_bytes: int, needed_gb: float) -> None:
    """Warn that the step takes so many bytes, more than its budget, and what would be enough."""
    warn(
        f"the step takes {gb(nbytes)}, with what the training loop holds beside the model: "
        f"{gb(nbytes - budget_bytes)} more than its budget of {gb(budget_bytes)}. "
        f"Give budget_gb={needed_gb!r}, or free what is held"
    )


def warn_unplanned(model: nn.Module, error: PlannerError) -> None:
    """Warn that a model trains as it is."""
    warn(f"this {type(model).__name__} trains without a plan, as on_failure='warn' asks: {error}")
