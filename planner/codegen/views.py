"""Views in an emitted graph: chains become one or two ops, equal views one, and those that change nothing go.

A view is described by what it would be of a contiguous base (`Layout`), so that nothing here depends on the strides
that a kernel gives its result: where these are not those of the fake tensor, the ops that are left do as eager code
does. No storage lives longer or shorter: a view is written where the first of the equal ones stood, and holds the
storage that the others hold.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import fx

from planner.capture.passes.tangents import is_mark
from planner.capture.shapes import SYMBOLIC
from planner.codegen.contiguous import contiguous_results
from planner.compat.fake import strides_of_kernels
from planner.compat.tensors import storage_key

_ATEN = torch.ops.aten
_RESHAPE, _PERMUTE, _SUM = _ATEN.reshape.default, _ATEN.permute.default, _ATEN.sum.dim_IntList
_VIEWS = {
    _ATEN.alias.default,
    _ATEN.detach.default,
    _ATEN.expand.default,
    _ATEN.permute.default,
    _ATEN.reshape.default,
    _ATEN.select.int,
    _ATEN.slice.Tensor,
    _ATEN.squeeze.default,
    _ATEN.squeeze.dim,
    _ATEN.squeeze.dims,
    _ATEN.t.default,
    _ATEN.transpose.int,
    _ATEN.unsqueeze.default,
}
_SAME = {_ATEN.alias.default, _ATEN.detach.default}
_PARTS = {_ATEN.expand.default, _ATEN.select.int, _ATEN.slice.Tensor}  # fewer or more elements than their input
_Shape = tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """A view of a tensor, as strides and offset in elements that it would have if the tensor were contiguous."""

    base: fx.Node
    shape: _Shape
    strides: _Shape
    offset: int


Layouts = dict[fx.Node, Layout]


def compose_views(graph: fx.Graph) -> Layouts:
    """Write the views of a graph anew, in place. O(nodes).

    Nothing is done where sizes are symbols. Results of the graph stay tensors of their own.

    Returns:
        The layout of each view that is left, and of each tensor that has views.
    """
    if any(SYMBOLIC in node.meta for node in graph.nodes):
        return {}
    found = _Composed(graph)
    with strides_of_kernels():
        for node in list(graph.nodes):
            if _is_view(node):
                found.compose(node)
    for node in reversed(list(graph.nodes)):
        if _is_view(node) and not node.users:
            found.layouts.pop(node, None)
            graph.erase_node(node)
    _sum_without_keeping(graph)
    return {node: layout for node, layout in found.layouts.items() if node.users or node.op == "placeholder"}


def _cut_off(results: Collection[fx.Node]) -> set[fx.Node]:
    """Where views that are results begin anew: as views of another result itself, they would get its gradient."""
    found = set()
    for node in results:
        while _is_view(node) and isinstance(node.args[0], fx.Node):
            if node.target in _SAME:
                found.add(node)
            node = node.args[0]
    return found - set(results)


class _Composed:
    """The views of a graph, as far as they have been looked at.

    Attributes:
        layouts: of each of them, and of the tensors that they are views of.
        near: the same, with the results of ops that take a part as tensors that others are views of.
        made: for each layout the node that has it.
        cut_off: as of `_cut_off`.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.layouts: Layouts = {}
        self.near: Layouts = {}
        self.made: dict[Layout, fx.Node] = {}
        self.results = set(graph.output_node().all_input_nodes)
        self.cut_off = _cut_off(self.results)

    def compose(self, node: fx.Node) -> None:
        """Have the users of a view read an equal one, or a shorter chain."""
        source = node.args[0]
        if not isinstance(source, fx.Node) or not isinstance(node.meta.get("val"), torch.Tensor):
            return
        if node in self.cut_off:
            return
        if node.target in _SAME:  # its strides are those of its source, whatever the fake tensors' are
            self._replace(node, source)
        layout = _layout(node, self._known(source, self.layouts))
        near = self._known(node, self.near) if node.target in _PARTS else _layout(node, self._known(source, self.near))
        if layout is None or near is None:  # it copies
            return
        self.layouts[node], self.near[node] = layout, near
        equal = self.made.get(layout)
        if equal is None:
            equal = self.made[layout] = self._written(node, near)
            self.layouts[equal], self.near[equal] = layout, near
        if equal is not node and _strides(equal) == _strides(node):
            self._replace(node, equal)

    def _known(self, node: fx.Node, layouts: Layouts) -> Layout:
        """The layout of a node; one that is not known is a base."""
        if node not in layouts:
            shape = tuple(node.meta["val"].shape)
            layouts[node] = layout = Layout(node, shape, _contiguous(shape), 0)
            self.made[layout] = node
        return layouts[node]

    def _written(self, node: fx.Node, layout: Layout) -> fx.Node:
        """A node for a layout: a reshape of the base, and a permutation; the node itself where these do not make it."""
        base, shape = layout.base, layout.shape
        if layout.offset or prod(shape) != prod(base.meta["val"].shape) or not prod(shape):
            return node
        order = sorted(range(len(shape)), key=lambda d: -layout.strides[d])
        sizes = tuple(shape[d] for d in order)
        permutation = tuple(order.index(d) for d in range(len(shape)))
        if tuple(layout.strides[d] for d in order if shape[d] > 1) != tuple(
            stride for stride, size in zip(_contiguous(sizes), sizes, strict=True) if size > 1
        ):
            return node
        steps: list[tuple[Any, _Shape]] = []
        if sizes != tuple(base.meta["val"].shape):
            steps.append((_RESHAPE, sizes))
        if order != list(range(len(shape))):
            steps.append((_PERMUTE, permutation))
        value = base.meta["val"]
        behind = view = torch.empty_strided(tuple(value.shape), tuple(value.stride()), device="meta")
        for op, argument in steps:
            view = op(view, argument)
        if storage_key(view) != storage_key(behind) or tuple(view.stride()) != _strides(node):
            return node
        new = [Layout(base, argument, _contiguous(argument), 0) not in self.made for _, argument in steps[:-1]]
        if any(new) and not all(map(_is_view, node.args[0].users)):  # type: ignore[union-attr]
            return node  # its source stays, and one op is fewer than two
        return self._chain(node, layout, steps)

    def _chain(self, node: fx.Node, layout: Layout, steps: Sequence[tuple[Any, _Shape]]) -> fx.Node:
        last = layout.base
        for number, (op, argument) in enumerate(steps, 1):
            if number == len(steps) and node.args[0] is last:
                return node  # it is one op already
            between = Layout(layout.base, argument, _contiguous(argument), 0)
            if number < len(steps) and between in self.made:
                last = self.made[between]
                continue
            with self.graph.inserting_before(node):
                new = self.graph.call_function(op, (last, list(argument)))
            new.meta = dict(node.meta)
            if number < len(steps):
                value = last.meta["val"]
                with value.fake_mode:
                    new.meta["val"] = op(value, argument)
                self.near[new] = between
                self.made[between] = new
                if (far := _layout(new, self._known(last, self.layouts))) is not None:
                    self.layouts[new] = far
                    self.made.setdefault(far, new)
            last = new
        return last

    def _replace(self, node: fx.Node, equal: fx.Node) -> None:
        """Have the users of a node read an equal one; a result of the graph only if that is no input nor a result."""
        own = equal.op == "call_function" and equal not in self.results
        users = [user for user in node.users if user.op != "output" or own]
        for user in users:
            user.replace_input_with(node, equal)
            if user.op == "output":
                self.results.add(equal)


def keep_views(forward: fx.Graph, backward: fx.Graph, before: Layouts, after: Layouts, results: int) -> None:
    """Let the forward pass hand on views that it has made, where the backward pass would make them again, in place.

    They hold the storage that their base holds. Inputs of the forward pass are handed on as they are.

    Args:
        forward: the graph of the forward pass: its results, and then what is kept.
        backward: that of the backward pass: what is kept, and then the gradients that come in.
        before: what `compose_views` returned for the forward pass.
        after: the same for the backward pass.
        results: how many results the forward pass has.
    """
    output = forward.output_node()
    returned: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    kept: list[Any] = []
    made = {layout: node for node, layout in before.items()}
    placeholders = backward.find_nodes(op="placeholder")
    for base, given in zip(returned[results:], placeholders, strict=False):
        views = {n: layout for n, layout in after.items() if layout.base is given and n is not given}
        last = [n for n in views if not all(user in views for user in n.users)]
        found = [made.get(replace(views[n], base=base)) for n in last]
        again = base.op != "call_function" or not all(user in views for user in given.users)
        if again or None in found or not 0 < len(last) <= len(views):
            kept.append(base)
            continue
        with backward.inserting_after(given):
            for view, node in reversed(list(zip(found, last, strict=True))):
                new = backward.placeholder(view.name)  # type: ignore[union-attr]
                new.target = new.name
                new.meta = dict(node.meta)
                node.replace_all_uses_with(new)
        for node in (*reversed(views), given):
            backward.erase_node(node)
        kept += found
    descs = output.meta["desc"]
    output.args = ((*returned[:results], *kept),)
    output.meta["desc"] = [*descs[:results], *[None] * len(kept)]


def stride_views(graph: fx.Graph, layouts: Layouts) -> None:
    """Write chains of views of tensors that are surely contiguous as one op each, in place. O(nodes + edges).

    A view goes where all that read it are views, which read the tensor itself then.

    Args:
        graph: the graph.
        layouts: of its views, as `compose_views` found them.
    """
    results = set(graph.output_node().all_input_nodes)
    sure = contiguous_results(graph) if layouts else set()
    for source in list(graph.nodes):
        layout = layouts.get(source)
        if layout is None or source is layout.base or source in results or layout.base not in sure:
            continue
        views = [n for n in source.users if _is_view(n) and n in layouts and layouts[n].base is layout.base]
        if not views or len(views) < len(source.users):
            continue
        for node in views:
            view = layouts[node]
            node.target, node.kwargs = _ATEN.as_strided.default, {}
            node.args = (layout.base, list(view.shape), list(view.strides), view.offset)
        graph.erase_node(source)


def _is_view(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target in _VIEWS and not is_mark(node)


def _layout(node: fx.Node, source: Layout) -> Layout | None:
    """The layout of a view; None for one that could not be a view of a contiguous tensor."""
    op: Any = node.target
    behind = torch.empty_strided(source.shape, source.strides, device="meta")
    view = op(behind, *node.args[1:], **node.kwargs)
    if storage_key(view) != storage_key(behind):
        return None
    return Layout(source.base, tuple(view.shape), tuple(view.stride()), source.offset + int(view.storage_offset()))


def _contiguous(shape: Sequence[int]) -> _Shape:
    return tuple(torch.empty(tuple(shape), device="meta").stride())


def _strides(node: fx.Node) -> _Shape:
    return tuple(node.meta["val"].stride())


def _sum_without_keeping(graph: fx.Graph) -> None:
    """Let a sum that keeps dimensions only for a reshape to take them away not keep them."""
    for node in graph.find_nodes(op="call_function", target=_SUM):
        if len(node.args) < 3 or node.args[2] is not True or len(node.users) != 1:
            continue
        (user,) = node.users
        gone = {d % node.meta["val"].dim() for d in node.args[1]}
        shape = [n for d, n in enumerate(node.meta["val"].shape) if d not in gone]
        if user.target is _RESHAPE and gone and list(user.meta["val"].shape) == shape:
            node.args = (node.args[0], node.args[1], False, *node.args[3:])
            node.meta = {**node.meta, "val": user.meta["val"]}
            user.replace_all_uses_with(node)
            graph.erase_node(user)
