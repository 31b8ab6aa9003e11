"""The memory layouts of a joint graph's values, where they are others than torch's fake tensors say.

A gradient comes in the layout that the loop gives it. Where an op reads tensors in several layouts, as a prediction
that is channels-last and a target that is not, some kernels lay out what they make otherwise than the fake ones: a tiny
real tensor tells. What is computed from such values is computed again on fake tensors.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import fx

from planner.capture.joint_graph import fake_result, is_dense, map_nodes, may_write
from planner.capture.passes.tangents import entering
from planner.capture.recomputability import is_random
from planner.compat import pytree
from planner.compat.dispatch import lasting_modes_off
from planner.compat.fake import FakeTensor, unset_fake_temporarily
from planner.compat.ops import OpOverload
from planner.core.layout import Order, memory_order, strides_in

_ATEN = torch.ops.aten
_VIEWS = {_ATEN.view.default, _ATEN._unsafe_view.default}


class _Spec(NamedTuple):
    """A tensor, with 2 for each of its sizes above."""

    sizes: tuple[int, ...]
    order: Order
    dtype: torch.dtype
    device: torch.device

    def zeros(self) -> torch.Tensor:
        strides = strides_in(self.order, self.sizes)
        return torch.empty_strided(self.sizes, strides, dtype=self.dtype, device=self.device).zero_()


def lay_out(graph: fx.Graph, orders: Mapping[int, Order], other: Collection[fx.Node] = ()) -> None:
    """Give the values of a joint graph, in place, the layouts that they have when it runs.

    The gradient of an output that is a part of another tensor, as `chunk()` gives, has a memory of its own.

    Args:
        graph: of fixed sizes.
        orders: of the dimensions of gradients that enter, by the positions of the outputs that they are of.
        other: nodes whose inputs are laid out otherwise than when their values were computed.
    """
    strides = {}
    for at, node in entering(graph).items():
        t = node.meta["val"]
        own = strides_in(orders.get(at, memory_order(t)), t.shape)
        if own != list(t.stride()) if at in orders else _is_part(t):
            strides[node] = own
    values = (v for node in graph.nodes if isinstance(v := node.meta.get("val"), FakeTensor))
    if (one := next(values, None)) is None:
        return
    changed = set[fx.Node]()
    # of the trace, which may be one that was kept
    with unset_fake_temporarily(), one.fake_mode, torch.no_grad():
        for node in graph.nodes:
            if node in strides:
                _set(node, strides[node])
                changed.add(node)
            elif node.op == "call_function":
                if node in other or not changed.isdisjoint(node.all_input_nodes):
                    _compute_again(node)
                    changed.add(node)
                if (real := _real_strides(node)) is not None:
                    _set(node, real)
                    changed.add(node)


def _set(node: fx.Node, strides: list[int]) -> None:
    t = node.meta["val"]
    node.meta["val"] = torch.empty_strided(t.shape, strides, dtype=t.dtype, device=t.device)


def _is_part(t: torch.Tensor) -> bool:
    """Whether a tensor's memory has others, or gaps, between or beside its elements, none of which it has twice."""
    return not is_dense(t) and all(stride for size, stride in zip(t.shape, t.stride(), strict=True) if size > 1)


def _compute_again(node: fx.Node) -> None:
    """Compute what a node's value is on fake tensors. Where there is no such view, it copies, as in eager mode."""
    try:
        node.meta["val"] = fake_result(node)
    except (RuntimeError, ValueError):
        if node.target not in _VIEWS:
            raise
        node.target = _ATEN.reshape.default
        node.meta["val"] = fake_result(node)


def _real_strides(node: fx.Node) -> list[int] | None:
    """The strides of what a node makes, element by element, of tensors that are laid out in several ways; None where
    they are as its fake value has them, or not known.
    """
    op, made = node.target, node.meta.get("val")
    read = [t for n in node.all_input_nodes if isinstance(t := n.meta.get("val"), torch.Tensor) and t.dim()]
    if len(read) < 2 or not isinstance(made, torch.Tensor) or any(t.shape != made.shape for t in read):
        return None
    if len({memory_order(t) for t in read}) < 2 or not isinstance(op, OpOverload) or op.is_view or may_write(node):
        return None
    if not is_dense(made) or is_random(node):
        return None
    leaves, tree = pytree.tree_flatten(map_nodes((node.args, node.kwargs), lambda n: n.meta["val"]))
    specs = tuple(_spec(x) if isinstance(x, torch.Tensor) else x for x in leaves)
    try:
        order = _order_made(op, specs, tree)
    except (TypeError, RuntimeError, NotImplementedError):  # a size that is a symbol, a kernel that is not here
        return None
    return None if order == memory_order(made) else strides_in(order, made.shape)


def _spec(t: torch.Tensor) -> _Spec:
    return _Spec(tuple(min(size, 2) for size in t.shape), memory_order(t), t.dtype, t.device)


@cache
def _order_made(op: OpOverload, specs: tuple[Any, ...], tree: Any) -> Order:
    """How an op lays out what it makes of such tensors, by tiny ones."""
    with unset_fake_temporarily(), lasting_modes_off():
        args, kwargs = pytree.tree_unflatten([x.zeros() if isinstance(x, _Spec) else x for x in specs], tree)
        return memory_order(op(*args, **kwargs))
