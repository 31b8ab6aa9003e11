"""The largest sizes of a call's tensors, where smaller ones may come: one plan serves all of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from planner.core.objects import tensors_of


@dataclass(frozen=True)
class Maxima:
    """The largest size of each dimension that may be smaller.

    Attributes:
        sizes: for each tensor of a call, by its path in `(args, kwargs)`, dimension -> largest size.
    """

    sizes: Mapping[str, Mapping[int, int]]

    def of(self, path: str) -> Mapping[int, int]:
        """The dimensions of a tensor that may be smaller, with their largest sizes."""
        return self.sizes.get(path, {})

    def cover(self, other: Maxima) -> bool:
        """Whether no size of the other is larger."""
        return all(n <= self.of(path).get(d, 0) for path, at in other.sizes.items() for d, n in at.items())


def sizes_in(args: Any, kwargs: Any, free: Mapping[str, Collection[int]] | None = None) -> Maxima:
    """The sizes of a call as maxima: of the free dimensions (None: of all), without those of one element or none.

    Those of sparse tensors are no symbols.
    """
    sizes = {
        path: {d: n for d, n in enumerate(t.shape) if n > 1 and (free is None or d in free.get(path, ()))}
        for path, t in tensors_of(args, kwargs)
        if t.layout is torch.strided
    }
    return Maxima({path: at for path, at in sizes.items() if at})


def layout(t: torch.Tensor) -> tuple[int, ...]:
    """The order of dimensions in memory, the slowest first; those of one element stand where they are."""
    strides = t.stride()
    moving = sorted((d for d, n in enumerate(t.shape) if n > 1), key=lambda d: strides[d], reverse=True)
    rest = iter(moving)
    return tuple(next(rest) if n > 1 else d for d, n in enumerate(t.shape))
