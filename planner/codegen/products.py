"""Products of matrices in an emitted graph, without the views that linear layers and attention make for them.

Autograd and AOTAutograd merge the leading dimensions of what they multiply, and split them again. `torch.matmul` and
`torch.nn.functional.linear` do both in C++, in less host time, and sums and transpositions read what has not been
merged. Kernels, their arguments and their strides stay the same, and so do results to the last bit: this is done for
tensors that are contiguous whatever strides a kernel may choose (`contiguous_results`), since others would be
multiplied by another kernel (aten/src/ATen/native/{Linear,LinearAlgebra}.cpp).
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from math import prod
from typing import Any

import torch
from torch import fx

from planner.capture.shapes import SYMBOLIC
from planner.codegen.contiguous import contiguous_results

_ATEN = torch.ops.aten
_MM, _RESHAPE, _STRIDED = _ATEN.mm.default, _ATEN.reshape.default, _ATEN.as_strided.default
_SUM, _T, _TRANSPOSE = _ATEN.sum.dim_IntList, _ATEN.t.default, _ATEN.transpose.int
_ADDMM, _BMM, _LINEAR, _MATMUL = _ATEN.addmm.default, _ATEN.bmm.default, _ATEN.linear.default, _ATEN.matmul.default


def fold_products(forward: fx.Graph, backward: fx.Graph, results: int) -> None:
    """Write products of tensors whose leading dimensions are merged as products of these, in place. O(nodes + edges).

    Nothing is done where sizes are symbols.

    Args:
        forward: the graph of the forward pass: its results, and then what is kept.
        backward: that of the backward pass: what is kept, and then the gradients that come in.
        results: how many results the forward pass has.
    """
    if any(SYMBOLIC in node.meta for node in (*forward.nodes, *backward.nodes)):
        return
    kept: Any = forward.output_node().args[0]
    made = contiguous_results(forward)
    inputs = backward.find_nodes(op="placeholder")
    # a hook could lay out anew what autograd saves: then a product is one of batches, and as good
    given = {own for own, node in zip(inputs, kept[results:], strict=False) if node in made}
    _fold_all(forward, set())
    _fold_all(backward, given)


def _fold_all(graph: fx.Graph, given: Set[fx.Node]) -> None:
    sure, likely = contiguous_results(graph), contiguous_results(graph, given)
    products = graph.find_nodes(op="call_function", target=_MM)
    for product in products:
        _fold(product, likely)
    for product in products:
        _contract(product, likely)
    for merged in graph.find_nodes(op="call_function", target=_RESHAPE):
        if _merges(merged) and merged.args[0] in likely:
            _read_unmerged(merged, merged.args[0] in sure)
    for product in graph.find_nodes(op="call_function", target=_BMM):
        _unmerge_batches(product, likely)
    for product in graph.find_nodes(op="call_function", target=_ADDMM):
        _add_bias(product, sure)
    for product in products:
        _turn_inside(product)


def _merges(node: Any) -> bool:
    """Whether a node is a matrix: a tensor of more dimensions, of which all but the last are merged."""
    if not isinstance(node, fx.Node) or node.target is not _RESHAPE:
        return False
    source: Any = node.args[0]
    *rows, columns = source.meta["val"].shape or (0,)  # a number is no matrix
    return len(rows) > 1 and tuple(node.meta["val"].shape) == (prod(rows), columns)


def _is_sum(node: fx.Node) -> bool:
    """Whether a node adds up the rows of a matrix."""
    return node.target is _SUM and list(node.args[1:]) in ([[0]], [[0], False])


def _fold(product: fx.Node, contiguous: Set[fx.Node]) -> None:
    """Have a product read what has not been merged, and give what need not be split."""
    merged, other = product.args
    assert isinstance(merged, fx.Node)
    assert isinstance(other, fx.Node)
    if merged is other or not _merges(merged) or merged.args[0] not in contiguous:
        return
    source: Any = merged.args[0]
    shape = (*source.meta["val"].shape[:-1], other.meta["val"].shape[1])
    kept = all(user.target is _STRIDED for user in product.users)
    if kept and not all(user is product or user.target in (_T, _SUM, _MM) for user in merged.users):
        return  # nothing would be saved
    if not _unsplit(product, shape):
        return
    _write(product, _MATMUL, (source, other), shape)
    _drop(merged)


def _write(product: fx.Node, target: Any, args: tuple[Any, ...], shape: Sequence[int]) -> None:
    value = product.meta["val"]
    product.target, product.args = target, args
    with value.fake_mode:
        product.meta = {**product.meta, "val": value.new_empty(tuple(shape))}


def _contract(product: fx.Node, contiguous: Set[fx.Node]) -> None:
    """Write the gradient of a weight, a product over the merged dimensions of two tensors, as one op.

    It takes about the time of the product and the three views that go, and is none the quicker where one has to stay.
    """
    turned, right = product.args
    if product.target is not _MM or not isinstance(turned, fx.Node) or turned.target is not _T:
        return
    left: Any = turned.args[0]
    if len(turned.users) > 1 or left is right or not _merges(left) or not _merges(right):
        return
    sources: list[Any] = [left.args[0], right.args[0]]  # type: ignore[union-attr]
    rows = sources[0].meta["val"].shape[:-1]
    may_go = all(user in (turned, product) or _is_sum(user) for n in (left, right) for user in n.users)  # type: ignore[union-attr]
    if not may_go or 1 in rows or sources[1].meta["val"].shape[:-1] != rows or not contiguous >= set(sources):
        return
    dims = list(range(len(rows)))
    _write(product, _ATEN.tensordot.default, (*sources, dims, dims), product.meta["val"].shape)
    product.graph.erase_node(turned)
    for merged in (left, right):
        if not merged.users:  # type: ignore[union-attr]
            product.graph.erase_node(merged)  # type: ignore[arg-type]


def _read_unmerged(merged: fx.Node, sure: bool) -> None:
    """Have sums over the merged dimension and transpositions read what has not been merged, if none else reads it."""
    source: Any = merged.args[0]
    rows, columns = merged.meta["val"].shape
    users = list(merged.users)
    turned = [user for user in users if sure and user.target is _T]
    summed = [user for user in users if _is_sum(user)]
    if len(turned) + len(summed) < len(users):
        return
    for user in turned:
        user.target, user.args = _STRIDED, (source, [columns, rows], [1, columns], 0)
    for user in summed:
        user.args = (source, list(range(source.meta["val"].dim() - 1)), False)
    merged.graph.erase_node(merged)


def _add_bias(product: fx.Node, contiguous: Set[fx.Node]) -> None:
    """Write a product and the bias added to it as the linear layer that it was, on what has not been merged."""
    given: tuple[Any, ...] = product.args
    if len(given) != 3 or product.kwargs or given[0].meta["val"].dim() != 1 or not _is_turned(given[2]):
        return
    bias, merged, turned = given
    source, shape = merged, product.meta["val"].shape
    if _merges(merged) and merged.args[0] in contiguous:
        unmerged = (*merged.args[0].meta["val"].shape[:-1], shape[1])
        if len(unmerged) == 3 and _unsplit(product, unmerged):
            source, shape = merged.args[0], unmerged
    _write(product, _LINEAR, (source, turned.args[0], bias), shape)
    for node in (turned, merged):
        _drop(node)


def _turn_inside(product: fx.Node) -> None:
    """Write a product with a transposed matrix as a linear layer without a bias, which transposes it in C++."""
    left, turned = product.args[:2]  # those that became a contraction have more
    if product.target in (_MM, _MATMUL) and _is_turned(turned):
        product.target, product.args = _LINEAR, (left, turned.args[0])  # type: ignore[union-attr]
        _drop(turned)


def _unmerge_batches(product: fx.Node, contiguous: Set[fx.Node]) -> None:
    """Have a product of batches of matrices, as attention's, read and give tensors whose batches are not merged."""
    given: tuple[Any, ...] = product.args
    sources, turned = zip(*map(_batches, given), strict=True)
    if None in sources or any(t and source not in contiguous for source, t in zip(sources, turned, strict=True)):
        return  # what is transposed would be merged by a copy with other strides
    batch = sources[0].meta["val"].shape[:-2]
    shape = (*batch, *product.meta["val"].shape[1:])
    if sources[1].meta["val"].shape[:-2] != batch or not _unsplit(product, shape):
        return
    args = [_transposed(source, product) if t else source for source, t in zip(sources, turned, strict=True)]
    _write(product, _MATMUL, tuple(args), shape)
    for node in dict.fromkeys(given):
        below = node.args[0]
        _drop(node)
        _drop(below)


def _transposed(source: fx.Node, product: fx.Node) -> fx.Node:
    with product.graph.inserting_before(product):
        new = product.graph.call_function(_TRANSPOSE, (source, -2, -1))
    value = source.meta["val"]
    with value.fake_mode:
        new.meta = {**product.meta, "val": value.mT}
    return new


def _batches(node: Any) -> tuple[Any, bool]:
    """The tensor whose batches are merged in a tensor of matrices, or None; and whether these are transposed."""
    turned = node.target is _TRANSPOSE and sorted(d % 3 for d in node.args[1:]) == [1, 2]
    merged = node.args[0] if turned else node
    if merged.target is not _RESHAPE:
        return None, turned
    source = merged.args[0]
    shape = source.meta["val"].shape
    same = len(shape) > 3 and tuple(merged.meta["val"].shape) == (prod(shape[:-2]), *shape[-2:])
    return (source if same else None), turned


def _unsplit(product: fx.Node, shape: Sequence[int]) -> bool:
    """Have the users of a product that split its dimensions read it; False, and nothing done, where others read it."""
    split = [
        user for user in product.users if user.target is _RESHAPE and tuple(user.meta["val"].shape) == tuple(shape)
    ]
    if len(split) + sum(user.target is _STRIDED for user in product.users) < len(product.users):
        return False
    for user in split:
        user.replace_all_uses_with(product)
        product.graph.erase_node(user)
    return True


def _is_turned(node: Any) -> bool:
    return isinstance(node, fx.Node) and node.target is _T and node.args[0].meta["val"].dim() == 2  # type: ignore[union-attr]


def _drop(node: Any) -> None:
    """Erase a view that nothing reads."""
    if isinstance(node, fx.Node) and node.target in (_T, _RESHAPE, _TRANSPOSE) and not node.users:
        node.graph.erase_node(node)
