"""What stands in `.grad` once a gradient was used: no memory, and an error for whoever reads it."""

from __future__ import annotations

from typing import Any

import torch

from planner.compat import pytree
from planner.compat.tensors import without_memory
from planner.errors import ApplyError

_ATEN = torch.ops.aten
_CLEARS = {_ATEN.zero_.default, _ATEN._foreach_zero_.default}  # `zero_grad(set_to_none=False)`


class SpentGradient(torch.Tensor):
    """A gradient that the optimizer has used and freed.

    Attributes:
        cleared: whether the loop has set it to zero since.
    """

    cleared = False

    def __repr__(self) -> str:  # type: ignore[override]
        return "SpentGradient(used by the optimizer in the backward pass)"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func not in _CLEARS:
            raise ApplyError(
                f"a gradient was read by {func}, and it was used in the backward pass and freed: "
                "step_in_backward=True leaves none for clip_grad_norm_, GradScaler, logging or terms of the loss that "
                "are computed of parameters outside the model. Leave these out, or plan with step_in_backward=False. "
                "The parameters are stepped by gradients as they came: go back to the last checkpoint if that matters"
            )
        for t in pytree.tree_leaves(args):
            if isinstance(t, SpentGradient):
                t.cleared = True
            elif isinstance(t, torch.Tensor):
                t.zero_()
        return args[0] if func is _ATEN.zero_.default else None


def spent(parameter: torch.Tensor) -> SpentGradient:
    """What stands for the gradient of a parameter that was used."""
    return without_memory(SpentGradient, parameter.detach())


def is_clear(gradient: torch.Tensor | None) -> bool:
    """Whether nothing would be added up with the next gradient: there is none, or one that was used and set to zero."""
    return gradient is None or (isinstance(gradient, SpentGradient) and gradient.cleared)
