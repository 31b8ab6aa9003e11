"""Planning without torch's own remarks, and without pauses of the garbage collector."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quietly(*names: str) -> Iterator[None]:
    """Hide messages of some of torch's loggers, or those on graph breaks and fallbacks, unless TORCH_LOGS is set."""
    hidden = () if "TORCH_LOGS" in os.environ else names or ("torch._dynamo", "torch._subclasses")
    loggers = list(map(logging.getLogger, hidden))
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


_PAUSES: list[None] = []  # of ours that are on


@contextmanager
def collector_paused() -> Iterator[None]:
    """Leave reference cycles alone: a trace makes so many objects that looking for them takes a tenth of its time."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    _PAUSES.append(None)
    try:
        yield
    finally:
        _PAUSES.pop()
        gc.enable()


def collect(generation: int = 2) -> None:
    """Free what is in reference cycles, up to a generation, unless the user has turned the collector off."""
    if gc.isenabled() or _PAUSES:
        gc.collect(generation)
