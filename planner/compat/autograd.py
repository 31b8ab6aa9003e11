"""Autograd's graph and engine: tensors that nodes saved, callbacks of a backward pass. Torch 2.11 to 2.13."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import Node


def saved_by(node: Node) -> list[Any]:
    """What a node saved for the backward pass (`_saved_*` and `saved_tensors`, 2.11 to 2.13).

    Raises:
        RuntimeError: the backward pass has freed it.
    """
    return [getattr(node, name) for name in dir(node) if name.startswith("_saved_") or name == "saved_tensors"]


def is_custom(node: Node) -> bool:
    """Whether a node is a `torch.autograd.Function`'s, as those of compiled graphs are (2.11 to 2.13)."""
    return hasattr(node, "_raw_saved_tensors")


def holds_saved(node: Any) -> bool:
    """Whether a node of a `torch.autograd.Function` still holds tensors for its backward pass (2.11 to 2.13)."""
    try:
        return len(node._raw_saved_tensors) > 0
    except RuntimeError:  # freed by the backward pass
        return False


def when_backward_ends(then: Callable[[], None]) -> None:
    """From a hook in a backward pass: call a function when that pass has ended (`queue_callback`, 2.11 to 2.13)."""
    torch.autograd.Variable._execution_engine.queue_callback(then)


def is_jit_tracing() -> bool:
    """Whether `torch.jit.trace` runs (`torch._C._get_tracing_state`, torch 2.11 to 2.13)."""
    return torch._C._get_tracing_state() is not None


def post_accumulate_hooks(parameter: torch.Tensor) -> dict[int, Any] | None:
    """The table of hooks that run once a parameter has its gradient, or None (torch 2.11 to 2.13)."""
    hooks: dict[int, Any] | None = parameter._post_accumulate_grad_hooks
    return hooks


def references(t: torch.Tensor) -> tuple[int, int]:
    """How often a tensor and its storage are referenced (`Tensor._use_count`, `_storage_Use_Count`, 2.11 to 2.13)."""
    of_tensor: int = t._use_count()  # type: ignore[attr-defined]
    return of_tensor, torch._C._storage_Use_Count(t.untyped_storage()._cdata)
