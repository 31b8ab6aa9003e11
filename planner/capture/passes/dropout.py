"""Dropout as two ops: one draws the mask, one scales by it, so that the second can run again while the mask is kept."""

from __future__ import annotations

import operator

import torch
from torch import fx

from planner.compat.fake import unset_fake_temporarily

_ATEN = torch.ops.aten
_DRAWN_BY = "planner_drawn_by"  # in a node's meta


def split_dropouts(graph: fx.Graph) -> None:
    """Let `native_dropout_backward`, x * mask * scale, compute the first result of `native_dropout`.

    The drawing op still makes both; whoever runs the two in a row may take the result from it (`drawn_by`), where it
    rounds as eager mode does. The backward pass scales as eager mode does, too.
    """
    for draw in graph.find_nodes(op="call_function", target=_ATEN.native_dropout.default):
        parts = {user.args[1]: user for user in draw.users if user.target is operator.getitem}
        x, rate, train = draw.args
        if not train or not isinstance(rate, float) or rate >= 1 or 1 not in parts:
            continue
        mask, dropped = parts[1], draw.meta["val"][0]
        exact = 1 / (1 - rate)
        with unset_fake_temporarily():
            scale = _scale(rate, dropped)
            as_drawn = dropped.is_cuda or torch.tensor(exact, dtype=dropped.dtype).item() == scale
        for user in tuple(mask.users):
            if user.target is _ATEN.native_dropout_backward.default and user.args[1:] == (mask, exact):
                user.args = (user.args[0], mask, scale)
        if 0 not in parts:
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


def drawn_by(node: fx.Node) -> str | None:
    """The name of the op whose first result a node computes anew from the mask; None for other nodes."""
    name: str | None = node.meta.get(_DRAWN_BY)
    return name
