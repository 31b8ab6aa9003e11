"""Groups of dimensions: neighbours that are cut as if they were one, such as batch and time of a row of tokens.

A group of a tensor is a pair (first, last). A piece is a range of the group, flattened; inside a piece a tensor has one
dimension in the place of the group.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import prod

import torch

from planner.core.pieces import SUM, Group, size_of

__all__ = ["NEITHER", "SUM", "Group", "size_of"]

NEITHER: Group = (-2, -2)  # of an argument that can neither be cut nor be given whole


def narrowed(shape: Sequence[int], group: Group) -> Group | None:
    """The same group without dimensions of size 1 at its ends; None where nothing is left to cut."""
    first, last = group
    while first <= last and shape[first] == 1:
        first += 1
    while first <= last and shape[last] == 1:
        last -= 1
    return (first, last) if first <= last else None


def groups_of(shape: Sequence[int]) -> Iterator[Group]:
    """All groups of a shape, single dimensions first."""
    for width in range(len(shape)):
        for first in range(len(shape) - width):
            if narrowed(shape, (first, first + width)) == (first, first + width):
                yield first, first + width


def through_view(shape: Sequence[int], group: Group, other: Sequence[int]) -> Group | None:
    """The group of a tensor's view in another shape that has the same elements in the same order; None for none."""
    before, size = prod(shape[: group[0]]), size_of(shape, group)
    for first in range(len(other)):
        if prod(other[:first]) == before:
            for last in range(first, len(other)):
                if prod(other[first : last + 1]) == size and prod(other) == prod(shape):
                    return narrowed(other, (first, last))
    return None


def in_piece(shape: Sequence[int], group: Group, length: int) -> tuple[int, ...]:
    """The shape of a piece."""
    return (*shape[: group[0]], length, *shape[group[1] + 1 :])


def dim_in_piece(dim: int, rank: int, group: Group) -> int | None:
    """The number of a dimension in a piece; None for one that is cut."""
    dim %= max(rank, 1)
    if group[0] <= dim <= group[1]:
        return None
    return dim if dim < group[0] else dim - (group[1] - group[0])


def aligned(shape: Sequence[int], out: Sequence[int], group: Group) -> Group | None:
    """The group that an argument is cut along, which is broadcast to a result; None for whole, or NEITHER."""
    off = len(out) - len(shape)
    first, last = group[0] - off, group[1] - off
    own = [shape[d] if d >= 0 else 1 for d in range(first, last + 1)]
    if all(n == 1 for n in own):
        return None
    return (first, last) if first >= 0 and own == list(out[group[0] : group[1] + 1]) else NEITHER


def can_be_cut(t: torch.Tensor, group: Group) -> bool:
    """Whether the group of a tensor can be flattened without a copy."""
    first, last = group
    sizes, strides = t.shape[first : last + 1], t.stride()[first : last + 1]
    kept = [(n, s) for n, s in zip(sizes, strides, strict=True) if n != 1]
    return all(a[1] == b[0] * b[1] for a, b in pairwise(kept))
