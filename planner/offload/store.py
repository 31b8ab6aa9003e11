"""The values of one call that are away: what each was as a tensor, and the copies that are on their way.

A value leaves as the elements that its tensor spans, each once, and comes back with the strides that it had. Views are
never copied: they are derived anew from the tensor that came back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from planner.core.layout import elements_spanned
from planner.errors import OffloadError, gb

Wait = Callable[[], None]  # until a copy has ended; raises what became of it


class Extent(Protocol):
    """A part of a slab that one frame has for itself."""

    def out(self, x: torch.Tensor, at: int) -> Wait:
        """Begin to copy a contiguous tensor to the slab, `at` bytes from the beginning of the extent."""

    def back(self, x: torch.Tensor, at: int) -> Wait:
        """Begin to fill a contiguous tensor from the slab."""

    def close(self) -> None:
        """Give the extent back, once the copies that were begun have ended."""


class Store(Protocol):
    """Room outside the device, handed out as frames."""

    def open(self, nbytes: int) -> Frame:
        """A frame of so many bytes. Raises OffloadError where there is no room for it."""


@dataclass
class _Away:
    """A value that was sent.

    Attributes:
        meta: a tensor without memory, of its shape, strides and dtype.
        device: where it was.
        elements: that it spans.
        offset: in the extent, in bytes.
        out: waits for the copy out.
        back: waits for the copy back that was begun last.
    """

    meta: torch.Tensor
    device: torch.device
    elements: int
    offset: int
    out: Wait
    back: Wait | None = None


class Frame:
    """What one call of a graph has in a store."""

    def __init__(self, extent: Extent) -> None:
        self._extent = extent
        self._away: dict[int, _Away] = {}

    def send(self, value: int, x: torch.Tensor, offset: int, room: int) -> None:
        """Begin to copy a tensor to so many bytes from `offset` on. Raises OffloadError where they are too few."""
        elements = elements_spanned(x.shape, x.stride())
        if elements * x.element_size() > room:
            raise OffloadError(
                f"a value of shape {tuple(x.shape)} and strides {x.stride()} takes {gb(elements * x.element_size())}, "
                f"and was planned with {gb(room)}: a kernel gives it other strides than torch.compile says. "
                "Plan without offload="
            )
        whole = x.as_strided((elements,), (1,))
        meta = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
        self._away[value] = _Away(meta, x.device, elements, offset, self._extent.out(whole, offset))

    def settle(self, value: int) -> None:
        """Wait for the copy out."""
        self._away[value].out()

    def fetch(self, value: int) -> torch.Tensor:
        """Begin the copy back. Returns the tensor that it fills."""
        away = self._away[value]
        whole = torch.empty(away.elements, dtype=away.meta.dtype, device=away.device)
        away.back = self._extent.back(whole, away.offset)
        return whole.as_strided(away.meta.shape, away.meta.stride())

    def arrive(self, value: int) -> None:
        """Wait for the copy back."""
        if (back := self._away[value].back) is not None:
            back()

    def close(self) -> None:
        """Give the room back. What is away is gone."""
        self._away.clear()
        self._extent.close()
