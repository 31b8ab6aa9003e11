"""Kernels that read memory as if it were contiguous, given what they read as the formulas of eager mode give it.

`derivatives.yaml` and native/group_norm.cpp call `contiguous()` before them. In a trace on fake tensors that leaves
nothing where these seem to be so; a kernel may have made another layout, or a gradient may come in one. Where all is as
it was traced, these functions cost a look at the strides.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from planner.compat.tensors import suggest_memory_format
from planner.compat.versions import has_group_norms_of_any_layout

_ATEN = torch.ops.aten


def native_group_norm(x: torch.Tensor, *args: Any, **options: Any) -> Any:
    """The op, of a tensor that is contiguous or, on a CPU, channels-last."""
    return _ATEN.native_group_norm.default(_like(x, x), *args, **options)


def native_group_norm_backward(gradient: torch.Tensor, x: torch.Tensor, *args: Any, **options: Any) -> Any:
    """The op, with a gradient that is laid out as its input is."""
    return _ATEN.native_group_norm_backward.default(_like(gradient, x), _like(x, x), *args, **options)


def _like(t: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    if t.is_contiguous() and x.is_contiguous():
        return t
    last = x.device.type == "cpu"
    return t.contiguous(memory_format=suggest_memory_format(x) if last else torch.contiguous_format)


def weight_norm_backward(gradient: torch.Tensor, *args: Any, **options: Any) -> Any:
    """The op, with a contiguous gradient."""
    return _ATEN._weight_norm_interface_backward.default(gradient.contiguous(), *args, **options)


def cdist_backward(gradient: torch.Tensor, *args: Any, **options: Any) -> Any:
    """The op, with a contiguous gradient."""
    return _ATEN._cdist_backward.default(gradient.contiguous(), *args, **options)


def view_as_complex(x: torch.Tensor) -> torch.Tensor:
    """The op, of pairs that lie in memory one after the other."""
    pairs: torch.Tensor = _ATEN.view_as_complex.default(x if x.stride(-1) == 1 else x.contiguous())
    return pairs


_GIVEN: dict[Any, Any] = {
    _ATEN._weight_norm_interface_backward.default: weight_norm_backward,
    _ATEN._cdist_backward.default: cdist_backward,
    _ATEN.view_as_complex.default: view_as_complex,
}
if not has_group_norms_of_any_layout():
    _GIVEN |= {
        _ATEN.native_group_norm.default: native_group_norm,
        _ATEN.native_group_norm_backward.default: native_group_norm_backward,
    }


def as_formulas_give(graph: fx.Graph) -> None:
    """Call these functions in the place of their ops, in place. O(nodes)."""
    for node in graph.nodes:
        if node.op == "call_function" and node.target in _GIVEN:
            node.target = _GIVEN[node.target]
