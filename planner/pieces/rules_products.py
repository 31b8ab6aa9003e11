"""How ATen's products of matrices and tables of rows run in pieces."""

from __future__ import annotations

import torch
from torch import fx

from planner.capture.joint_graph import shape_of
from planner.pieces.groups import NEITHER, SUM, Group, aligned
from planner.pieces.ways import Way, args_of, given, parts, sums

_ATEN = torch.ops.aten


@parts(_ATEN.mm.default, _ATEN.addmm.default)
def _product(node: fx.Node, group: Group) -> Way | None:
    """Rows of the first factor, or columns of the second; a bias is broadcast."""
    factors: tuple[Group | None, ...] = ((0, 0), None) if group == (0, 0) else (None, (1, 1))
    if group not in ((0, 0), (1, 1)):
        return None
    if node.target is _ATEN.mm.default:
        return Way(factors, (group,))
    bias = aligned(shape_of(given(node)[0]), shape_of(node), group)
    return None if bias == NEITHER else Way((bias, *factors), (group,))


@sums(_ATEN.mm.default)
def _contracted(node: fx.Node, at: int, group: Group) -> Way | None:
    """Products over the dimension that is summed, as in the gradients of weights."""
    return Way(((1, 1), (0, 0)), (SUM,)) if group == ((1, 1), (0, 0))[at] else None


@parts(_ATEN.bmm.default)
def _batched(node: fx.Node, group: Group) -> Way | None:
    reads = {(0, 0): ((0, 0), (0, 0)), (1, 1): ((1, 1), None), (2, 2): (None, (2, 2))}.get(group)
    return None if reads is None else Way(reads, (group,))


@sums(_ATEN.bmm.default)
def _batched_contraction(node: fx.Node, at: int, group: Group) -> Way | None:
    return Way(((2, 2), (1, 1)), (SUM,)) if group == ((2, 2), (1, 1))[at] else None


@parts(_ATEN.embedding.default)
def _rows(node: fx.Node, group: Group) -> Way | None:
    """Rows of a table, by indices that are cut."""
    _, index = given(node)
    if group[1] >= len(shape_of(index)):
        return None
    return Way((None, group), (group,))


@sums(_ATEN.embedding_dense_backward.default)
def _rows_backward(node: fx.Node, at: int, group: Group) -> Way | None:
    """The gradients of a table's rows; scaled by how often each is read, they do not add up."""
    _, index = given(node)
    scaled = bool(args_of(node)[4])
    return None if scaled or group[1] >= len(shape_of(index)) else Way((group, group), (SUM,))
