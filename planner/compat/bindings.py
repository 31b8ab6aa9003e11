"""ATen overloads as torch's own Python functions, which call them with half the host time. Torch 2.11 to 2.15."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from planner.compat.ops import OpOverload, schema_of

__all__ = ["BOUND", "bind"]

_ATEN = torch.ops.aten
# each takes the arguments of its overload, under the same names and in the same order
_FUNCTIONS = (
    "abs", "addmm", "as_strided", "baddbmm", "bmm", "cat", "clone", "convolution", "cos", "embedding", "exp", "log",
    "matmul", "mm", "native_dropout", "native_layer_norm", "neg", "permute", "relu", "reshape", "rsqrt", "sigmoid",
    "sin", "sqrt", "t", "tanh", "unsqueeze", "_softmax", "_softmax_backward_data", "_log_softmax",
    "_log_softmax_backward_data",
)  # fmt: skip
_OVERLOADED = {
    "add": "Tensor", "div": "Tensor", "mean": "dim", "mul": "Tensor", "pow": "Tensor_Scalar", "rsub": "Tensor",
    "select": "int", "squeeze": "dim", "sub": "Tensor", "sum": "dim_IntList", "transpose": "int", "where": "self",
}  # fmt: skip


def tensordot(a: torch.Tensor, b: torch.Tensor, dims_self: list[int], dims_other: list[int]) -> torch.Tensor:
    """`aten.tensordot`; `torch.tensordot` looks at its arguments in Python (`torch._VF`, 2.11 to 2.15)."""
    found: torch.Tensor = torch._VF.tensordot(a, b, dims_self, dims_other)  # type: ignore[attr-defined]
    return found


BOUND: dict[object, Any] = {
    **{getattr(_ATEN, name).default: getattr(torch, name) for name in _FUNCTIONS if hasattr(torch, name)},
    **{getattr(getattr(_ATEN, name), overload): getattr(torch, name) for name, overload in _OVERLOADED.items()},
    _ATEN.tensordot.default: tensordot,
    _ATEN.gelu.default: torch.nn.functional.gelu,
    _ATEN.add_.Tensor: operator.iadd,
}


def bind(graph: fx.Graph) -> None:
    """Let a graph call torch's Python functions in the place of overloads, in place.

    An overload's object looks its arguments up by the schema and boxes them at every call (`OpOverload.__call__`).
    Calls that are given numbers for tensors stay: the functions may choose another overload.
    """
    for node in graph.nodes:
        bound = BOUND.get(node.target) if isinstance(node.target, OpOverload) else None
        if bound is None or (bound is operator.iadd and node.kwargs):
            continue
        given = zip(node.args, schema_of(node.target).arguments, strict=False)
        if all(isinstance(value, fx.Node) for value, argument in given if str(argument.type) == "Tensor"):
            node.target = bound
