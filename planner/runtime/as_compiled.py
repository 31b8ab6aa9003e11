"""What the user had torch.compile make of a model: it runs what is not planned, and plans that leave it out say so."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from planner.compat.dynamo import compiled_by, forward_compiled_by
from planner.compat.modules import call_of, replace_call
from planner.errors import warn

FUSES = "inductor"  # the backend
Compiled = Sequence[tuple[nn.Module, Any]]  # modules, and what `compile()` put in the place of their calls


def call_as_compiled(model: nn.Module, compiled: Compiled, *args: Any, **kwargs: Any) -> Any:
    """A model's call with what `compile()` made of it and its modules; whatever is in the place of its call stays."""
    parts = [(module, call) for module, call in compiled if module is not model]
    whole = next((call for module, call in compiled if module is model), call_of(model))
    calls_back(parts)
    try:
        return whole(*args, **kwargs)
    finally:
        calls_back((module, None) for module, _ in parts)


def calls_back(aside: Iterable[tuple[nn.Module, Any]]) -> None:
    """Have modules be called as `compile()` made them be; None: as they are."""
    for module, call in aside:
        replace_call(module, call)


def fused_parts(model: nn.Module) -> list[str]:
    """The paths of the modules in a model that were given to `torch.compile()`, or called to `compile()`, or whose
    `forward` was given to it, be it that of the model.
    """
    own = (
        (name, compiled_by(module) if name else None, forward_compiled_by(module))
        for name, module in model.named_modules()
    )
    return [name for name, *ways in own if any(by is not None and by.backend == FUSES for by in ways)]


def warn_not_fused(model: nn.Module, part: str = "") -> None:
    """Warn where a model, or a module in it, was given to `torch.compile()`, and its plan does not run such kernels."""
    what = f"{part} of this {type(model).__name__}" if part else f"this {type(model).__name__}"
    warn(
        f"{what} was given to torch.compile(), and its plan runs op by op, without fused kernels, which may take more "
        "time and memory: give plan() what torch.compile(model) returns, and it plans those kernels"
    )
