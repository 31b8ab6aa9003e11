"""ATen overloads as torch's own Python functions, which call them with half the host time. Torch 2.11 to 2.15."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from planner.compat.ops import OpOverload, schema_of

__all__ = ["BOUND", "METHODS", "bind"]

_ATEN = torch.ops.aten
# each takes the arguments of its overload, under the same names and in the same order
_FUNCTIONS = (
    "abs", "addmm", "as_strided", "as_strided_copy", "baddbmm", "bmm", "cat", "clone", "convolution", "cos",
    "embedding", "empty_strided", "exp", "log", "matmul", "mm", "native_dropout", "native_group_norm",
    "native_layer_norm", "neg", "ones", "permute", "permute_copy", "relu", "reshape", "rsqrt", "scalar_tensor",
    "sigmoid", "sin", "sqrt", "t", "t_copy", "tanh", "tril", "unsqueeze", "zeros", "_safe_softmax", "_softmax",
    "_softmax_backward_data", "_log_softmax", "_log_softmax_backward_data",
)  # fmt: skip
_OVERLOADED = {
    "add": "Tensor", "div": "Tensor", "mean": "dim", "mul": "Tensor", "pow": "Tensor_Scalar", "rsub": "Tensor",
    "select": "int", "squeeze": "dim", "sub": "Tensor", "sum": "dim_IntList", "transpose": "int",
    "transpose_copy": "int", "where": "self",
}  # fmt: skip
_ARITHMETIC = ("add", "div", "mul", "sub")  # of a tensor and a number, which they make a tensor of as overloads do


def tensordot(a: torch.Tensor, b: torch.Tensor, dims_self: list[int], dims_other: list[int]) -> torch.Tensor:
    """`aten.tensordot`; `torch.tensordot` looks at its arguments in Python (`torch._VF`, 2.11 to 2.15)."""
    found: torch.Tensor = torch._VF.tensordot(a, b, dims_self, dims_other)  # type: ignore[attr-defined]
    return found


def lstm_layer(*args: Any) -> tuple[torch.Tensor, ...]:
    """`aten.mkldnn_rnn_layer`, which leaves what its backward pass needs where gradients are on alone: they are, below
    autograd, which keeps nothing (`torch._C._AutoDispatchBelowAutograd`, 2.11 to 2.15).
    """
    with torch._C._AutoDispatchBelowAutograd(), torch.enable_grad():
        found: tuple[torch.Tensor, ...] = _ATEN.mkldnn_rnn_layer.default(*args)
    return found


BOUND: dict[object, Any] = {
    **{getattr(_ATEN, name).default: getattr(torch, name) for name in _FUNCTIONS if hasattr(torch, name)},
    **{getattr(getattr(_ATEN, name), overload): getattr(torch, name) for name, overload in _OVERLOADED.items()},
    _ATEN.div.Scalar: torch.div,
    _ATEN.mul.Scalar: torch.mul,
    _ATEN.tensordot.default: tensordot,
    _ATEN.gelu.default: torch.nn.functional.gelu,
    _ATEN.mkldnn_rnn_layer.default: lstm_layer,
    _ATEN.linear.default: torch.nn.functional.linear,
    _ATEN.silu.default: torch._C._nn.silu,
    _ATEN.add_.Tensor: operator.iadd,
    _ATEN.mul_.Scalar: operator.imul,
}
METHODS = {_ATEN.bernoulli_.float: "bernoulli_", _ATEN.expand.default: "expand"}  # the same, as methods of the first
_SAME = {_ATEN.alias.default, _ATEN.detach.default}
_WITH_NUMBERS = {getattr(_ATEN, name).Tensor for name in _ARITHMETIC}


def bind(graph: fx.Graph) -> None:
    """Let a graph call torch's Python functions in the place of overloads, in place.

    An overload's object looks its arguments up by the schema and boxes them at every call (`OpOverload.__call__`).
    Calls that are given numbers for tensors stay where the functions may choose another overload. Aliases, which mark
    something until here, go where no result of the graph may be one, or a view of one: that stays a tensor of its own.
    """
    for node in graph.nodes:
        if not isinstance(node.target, OpOverload):
            continue
        if node.target in _SAME and not any(map(_may_show, node.users)):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        elif (method := METHODS.get(node.target)) is not None:
            node.op, node.target = "call_method", method
        elif node.target is _ATEN.slice.Tensor:
            _narrow(node)
        elif (bound := BOUND.get(node.target)) is not None and _may_bind(node, bound):
            node.target = bound


def _may_show(user: fx.Node) -> bool:
    """Whether what a node makes may be, or be a view of, the very tensor that it is given."""
    return not isinstance(user.target, OpOverload) or any(r.alias_info for r in schema_of(user.target).returns)


def _may_bind(node: Any, bound: Any) -> bool:
    """Whether a call chooses the overload that it had."""
    if bound in (operator.iadd, operator.imul) and node.kwargs:
        return False
    given = list(zip(node.args, schema_of(node.target).arguments, strict=False))
    if node.target in _WITH_NUMBERS and type(node.args[1]) in (int, float):
        del given[1]
    return all(isinstance(value, fx.Node) for value, argument in given if str(argument.type) == "Tensor")


def _narrow(node: fx.Node) -> None:
    """Write a slice without steps of a tensor of fixed sizes as `torch.narrow`, which makes the same one."""
    given: tuple[Any, ...] = (*node.args, *(None, 0, None, None, 1)[len(node.args) :])
    source, dim, start, end, step = given
    value = source.meta.get("val") if isinstance(source, fx.Node) else None
    if node.kwargs or step != 1 or not isinstance(value, torch.Tensor) or not isinstance(dim, int):
        return
    size = value.shape[dim]
    if all(type(n) in (int, type(None)) for n in (start, end)) and type(size) is int:
        first, last, _ = slice(start, end).indices(size)
        node.target, node.args = torch.narrow, (source, dim, first, max(0, last - first))
