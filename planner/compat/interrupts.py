"""Ctrl-C while torch calls Python from C++, or a module is imported: it waits until that has ended."""

from __future__ import annotations

import _thread
import signal
import sys
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
_IMPORTS = "<frozen importlib._bootstrap>"


@contextmanager
def interrupted_between_ops() -> Iterator[None]:
    """A context in which Ctrl-C raises KeyboardInterrupt between ops, and not in the Python that runs for one.

    Ops on fake tensors, and those that are traced, run Python from C++, some of it where C++ passes on no exception:
    one that is raised there ends the process (`std::terminate`, seen in `autograd::InputMetadata`), or is lost, as in
    guards and finalizers. An op takes milliseconds, a backward pass on fake tensors seconds. Modules of torch that are
    imported by half cannot be imported again (`torch._dynamo.backends` knows their names). What has not been raised by
    the end of the context, or was lost, is raised there.

    A handler of the user's own stays as it is, and other threads than the main one get no interruptions.
    """
    usual = signal.default_int_handler
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is not usual:
        yield
        return

    tries: list[threading.Timer] = []
    outer = _imports(sys._getframe())  # of the script that plans, where that is imported itself

    def handle(number: int, frame: FrameType | None) -> None:
        tries.append(threading.Timer(AGAIN, _thread.interrupt_main))
        if not _in_op(frame) and _imports(frame) <= outer:
            usual(number, frame)
        tries[-1].daemon = True
        tries[-1].start()

    signal.signal(signal.SIGINT, handle)
    try:
        yield
        if tries:
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        for each in tries:
            each.cancel()
        raise
    finally:
        signal.signal(signal.SIGINT, usual)


def _imports(frame: FrameType | None) -> int:
    """How many modules are being imported where a frame runs. O(frames)."""
    found = 0
    while frame is not None:
        found += frame.f_code.co_filename == _IMPORTS
        frame = frame.f_back
    return found


def _in_op(frame: FrameType | None) -> bool:
    """Whether a frame, or one that it was called from, is of those that C++ calls. O(frames)."""
    while frame is not None:
        if frame.f_code.co_name in _FUNCTIONS or frame.f_code.co_filename.startswith(_FILES):
            return True
        frame = frame.f_back
    return False
