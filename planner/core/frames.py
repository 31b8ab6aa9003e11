"""Variables of frames, read without keeping alive what they hold."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from inspect import CO_OPTIMIZED
from types import FrameType
from typing import Any


def variable_of(frame: FrameType, name: str) -> Any:
    """The value of a frame's variable; None where there is none."""
    return variables_of(frame).get(name)


def variables_of(frame: FrameType) -> dict[str, Any]:
    """A frame's variables.

    Before Python 3.13, a function's frame keeps the dictionary that `f_locals` gives, and so each value of that moment
    until the function returns: the batch of a training loop's first step would stay allocated. It is emptied here.
    """
    seen = frame.f_locals
    variables = dict(seen)
    if frame.f_code.co_flags & CO_OPTIMIZED and seen is not frame.f_globals and type(seen) is dict:
        seen.clear()
    return variables


@contextmanager
def forgotten() -> Iterator[list[Exception | None]]:
    """A list for errors that are looked at later, empty afterwards.

    An error has the frames that it went through and those that called them: one that a variable of such a frame holds
    would keep the variables of all of them, and so a batch, until Python's collector comes.
    """
    errors: list[Exception | None] = []
    try:
        yield errors
    finally:
        errors.clear()
