"""Offsets in a slab for what lies there at different times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ALIGNMENT = 4096  # bytes: that of direct I/O, and of pages


@dataclass(frozen=True, slots=True)
class Stay:
    """Bytes that have to lie in the slab from one moment to another, both included."""

    nbytes: int
    begin: float
    end: float


def rounded(nbytes: int) -> int:
    """The room that so many bytes take in a slab."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def lay_out(stays: Sequence[Stay]) -> tuple[tuple[int, ...], int]:
    """Give each stay an offset, so that no two that meet in time overlap. O(stays ** 2).

    The largest come first, each into the lowest gap that is large enough (Pisarchyk and Lee, Efficient Memory
    Management for Deep Neural Net Inference, 2020).

    Returns:
        The offsets, multiples of `ALIGNMENT`, and the bytes of the slab.
    """
    offsets = [0] * len(stays)
    placed: list[int] = []
    for i in sorted(range(len(stays)), key=lambda i: -stays[i].nbytes):
        room = rounded(stays[i].nbytes)
        meets = [j for j in placed if stays[j].begin <= stays[i].end and stays[i].begin <= stays[j].end]
        for j in sorted(meets, key=offsets.__getitem__):
            if offsets[i] + room <= offsets[j]:
                break
            offsets[i] = max(offsets[i], offsets[j] + rounded(stays[j].nbytes))
        placed.append(i)
    return tuple(offsets), max((o + rounded(s.nbytes) for o, s in zip(offsets, stays, strict=True)), default=0)
