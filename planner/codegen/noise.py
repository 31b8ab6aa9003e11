"""Dropout's noise, the scaled mask, as eager mode makes it on a CPU: drawn in the dtype of the input, scaled in place.

The joint graph draws a mask of booleans, which a plan may keep, and makes the noise from it. Where nothing but the
noise reads the mask, no mask is made; where it is kept, the noise takes no tensor beside the two.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from planner.capture.passes.dropout import is_noise
from planner.capture.shapes import SYMBOLIC

_ATEN = torch.ops.aten


def make_noise_in_place(graph: fx.Graph) -> None:
    """Write each dropout's noise with as few passes over memory as eager mode. In place; O(nodes)."""
    for noise in graph.find_nodes(op="call_function", target=_ATEN.mul.Scalar):
        if not is_noise(noise):
            continue
        source, scale = noise.args
        copied = source.target is _ATEN._to_copy.default
        mask = source.args[0] if copied else source
        if _draw_in_dtype(mask, noise, source):
            source = mask
        elif not copied:
            with graph.inserting_before(noise):
                source = graph.call_function(_ATEN._to_copy.default, (mask,), {"dtype": noise.meta["val"].dtype})
            source.meta = {"val": noise.meta["val"]}
        if set(source.users) <= {noise}:
            noise.target, noise.args = _ATEN.mul_.Scalar, (source, scale)


def _draw_in_dtype(mask: fx.Node, noise: fx.Node, source: fx.Node) -> bool:
    """Draw the mask in the noise's dtype, where this graph draws it just before the noise, and nothing else reads it.

    The draws are the same: a kernel on the CPU draws integers, and casts them. What the dropout scales may have been
    freed by then, so that the draw reads nothing of it.
    """
    call: Any = mask.args[0] if mask.target is operator.getitem else mask  # under the generator's saved state
    if _ATEN.bernoulli.p not in (call.target, *call.args) or len(mask.users) > 1 or len(source.users) > 1:
        return False
    between, value = call.next, noise.meta["val"]
    while between is source or between.target is operator.getitem:
        between = between.next
    room, keep = call.args[-2:]
    if between is not noise or room.target is not _ATEN.empty_like.default or SYMBOLIC in noise.meta:
        return False
    graph = mask.graph
    with graph.inserting_before(call):
        # in the layout of the mask's room: on a GPU the order of draws depends on it
        layout = (list(value.shape), list(room.meta["val"].stride()))
        like = {"dtype": value.dtype, "device": value.device}
        whole = graph.call_function(_ATEN.empty_strided.default, layout, like)
    whole.meta = {**room.meta, "val": value}
    given = [_ATEN.bernoulli_.float if a is _ATEN.bernoulli.p else a for a in (call.target, *call.args[:-2])]
    call.target, call.args = given[0], (*given[1:], whole, keep)
    mask.meta = {**mask.meta, "val": value}
    noise.args = (mask, noise.args[1])
    for node in (source, room):
        if node is not mask and not node.users:
            graph.erase_node(node)
    return True
