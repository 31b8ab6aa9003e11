"""How the elements of a tensor follow each other in memory, whatever its sizes are."""

from __future__ import annotations

from collections.abc import Sequence

import torch

Order = tuple[int, ...]  # dimensions, outermost first, without those of size 1 and those that are broadcast


def memory_order(t: torch.Tensor) -> Order:
    """The order of a tensor's dimensions in memory. O(dimensions).

    >>> memory_order(torch.zeros(2, 3, 4, 5).permute(0, 3, 1, 2)), memory_order(torch.zeros(()).expand(2, 3))
    ((0, 2, 3, 1), ())
    """
    there = [d for d, (size, stride) in enumerate(zip(t.shape, t.stride(), strict=True)) if size > 1 and stride]
    return tuple(sorted(there, key=lambda d: -t.stride()[d]))


def strides_in(order: Sequence[int], shape: Sequence[int]) -> list[int]:
    """The strides of a tensor of a shape whose dimensions have an order, without gaps. O(dimensions).

    >>> strides_in((0, 2, 3, 1), (2, 5, 3, 4)), strides_in((), (2, 3))
    ([60, 1, 20, 5], [0, 0])
    """
    strides, step = [0] * len(shape), 1
    for d in reversed(order):
        strides[d] = step
        step *= shape[d]
    return strides


def elements_spanned(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Elements of memory from a tensor's first to its last, those between them included. O(dimensions).

    >>> elements_spanned((2, 3), (3, 1)), elements_spanned((2, 3), (10, 1)), elements_spanned((0, 3), (3, 1))
    (6, 13, 0)
    """
    return 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)) if all(shape) else 0


def is_dense(t: torch.Tensor) -> bool:
    """Whether a tensor fills its storage, each byte once."""
    dense = 1
    for stride, size in sorted((stride, size) for size, stride in zip(t.shape, t.stride(), strict=True) if size > 1):
        if stride != dense:
            return False
        dense *= size
    return bool(t.untyped_storage().nbytes() == t.nbytes)
