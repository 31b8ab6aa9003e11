"""Frames of Python code: those that a thread runs, and room for deep ones, such as torch.compile's."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import FrameType
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
SLOTS = 2**17  # pointers, 1 MiB of 8 bytes each: a chunk that has them is one of 2 MiB, of which the rest is free


def with_room(function: Callable[P, R]) -> Callable[P, R]:
    """The function, called so that the frames of what it calls lie in one chunk of memory.

    CPython keeps frames in chunks of 16 KiB, which it maps when a call does not fit into the last one, and unmaps when
    that call returns (`push_chunk` and `_PyThreadState_PopFrame` of Python/pystate.c, 3.11 to 3.13). A loop whose frame
    ends where a chunk ends pays for that at each of its calls; deep code, as torch.compile's is, has many such loops.
    A frame that needs more than a chunk gets a larger one, and leaves room there for a thousand frames; the memory that
    no frame writes to is never taken.
    """

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return function(*args, **kwargs)

    call.__code__ = call.__code__.replace(co_stacksize=SLOTS)
    return functools.wraps(function)(call)


def frame_of(thread: int) -> FrameType | None:
    """The innermost frame of the thread with this identifier; None where none runs there, as after its end.

    A hook of autograd runs in a thread of the device's, where the user's code is not among the frames.
    """
    return sys._current_frames().get(thread)
