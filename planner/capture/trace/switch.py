"""What is put in the place of something of torch while any thread needs it."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Switch:
    """Something that is on while any thread is in it.

    Args:
        turn_on: turns it on, and returns what turns it off.
    """

    def __init__(self, turn_on: Callable[[], Callable[[], None]]) -> None:
        self._turn_on = turn_on
        self._lock = threading.Lock()
        self._users = 0
        self._turn_off: Callable[[], None] = _nothing

    def __enter__(self) -> None:
        with self._lock:
            if not self._users:
                self._turn_off = self._turn_on()
            self._users += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                self._turn_off()


def _nothing() -> None:
    """What turns off what is not on."""
