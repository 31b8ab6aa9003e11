"""Dropout as the ops that it is made of: one draws the mask, and others scale by it while it is kept."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import fx

from planner.compat.fake import unset_fake_temporarily

_ATEN = torch.ops.aten
_CPU: ContextVar[bool] = ContextVar("cpu", default=True)  # whether what is traced on the CPU is planned for one
_DRAWN_BY = "planner_drawn_by"  # in a node's meta
_NOISE = "planner_noise"  # likewise


@contextmanager
def planned_for(kind: str) -> Iterator[None]:
    """What is traced on the CPU meanwhile is planned for a kind of device, whose dropout it is to have."""
    before = _CPU.set(kind == "cpu")
    try:
        yield
    finally:
        _CPU.reset(before)


def split_dropouts(graph: fx.Graph) -> None:
    """Take each dropout apart.

    On a CPU into what eager mode does there: a draw, the scaled mask ("noise"), and a product by it in each pass. The
    noise can be kept, as eager mode does, or be made again from the mask, which is a fourth of it or less.

    Elsewhere `native_dropout_backward`, x * mask * scale, computes the first result of `native_dropout`. The drawing op
    still makes both; whoever runs the two in a row may take the result from it (`drawn_by`), where it rounds as eager
    mode does. The backward pass scales as eager mode does, too.
    """
    for draw in graph.find_nodes(op="call_function", target=_ATEN.native_dropout.default):
        parts = {user.args[1]: user for user in draw.users if user.target is operator.getitem}
        x, rate, train = draw.args
        dropped = draw.meta["val"][0]
        on_cpu = not dropped.is_cuda and _CPU.get()
        if not train or not isinstance(rate, float) or rate >= 1 or not (1 in parts or on_cpu):
            continue
        mask = parts.get(1) or _mask_of(draw)
        exact = 1 / (1 - rate)
        with unset_fake_temporarily():
            scale = _scale(rate, dropped)
            as_drawn = dropped.is_cuda or torch.tensor(exact, dtype=dropped.dtype).item() == scale
        for user in tuple(mask.users):
            if user.target is _ATEN.native_dropout_backward.default and user.args[1:] == (mask, exact):
                user.args = (user.args[0], mask, scale)
        if 0 not in parts:
            continue
        if on_cpu and x.meta["val"].is_contiguous():
            _as_eager_on_a_cpu(draw, mask, parts[0], scale)
            continue
        result = parts[0]
        draw.append(mask)
        with graph.inserting_after(mask):
            scaled = graph.call_function(_ATEN.native_dropout_backward.default, (x, mask, scale))
        scaled.meta = dict(result.meta)
        if as_drawn:
            scaled.meta[_DRAWN_BY] = draw.name
        dropped = result.meta["val"]  # views of it share its storage
        with dropped.fake_mode:
            draw.meta = {**draw.meta, "val": (torch.empty_like(dropped), mask.meta["val"])}
        result.replace_all_uses_with(scaled)
        graph.erase_node(result)


def _mask_of(draw: fx.Node) -> fx.Node:
    """The mask of a dropout that no backward pass goes through: a CPU scales that as it does others."""
    with draw.graph.inserting_after(draw):
        mask = draw.graph.call_function(operator.getitem, (draw, 1))
    mask.meta = {**draw.meta, "val": draw.meta["val"][1]}
    return mask


def _as_eager_on_a_cpu(draw: fx.Node, mask: fx.Node, result: fx.Node, scale: float) -> None:
    """Write a `native_dropout` as a draw, the noise, and products by the noise. In place.

    Args:
        draw: the dropout of a contiguous tensor.
        mask: its second result.
        result: its first result.
        scale: what eager mode's noise is where it is not 0.
    """
    graph, (x, rate, _) = draw.graph, draw.args
    assert isinstance(x, fx.Node)
    assert isinstance(rate, float)
    dtype, drawn = x.meta["val"].dtype, mask.meta["val"]
    with drawn.fake_mode, graph.inserting_before(draw):
        room = graph.call_function(_ATEN.empty_like.default, (x,), {"dtype": torch.bool})
        room.meta = {**mask.meta, "val": torch.empty_like(drawn)}
        new_mask = graph.call_function(_ATEN.bernoulli.p, (room, 1 - rate))
        new_mask.meta = dict(mask.meta)
        noise = new_mask
        if dtype != torch.get_default_dtype():  # of the product of a mask and a number
            noise = graph.call_function(_ATEN._to_copy.default, (new_mask,), {"dtype": dtype})
            noise.meta = {**result.meta, "val": torch.empty_like(result.meta["val"])}
        noise = graph.call_function(_ATEN.mul.Scalar, (noise, scale))
        noise.meta = {**result.meta, "val": torch.empty_like(result.meta["val"]), _NOISE: True}
        product = graph.call_function(_ATEN.mul.Tensor, (x, noise))
        product.meta = dict(result.meta)
    for user in tuple(mask.users):
        if user.target is _ATEN.native_dropout_backward.default and user.args[1:] == (mask, scale):
            user.target, user.args = _ATEN.mul.Tensor, (user.args[0], noise)
    result.replace_all_uses_with(product)
    mask.replace_all_uses_with(new_mask)
    for node in (result, mask, draw):
        graph.erase_node(node)


def _scale(rate: float, dropped: torch.Tensor) -> float:
    """The factor of eager mode's dropout.

    A CPU makes a mask of ones, divides it in the tensor's dtype, and multiplies by it in both passes; `native_dropout`,
    which is what torch.compile captures, multiplies by 1 / (1 - rate). CUDA's kernel divides in single precision, but
    for doubles.
    """
    if not dropped.is_cuda:
        return torch.ones(1, dtype=dropped.dtype).div_(1 - rate).item()
    if dropped.dtype is not torch.float64:
        return 1 / torch.tensor(1 - rate, dtype=torch.float32).item()
    return 1 / (1 - rate)


def is_noise(node: fx.Node) -> bool:
    """Whether a node scales a mask, which emitted graphs do in place (`codegen/noise.py`)."""
    return _NOISE in node.meta


def drawn_by(node: fx.Node) -> str | None:
    """The name of the op whose first result a node computes anew from the mask; None for other nodes."""
    name: str | None = node.meta.get(_DRAWN_BY)
    return name
