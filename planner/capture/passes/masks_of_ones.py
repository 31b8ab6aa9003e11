"""Attention masks made of an input that holds ones only, as a batch's `attention_mask` where nothing is padded.

Such a mask is causal, or lets everything through, as `attention_masks` has it; whether it is of ones is seen in each
call, as libraries see it in eager mode. A graph that is captured of such a call is another than that of a padded batch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import fx

from planner.capture.passes.attention_masks import drop_known_masks, dropped_if_ones
from planner.capture.passes.mask_values import checkpointed_in
from planner.compat.fake import FakeTensor
from planner.compat.tensors import no_dispatch

OF_ONES = "whether an attention mask holds ones only"
Served = Callable[..., Any]


def serve_by_ones(
    graph: fx.GraphModule,
    inputs: Sequence[Any],
    serve: Callable[[fx.GraphModule, Sequence[Any]], Served],
    may_tell: Callable[[], bool],
) -> Served:
    """What runs a Dynamo graph: one callable for each set of inputs, out of those that tell masks, that hold ones only.

    Args:
        graph: masks made of constants are dropped already.
        inputs: the first ones.
        serve: a graph and inputs -> what runs it.
        may_tell: whether what the inputs of a call hold may tell which graph it is.
    """
    asked = dropped_if_ones(graph)
    if not asked:
        return serve(graph, inputs)
    served: dict[tuple[int, ...], Served] = {}

    def serving(given: Sequence[Any]) -> Served:
        ones = tuple(at for at in asked if _holds_ones(given[at])) if may_tell() else ()
        if ones not in served:
            served[ones] = serve(_without_masks(graph, ones), given)
        return served[ones]

    serving(inputs)
    return lambda *given: serving(given)(*given)


def _holds_ones(t: torch.Tensor) -> bool:
    value = t.constant if isinstance(t, FakeTensor) else t
    if type(value) is not torch.Tensor:
        return False
    with no_dispatch(), torch.no_grad():
        return bool((value == 1).all())


def _without_masks(graph: fx.GraphModule, ones: Collection[int]) -> fx.GraphModule:
    """A copy of a graph, without the masks that such inputs tell."""
    copied = _copy(graph)
    for call, body, _ in checkpointed_in(graph):
        setattr(copied, call.args[0].target, _copy(body))  # type: ignore[arg-type, union-attr]
    drop_known_masks(copied, ones)
    return copied


def _copy(graph: fx.GraphModule) -> fx.GraphModule:
    copied = fx.GraphModule(graph, copy.deepcopy(graph.graph))
    copied.meta = graph.meta
    return copied
