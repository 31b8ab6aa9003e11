"""What emitted graphs call to have values leave the device and come back.

A forward graph opens a frame: room in a store for the values of one call. The frame crosses to the backward graph as a
ticket, a small tensor on the host that autograd saves like any other. When autograd lets go of the ticket, the frame is
closed, whatever became of the step.

    ticket = begin(store, nbytes)
    send(ticket, x, value, offset, room)     # the copy out begins; x stays
    free(ticket, x, value)                   # waits for that copy; then the graph lets go of x
    y = fetch(ticket, value)                 # takes memory; the copy back begins
    x = ready(ticket, y, value)              # waits for that copy
"""

from __future__ import annotations

import weakref
from itertools import count
from typing import Any

import torch
from torch import fx

from planner.errors import OffloadError
from planner.offload.store import Frame, Store

_STORES: weakref.WeakValueDictionary[int, Store] = weakref.WeakValueDictionary()
_FRAMES: dict[int, Frame] = {}  # that some ticket is held of, by the number in it
_numbers = count(1)


class _Memory(bytearray):
    """The memory of a ticket: tensors hold it, and weak references tell when none does."""


def enter(store: Store) -> int:
    """The number by which graphs name a store, for as long as something else holds it."""
    number = next(_numbers)
    _STORES[number] = store
    return number


@fx.has_side_effect
def begin(store: int, nbytes: int) -> torch.Tensor:
    """Open a frame of so many bytes. Returns its ticket."""
    if (kept := _STORES.get(store)) is None:
        raise OffloadError("this graph is not that of a plan that is applied: there is no room for what it offloads")
    number = next(_numbers)
    memory = _Memory(number.to_bytes(8, "little"))
    ticket = torch.frombuffer(memory, dtype=torch.int64)
    _FRAMES[number] = kept.open(nbytes)
    weakref.finalize(memory, _close, number).atexit = False
    return ticket


@fx.has_side_effect
def send(ticket: torch.Tensor, x: torch.Tensor, value: int, offset: int, room: int) -> None:
    """Begin to copy a tensor to so many bytes of the frame, from `offset` on. Nothing may write into it from now on."""
    _frame(ticket).send(value, x, offset, room)


@fx.has_side_effect
def free(ticket: torch.Tensor, x: torch.Tensor, value: int) -> None:
    """Wait for the copy out of `x`: the graph lets go of it next."""
    _frame(ticket).settle(value)


def fetch(ticket: torch.Tensor, value: int) -> torch.Tensor:
    """Begin to copy a value back. Returns the tensor that it will be; nothing may read it yet."""
    return _frame(ticket).fetch(value)


def ready(ticket: torch.Tensor, x: torch.Tensor, value: int) -> torch.Tensor:
    """Wait for the copy back into `x`. Returns it."""
    _frame(ticket).arrive(value)
    return x


def open_frames() -> int:
    """How many frames there are: calls whose values lie in some store."""
    return len(_FRAMES)


def _frame(ticket: torch.Tensor) -> Frame:
    found = _FRAMES.get(number := int(ticket.item()))
    if found is None:
        raise OffloadError(
            f"the values that forward pass {number} offloaded are gone: hooks on saved tensors "
            "(torch.autograd.graph.saved_tensors_hooks, save_on_cpu) replace what autograd saves, and do not go "
            "together with offload="
        )
    return found


def _close(number: int) -> None:
    frame: Any = _FRAMES.pop(number, None)
    if frame is not None:
        frame.close()
