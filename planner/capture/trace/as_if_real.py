"""What a model does with fake tensors as with real ones, where torch has it do otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from planner.capture.trace.switch import Switch
from planner.compat.fake import replace_format
from planner.compat.modules import replace_conversions

_NUMBERS, _CONVERSIONS = Switch(replace_format), Switch(replace_conversions)


@contextmanager
def as_if_real() -> Iterator[None]:
    """While it is on, in any thread, numbers are written as their values, and `Module.to` leaves alone what it does not
    convert.
    """
    with _NUMBERS, _CONVERSIONS:
        yield
