"""Ops that run in pieces, as one op of a graph: which ones a plan has, and how they run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

Group = tuple[int, int]  # the first and the last of neighbouring dimensions, which are cut as if they were one
SUM: Group = (-1, -1)  # of a result that is not cut: the results of the pieces add up to it
Made = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, torch.device, Group]  # shape, strides, ..., of a result


@dataclass(frozen=True, slots=True)
class Split:
    """Ops of a region that run in pieces.

    Attributes:
        seed: the op around whose result they are found, by its place in the order of the region's nodes.
        first, last: the dimensions of that result that are cut, as one.
        pieces: into how many.
        hops: how far from that op they are sought, in its pass alone; None for as far as they go, in both passes.
    """

    seed: int
    first: int
    last: int
    pieces: int
    hops: int | None = None


def size_of(shape: Sequence[int], group: Group) -> int:
    """How many parts a group of dimensions could be cut into."""
    return prod(shape[group[0] : group[1] + 1])


def cut(t: torch.Tensor, group: Group, start: int, length: int) -> torch.Tensor:
    """A piece of a tensor, a view of it: `length` parts of the group from `start` on."""
    first, last = group
    flat = t if first == last else t.view(*t.shape[:first], size_of(t.shape, group), *t.shape[last + 1 :])
    return flat.narrow(first, start, length)


def run_in_pieces(
    whole: Callable[..., Any],
    rest: Callable[..., Any],
    lengths: Sequence[int],
    cuts: Sequence[Group | None],
    makes: Sequence[Made],
    *given: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """Run a graph piece by piece: what it makes is written into its part of the results, or added to them.

    Args:
        whole: the graph of a piece, called with its inputs and then with the parts of the results that it writes.
        rest: the same for the last piece, which may be shorter.
        lengths: of the pieces.
        cuts: for each input, the group that is cut; None for whole.
        makes: the results.
        given: the inputs.
    """
    made = [_room(*each) for each in makes]
    start = 0
    for at, length in enumerate(lengths):
        inputs = [x if group is None else cut(x, group, start, length) for x, group in zip(given, cuts, strict=True)]
        parts = [x if m[4] == SUM else cut(x, m[4], start, length) for x, m in zip(made, makes, strict=True)]
        (rest if at == len(lengths) - 1 else whole)(*inputs, *parts)
        start += length
    return tuple(made)


def _room(
    shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, device: torch.device, group: Group
) -> torch.Tensor:
    room = torch.empty_strided(shape, stride, dtype=dtype, device=device)
    return room.zero_() if group == SUM else room
