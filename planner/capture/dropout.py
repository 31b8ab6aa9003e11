"""Dropout as two ops: one draws the mask, one scales by it, so that the second can run again while the mask is kept."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

_ATEN = torch.ops.aten


def split_dropouts(graph: fx.Graph) -> None:
    """Let `native_dropout_backward`, which computes x * mask * scale, make what `native_dropout` returns first.

    The drawing op still makes both; whoever runs the two in a row may take the result from it (`drawn_by`).
    """
    for draw in graph.find_nodes(op="call_function", target=_ATEN.native_dropout.default):
        parts = {user.args[1]: user for user in draw.users if user.target is operator.getitem}
        x, rate, train = draw.args
        if not train or not isinstance(rate, float) or rate >= 1 or parts.keys() != {0, 1}:
            continue
        result, mask = parts[0], parts[1]
        draw.append(mask)
        with graph.inserting_after(mask):
            scaled = graph.call_function(_ATEN.native_dropout_backward.default, (x, mask, 1 / (1 - rate)))
        scaled.meta = dict(result.meta)
        made: Any = result.meta["val"]  # views of it share its storage
        with made.fake_mode:
            draw.meta = {**draw.meta, "val": (torch.empty_like(made), mask.meta["val"])}
        result.replace_all_uses_with(scaled)
        graph.erase_node(result)


def drawn_by(node: fx.Node) -> fx.Node | None:
    """The op whose first result a node computes anew from the mask; None for other nodes."""
    if node.target is not _ATEN.native_dropout_backward.default:
        return None
    x, mask = node.args[:2]
    draw = mask.args[0] if isinstance(mask, fx.Node) and mask.target is operator.getitem else None
    if isinstance(draw, fx.Node) and draw.target is _ATEN.native_dropout.default and draw.args[0] is x:
        return draw
    return None
