"""Ctrl-C while torch calls Python from C++: it waits until the op that runs has ended."""

from __future__ import annotations

import _thread
import signal
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import torch

AGAIN = 0.005  # seconds, after which an interruption that had to wait is tried again
# Python that C++ calls in the middle of an op, a backward pass or a guard (torch 2.11 to 2.15), or as it frees tensors
_NAMES = ("_compile.py", "_dynamo/guards.py", "_library/", "_ops.py", "_subclasses/", "utils/_python_dispatch.py")
_FILES = (*(f"{Path(torch.__file__).parent}/{name}" for name in _NAMES), weakref.__file__)
_FUNCTIONS = frozenset({"__torch_dispatch__", "__torch_function__", "_engine_run_backward"})


@contextmanager
def interrupted_between_ops() -> Iterator[None]:
    """A context in which Ctrl-C raises KeyboardInterrupt between ops, and not in the Python that runs for one.

    Ops on fake tensors, and those that are traced, run Python from C++, some of it where C++ passes on no exception:
    one that is raised there ends the process (`std::terminate`, seen in `autograd::InputMetadata`), or is lost, as in
    guards and finalizers. An op takes milliseconds, a backward pass on fake tensors seconds.

    A handler of the user's own stays as it is, and other threads than the main one get no interruptions.
    """
    usual = signal.default_int_handler
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is not usual:
        yield
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if not _in_op(frame):
            usual(number, frame)
        again = threading.Timer(AGAIN, _thread.interrupt_main)
        again.daemon = True
        again.start()

    signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)


def _in_op(frame: FrameType | None) -> bool:
    """Whether a frame, or one that it was called from, is of those that C++ calls. O(frames)."""
    while frame is not None:
        if frame.f_code.co_name in _FUNCTIONS or frame.f_code.co_filename.startswith(_FILES):
            return True
        frame = frame.f_back
    return False
