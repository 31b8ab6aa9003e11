"""Copies that threads do, one after another."""

from __future__ import annotations

import mmap
import threading
import weakref
from collections import deque
from collections.abc import Callable
from itertools import count
from queue import SimpleQueue

import torch

from planner.errors import OffloadError, gb

STAGING = 2**22  # bytes of each thread's buffer for direct I/O
Transfer = Callable[[int, int, int, memoryview], None]  # address, bytes, offset in the file, staging buffer


class Copy:
    """A copy between a tensor and the file. The tensor is let go of before the copy counts as ended."""

    def __init__(self, x: torch.Tensor, transfer: Transfer, at: int) -> None:
        self._x: torch.Tensor | None = x
        self._transfer, self._at = transfer, at
        self._done = threading.Event()
        self._failed = ""  # in words: an exception would hold the frames through which it is raised, and so the ticket
        self._cancelled = False

    def run(self, staging: memoryview) -> None:
        try:
            if self._x is not None and not self._cancelled:
                self._transfer(self._x.data_ptr(), self._x.nbytes, self._at, staging)
        except BaseException as e:  # of whatever kind: it is told where the copy is waited for
            self._failed = str(e) if isinstance(e, OffloadError) else f"offload: {type(e).__name__}: {e}"
        finally:
            self._x = None
            self._done.set()

    def cancel(self) -> bool:
        """Have it not begin; whether it may still run."""
        self._cancelled = True
        return not self._done.is_set()

    def wait(self) -> None:
        self._done.wait()
        if self._failed:
            raise OffloadError(self._failed)


class Return:
    """Returns an extent once so many threads have done all copies that they had of it."""

    def __init__(self, unused: deque[int], start: int, threads: int) -> None:
        self._unused, self._start, self._threads = unused, start, threads
        self._ended = count(1)  # one step of it is atomic

    def run(self, _staging: memoryview) -> None:
        if next(self._ended) == self._threads:
            self._unused.append(self._start)


class Worker:
    """A thread that does one copy after another, from the first copy to the end of the worker."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: SimpleQueue[Copy | Return | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def add(self, copy: Copy | Return) -> None:
        if self._thread is None:
            self._thread = self._started()
            weakref.finalize(self, self._queue.put, None)
        self._queue.put(copy)

    def _started(self) -> threading.Thread:
        try:
            given = (self._queue, memoryview(mmap.mmap(-1, STAGING)))
            thread = threading.Thread(target=_work, args=given, name=self._name, daemon=True)
            thread.start()
        except (OSError, RuntimeError) as e:
            raise OffloadError(
                f"offload: there is no thread, or no memory, for {gb(STAGING)} of buffer that copies go through ({e}): "
                "raise the limits of this process (ulimit -u, ulimit -v), or plan without offload="
            ) from e
        return thread


def _work(queue: SimpleQueue[Copy | Return | None], staging: memoryview) -> None:
    while (copy := queue.get()) is not None:
        copy.run(staging)
        del copy
