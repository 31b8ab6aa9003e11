"""Which tensors of an emitted graph are contiguous when it runs, whatever strides kernels may choose.

A few kernels give results of other strides than the fake tensors have that the graph was captured with.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import Any

import torch
from torch import fx

from planner.compat.ops import OpOverload, schema_of

_ATEN = torch.ops.aten
# of strided tensors, these give contiguous ones, whatever the strides of what they read
_PRODUCTS = {_ATEN.addmm.default, _ATEN.baddbmm.default, _ATEN.bmm.default, _ATEN.mm.default}
_SOFTMAX = {  # `set_output_raw_strided(0, sizes, {})` in native/SoftMax.cpp
    _ATEN._softmax.default,
    _ATEN._softmax_backward_data.default,
    _ATEN._log_softmax.default,
    _ATEN._log_softmax_backward_data.default,
    _ATEN._safe_softmax.default,  # of a contiguous tensor, by `where`
}
_CONTIGUOUS = _PRODUCTS | _SOFTMAX
# the first result of each is so, by `empty_like(..., MemoryFormat::Contiguous)` in native/{cpu,cuda}/layer_norm*
_FIRST_CONTIGUOUS = {_ATEN.native_layer_norm.default, _ATEN.native_layer_norm_backward.default}
# pointwise ops that give `TensorIterator` their arguments in the order of their signatures
# (`threshold_backward` gives it the second first)
_IN_ORDER = {
    _ATEN.add.Tensor,
    _ATEN.div.Tensor,
    _ATEN.gelu_backward.default,
    _ATEN.mul.Tensor,
    _ATEN.sigmoid_backward.default,
    _ATEN.silu_backward.default,
    _ATEN.sub.Tensor,
    _ATEN.tanh_backward.default,
}


def contiguous_results(graph: fx.Graph, given: Collection[fx.Node] = ()) -> set[fx.Node]:
    """The nodes that have a contiguous tensor, in a storage that begins with it, whenever the graph runs. O(nodes).

    Args:
        graph: a graph of fixed sizes.
        given: inputs of the graph to count among them; others are not.
    """
    found = set(given)
    for node in graph.nodes:
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or not value.is_contiguous() or value.storage_offset():
            continue
        target: Any = node.target
        copied = target is _ATEN.clone.default and node.kwargs.get("memory_format") is torch.contiguous_format
        first = target is operator.getitem and node.args[1] == 0 and node.args[0].target in _FIRST_CONTIGUOUS
        same = target is _ATEN.reshape.default and node.args[0] in found
        joined = target is _ATEN.cat.default and found.issuperset(node.all_input_nodes)
        if copied or first or same or joined or target in _CONTIGUOUS or _is_pointwise(node, found):
            found.add(node)
    return found


def _is_pointwise(node: fx.Node, contiguous: Collection[fx.Node]) -> bool:
    """Whether an op is pointwise, with a result that is laid out as an argument of its shape that is contiguous.

    `TensorIterator` (aten/src/ATen/TensorIterator.cpp: `reorder_dimensions`) lays a result out as the first argument
    that orders its dimensions, which one that is broadcast along all of them but one does not do.
    """
    target = node.target
    if not isinstance(target, OpOverload) or target.namespace != "aten" or torch.Tag.pointwise not in target.tags:
        return False
    tensors = [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]
    if schema_of(target).is_mutable:
        return node.args[0] in contiguous
    shape = node.meta["val"].shape
    if tensors and all(n in contiguous and n.meta["val"].shape == shape for n in tensors):
        return True
    ordering = [n for n in tensors if n.meta["val"].dim() > 1]
    first = ordering[0] if ordering and target in _IN_ORDER and 1 not in shape else None
    return first in contiguous and first is not None and first.meta["val"].shape == shape
