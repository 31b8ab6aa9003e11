"""Progress: what is done, how far it is, how long it has taken; on a terminal, gone when it is over."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm

DELAY = 0.5  # seconds of work that nobody needs to be told of
REDRAW = 0.5  # seconds


def bar(what: str, progress: bool | None, *, total: float | None = None, unit: str = "", **options: Any) -> tqdm[Any]:
    """A progress bar, shown once the work has taken `DELAY` seconds; as a context manager, cleared at its end.

    Args:
        what: is being done.
        progress: whether to show it; None for only where a terminal is watching.
        total: steps of work; None where nobody knows.
        unit: of a step.
        options: of `tqdm`.
    """
    disable = None if progress is None else not progress
    return tqdm(desc=what, total=total, unit=unit, leave=False, delay=DELAY, disable=disable, **options)


@contextmanager
def clock(shown: tqdm[Any]) -> Iterator[None]:
    """While it is on, a bar is drawn anew every `REDRAW` seconds, as its steps may take minutes."""
    if shown.disable:
        yield
        return
    over = threading.Event()

    def draw() -> None:
        while not over.wait(REDRAW):
            shown.refresh()
            shown.last_print_t = time.time()  # else the bar takes itself for one that was never shown

    thread = threading.Thread(target=draw, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
