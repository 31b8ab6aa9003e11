"""The memory layouts of a joint graph's values, where they are others than torch's fake tensors say.

A gradient comes in the layout that the loop gives it. Of tensors that are channels-last or otherwise not contiguous,
some kernels lay out what they make otherwise than the fake ones: a tiny real tensor tells. What is computed from such
values is computed again on fake tensors. Kernels that read memory as if it were contiguous get copies: while the graph
was traced, `contiguous()` of what seemed to be so left nothing in it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import fx

from planner.capture.joint_graph import fake_result, tensors
from planner.capture.passes.tangents import entering
from planner.capture.passes.tiny import first, real_strides
from planner.compat.fake import FakeTensor, unset_fake_temporarily
from planner.compat.versions import has_group_norms_of_any_layout
from planner.core.call import storages
from planner.core.layout import Order, is_dense, memory_order, strides_in

_ATEN = torch.ops.aten
_VIEWS = {_ATEN.view.default, _ATEN._unsafe_view.default}
# the arguments that are made contiguous for a kernel, by `codegen.formulas` where that shows when it runs alone
_CONTIGUOUS: dict[Any, tuple[int, ...]] = {
    _ATEN._cdist_backward.default: (0,),
    _ATEN._weight_norm_interface_backward.default: (0,),
}
if not has_group_norms_of_any_layout():
    _CONTIGUOUS[_ATEN.native_group_norm_backward.default] = (0,)
_AS_TRACED = _CONTIGUOUS | {
    _ATEN.cudnn_batch_norm_backward.default: (1,),
    _ATEN.miopen_batch_norm_backward.default: (1,),
    _ATEN.as_strided.default: (0,),
    _ATEN.as_strided_scatter.default: (0, 1),
}


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
    changed = dict[fx.Node, Order]()  # to what they were traced with
    # of the trace, which may be one that was kept
    with unset_fake_temporarily(), one.fake_mode, torch.no_grad():
        for node in graph.nodes:
            before = _order(node)
            if node in strides:
                _set(node, strides[node])
                changed[node] = before
            elif node.op == "call_function":
                for given in _given_as_traced(node):
                    if given in changed and changed[given] != _order(given):
                        node.replace_input_with(given, _copied(graph, given, changed[given], node))
                again = node in other or not changed.keys().isdisjoint(node.all_input_nodes)
                if again and _compute_again(node):
                    changed[node] = before
                if (real := real_strides(node)) is not None:
                    _set(node, real)
                    changed[node] = before


def rely_on_layouts(graph: fx.Graph) -> bool:
    """Whether what is computed from gradients that enter comes to kernels that rely on the layout of the trace."""
    reached = set(entering(graph).values())
    for node in graph.nodes:
        if not reached.isdisjoint(node.all_input_nodes):
            if node.target not in _CONTIGUOUS and not reached.isdisjoint(_given_as_traced(node)):
                return True
            reached.add(node)
    return False


def _order(node: fx.Node) -> Order:
    value = node.meta.get("val")
    return memory_order(value) if isinstance(value, torch.Tensor) else ()


def _given_as_traced(node: fx.Node) -> list[fx.Node]:
    """What has to come to an op in the layout that it was traced with: a custom op may rely on that of each input."""
    if node.target in _AS_TRACED:
        given = [node.args[at] for at in _AS_TRACED[node.target]]
        return [n for n in given if isinstance(n, fx.Node)]
    torchs = getattr(node.target, "namespace", "aten") in ("aten", "prims", "_c10d_functional")
    return [] if torchs else node.all_input_nodes


def _copied(graph: fx.Graph, given: fx.Node, order: Order, before: fx.Node) -> fx.Node:
    """A copy of a tensor in memory of an order, before the op that reads it."""
    dims = range(given.meta["val"].dim())
    outermost = (*(d for d in dims if d not in order), *order)
    inverse = tuple(outermost.index(d) for d in dims)
    in_order = outermost == tuple(sorted(outermost))
    with graph.inserting_before(before):
        for target, argument in ((_ATEN.permute, outermost), (_ATEN.clone, None), (_ATEN.permute, inverse)):
            if target is _ATEN.permute and in_order:
                continue
            options: dict[str, Any] = {} if argument else {"memory_format": torch.contiguous_format}
            given = graph.call_function(target.default, (given, argument) if argument else (given,), options)
            given.meta = {**before.meta, "val": fake_result(given)}
    return given


def _set(node: fx.Node, strides: list[int]) -> None:
    t = first(node)
    laid_out = torch.empty_strided(t.shape, strides, dtype=t.dtype, device=t.device)
    value = node.meta["val"]
    node.meta["val"] = laid_out if value is t else (laid_out, *value[1:])


def _is_part(t: torch.Tensor) -> bool:
    """Whether a tensor's memory has others, or gaps, between or beside its elements, none of which it has twice."""
    return not is_dense(t) and all(stride for size, stride in zip(t.shape, t.stride(), strict=True) if size > 1)


def _compute_again(node: fx.Node) -> bool:
    """Compute what a node's value is on fake tensors, and whether it is another one: laid out otherwise, or a view of
    another one.

    Where there is no such view, it copies, as in eager mode.
    """
    before = _laid_out(node)
    try:
        value = fake_result(node)
    except (RuntimeError, ValueError):
        if node.target not in _VIEWS:
            raise
        node.target = _ATEN.reshape.default
        value = fake_result(node)
    given = storages([n.meta.get("val") for n in node.all_input_nodes])
    if _laid_out(node, value) == before and storages(value).keys().isdisjoint(given):
        return False
    node.meta["val"] = value
    return True


def _laid_out(node: fx.Node, value: Any = None) -> list[tuple[Any, ...]]:
    """How the tensors that a node makes, or those of another value of it, lie in their storages."""
    return [(t.stride(), t.storage_offset(), t.untyped_storage().nbytes()) for t in tensors(node, value)]
