"""Calls of a planned model while a CUDA graph is captured, and after one was captured of it.

A capture records what a stream is given, and nothing may wait for the device or ask it for anything meanwhile: a call
then runs compiled graphs as they are, and nothing is planned, compiled, measured or learnt of the loop. What the host
does during a capture is not done again by a replay, so that plans that need it are refused before anything runs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from planner.compat.modules import each_parameter
from planner.core.plan import PlanRecord
from planner.core.recipe import Choice, Recipe
from planner.devices.accelerator import present
from planner.errors import ApplyError

WARM_UP = "Run at least three whole steps on a side stream before, as PyTorch's notes on CUDA graphs say for any model"


def captures(model: nn.Module) -> bool:
    """Whether a graph of the current stream of the model's device is captured now."""
    device = next((p.device for p in each_parameter(model)), torch.device("cpu"))
    accelerator = present(device)
    return accelerator is not None and accelerator.capturing()


def is_graphed(model: nn.Module) -> bool:
    """Whether `torch.cuda.make_graphed_callables` has put a captured graph in the place of `forward`.

    It stands for what the plan ran when it was captured.
    """
    return getattr(vars(model).get("forward"), "__module__", None) == torch.cuda.graphs.__name__


def refuse_captured_parts(model: nn.Module) -> None:
    """Raise ApplyError where a loop that calls methods of a model, or modules in it, captures a graph."""
    raise ApplyError(
        f"a CUDA graph is being captured, and the loop calls methods of this {type(model).__name__}, or modules in it: "
        "which of them a step calls is only seen as it goes. Have one forward() make the calls, plan that, and "
        f"capture it. {WARM_UP}"
    )


def refuse_uncapturable(model: nn.Module, plan: PlanRecord | None, drawn: Sequence[str] = ()) -> None:
    """Raise ApplyError where a call cannot be captured.

    Args:
        model: whose call it is.
        plan: by which such calls have run; None where none has.
        drawn: the names of random ops that run again.
    """
    if plan is None:
        why, advice = (
            "no call like this one has run by a plan yet",
            f"{WARM_UP}, in the same mode and of the same shapes",
        )
    elif drawn:
        why = (
            f"its plan draws {len(drawn)} random values again ({', '.join(drawn[:3])}), under a state of the generator "
            "that the host reads and sets"
        )
        advice = "Plan with a larger budget_gb, by which they are kept, or with dropout rates of 0"
    elif isinstance(plan.recipe, Choice) and plan.recipe.kept:
        why = "its plan checkpoints modules, for which torch.utils.checkpoint reads the generator's state"
        advice = "Plan with mode='aten'"
    elif isinstance(plan.recipe, Recipe) and plan.recipe.asks:
        why = f"its Python asks for values of tensors ({'; '.join(plan.recipe.asks[:3])}), and decides by them"
        advice = "Take the question out of forward()"
    elif plan.moved_bytes:
        why = f"its plan moves values away and back (offload={plan.options.offload!r}), to room that each call takes"
        advice = "Plan without offload="
    elif plan.options.step_in_backward:
        why = "its plan steps the optimizer in the backward pass, by learning rates and counts that the host has"
        advice = "Plan without step_in_backward=, and capture optimizer.step() of an optimizer with capturable=True"
    else:
        return
    raise ApplyError(
        f"a CUDA graph is being captured of this {type(model).__name__}, and {why}: a replay would not do that again. "
        f"{advice}"
    )
