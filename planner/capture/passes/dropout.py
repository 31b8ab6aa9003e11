"""Dropout as two ops: one draws the mask, one scales by it, so that the second can run again while the mask is kept."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

_ATEN = torch.ops.aten
_DRAWN_BY = "planner_drawn_by"  # in a node's meta


def split_dropouts(graph: fx.Graph) -> None:
    """Let `native_dropout_backward`, x * mask * scale, compute the first result of `native_dropout`.

    The drawing op still makes both; whoever runs the two in a row may take the result from it (`drawn_by`).
    """
    for draw in graph.find_nodes(op="call_function", target=_ATEN.native_dropout.default):
        parts = {user.args[1]: user for user in draw.users if user.target is operator.getitem}
        x, rate, train = draw.args
        if not train or not isinstance(rate, float) or rate >= 1 or parts.keys() != {0, 1}:
            continue
        result, mask = parts[0], parts[1]
        dropped: Any = result.meta["val"]  # views of it share its storage
        if not dropped.is_cuda and dropped.dtype not in (torch.float32, torch.float64):
            continue  # on the CPU, the two round half precision differently
        draw.append(mask)
        with graph.inserting_after(mask):
            scaled = graph.call_function(_ATEN.native_dropout_backward.default, (x, mask, _scale(rate, draw)))
        scaled.meta = {**result.meta, _DRAWN_BY: draw.name}
        with dropped.fake_mode:
            draw.meta = {**draw.meta, "val": (torch.empty_like(dropped), mask.meta["val"])}
        result.replace_all_uses_with(scaled)
        graph.erase_node(result)


def _scale(rate: float, draw: fx.Node) -> float:
    """The factor of the drawing kernel: on CUDA it divides in single precision, but for doubles."""
    dropped = draw.meta["val"][0]
    if dropped.is_cuda and dropped.dtype is not torch.float64:
        return 1 / torch.tensor(1 - rate, dtype=torch.float32).item()
    return 1 / (1 - rate)


def drawn_by(node: fx.Node) -> str | None:
    """The name of the op whose first result a node computes anew from the mask; None for other nodes."""
    name: str | None = node.meta.get(_DRAWN_BY)
    return name
