"""How kernels lay out what they make of tensors that are not contiguous, as tiny real ones of the same orders tell.

Some of torch's fake tensors say otherwise: `torch._meta_registrations` has a formula of its own for each of these ops.
"""

from __future__ import annotations

from functools import cache
from math import prod
from typing import Any, NamedTuple

import torch
from torch import fx

from planner.capture.joint_graph import may_write
from planner.capture.recomputability import is_random
from planner.compat import pytree
from planner.compat.dispatch import lasting_modes_off
from planner.compat.fake import unset_fake_temporarily
from planner.compat.ops import OpOverload, name_of
from planner.core.layout import Order, is_dense, memory_order, strides_in

_ATEN = torch.ops.aten
_KINDS = [f"{kind}_pad{dims}d" for kind in ("reflection", "replication") for dims in (1, 2, 3)]
_PADS = {getattr(_ATEN, kind).default for kind in _KINDS}
_PADS_BACKWARD = {getattr(_ATEN, f"{kind}_backward").default for kind in _KINDS}
# kernels that libraries of GPUs build for the sizes of a call: not of tiny ones, at which cuDNN's attention has ended
# the process (torch 2.11, cuDNN 9.19, at the second call that it could not build)
_BUILT_FOR_SIZES = ("attention", "cudnn", "miopen")
_SIZES_OF_GROUPS = slice(3, 7)  # arguments of a group norm: batch, channels, elements of each, groups

_Sizes = tuple[int, ...]


class _Spec(NamedTuple):
    """A tiny tensor."""

    sizes: _Sizes
    order: Order
    dtype: torch.dtype
    device: torch.device

    def zeros(self) -> torch.Tensor:
        strides = strides_in(self.order, self.sizes)
        return torch.empty_strided(self.sizes, strides, dtype=self.dtype, device=self.device).zero_()


def real_strides(node: fx.Node) -> list[int] | None:
    """The strides of the first tensor that a node makes of tensors that are not all contiguous; None where they are as
    its fake value has them, or not known.
    """
    op, made = node.target, first(node)
    read = [t for n in node.all_input_nodes if isinstance(t := n.meta.get("val"), torch.Tensor) and t.dim() > 1]
    if not isinstance(op, OpOverload) or op.is_view or may_write(node) or is_random(node):
        return None
    if not isinstance(made, torch.Tensor) or not is_dense(made):
        return None
    if made.device.type != "cpu" and any(word in name_of(op) for word in _BUILT_FOR_SIZES):
        return None
    orders = {memory_order(t) for t in read}
    if all(order == tuple(sorted(order)) for order in orders):
        return None
    if len(orders) == 1 and 1 in made.shape:  # a kernel may read the stride of that dimension
        return None
    try:
        if (sizes := _tiny_sizes(node, made, read)) is None:
            return None
        leaves, tree = pytree.tree_flatten((*_with_tiny_sizes(node), node.kwargs))
        specs = tuple(_spec(x.meta["val"], sizes.get(x)) if isinstance(x, fx.Node) else x for x in leaves)
        order = _order_made(op, specs, tree, sizes[node])
    except (TypeError, RuntimeError, NotImplementedError):  # a size that is a symbol, a kernel that is not here
        return None
    return None if order in (None, memory_order(made)) else strides_in(order, made.shape)


def first(node: fx.Node) -> Any:
    """What a node makes; of several tensors the first."""
    value = node.meta.get("val")
    return value[0] if isinstance(value, (tuple, list)) and value else value


def _tiny_sizes(node: fx.Node, made: torch.Tensor, read: list[torch.Tensor]) -> dict[fx.Node, _Sizes] | None:
    """The sizes of a tiny tensor that an op makes, and of those that it reads which are not `_at_most(2)`; None where
    no rule here tells.
    """
    op: Any = node.target
    args: tuple[Any, ...] = node.args
    if op in _PADS or op in _PADS_BACKWARD:
        *gradient, x, pads = args
        inner = _at_most(max(1, *pads) + 1, x.meta["val"])
        from_last = [*pads] + [0] * (2 * len(inner) - len(pads))
        outer = tuple(s + a + b for s, a, b in zip(inner, from_last[-2::-2], from_last[-1::-2], strict=True))
        return {x: inner, gradient[0]: outer, node: inner} if gradient else {x: inner, node: outer}
    if op is _ATEN.glu_backward.default:
        gradient, x, dim = args
        halves = _at_most(2, gradient.meta["val"])
        whole = tuple(2 * s if d == dim % len(halves) else s for d, s in enumerate(halves))
        return {x: whole, node: whole}
    by_element = torch.Tag.pointwise in op.tags or op is _ATEN.floor_divide.default
    return {node: _at_most(2, made)} if by_element or all(t.shape == made.shape for t in read) else None


def _at_most(size: int, t: torch.Tensor) -> _Sizes:
    return tuple(min(s, size) for s in t.shape)


def _with_tiny_sizes(node: fx.Node) -> tuple[Any, ...]:
    """A node's arguments, with the sizes among them of tiny tensors."""
    if node.target is _ATEN.channel_shuffle.default:
        return node.args[0], 1
    if node.target is not _ATEN.native_group_norm.default:
        return node.args
    (rows, channels, *others), args = _at_most(2, node.args[0].meta["val"]), [*node.args]  # type: ignore[union-attr]
    args[_SIZES_OF_GROUPS] = rows, channels, prod(others), 1
    return tuple(args)


def _spec(t: torch.Tensor, sizes: _Sizes | None) -> _Spec:
    return _Spec(sizes or _at_most(2, t), memory_order(t), t.dtype, t.device)


@cache
def _order_made(op: OpOverload, specs: tuple[Any, ...], tree: Any, sizes: _Sizes) -> Order | None:
    """How an op lays out what it makes of such tensors, by tiny ones; None where that has other sizes than these."""
    with unset_fake_temporarily(), lasting_modes_off():
        *args, kwargs = pytree.tree_unflatten([x.zeros() if isinstance(x, _Spec) else x for x in specs], tree)
        made = op(*args, **kwargs)
    made = made[0] if isinstance(made, (tuple, list)) else made
    return memory_order(made) if made.shape == sizes else None
