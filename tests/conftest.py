import ctypes
import functools
import gc
import logging
import os
import tempfile
import time
from collections.abc import Generator

import pytest
import torch
import torch._dynamo.guards

from planner.compat.dispatch import modes_here, switch_off

from .problems import hardly_search

LONG = 1.0  # seconds of the processor, after which what a test has left is frozen

os.environ["CHECKPOINT_PLANNER_CACHE"] = tempfile.mkdtemp(prefix="checkpoint-planner-")  # not the user's
os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler of torch 2.13 otherwise announces itself on stderr

# pytest's handlers on a logger that does not propagate would have torch.compile write out every graph and guard
logging.getLogger("torch.__trace").propagate = True

# torch.compile times each graph's guards, after it has emptied the processor's caches, for a log: up to 50 ms a graph
torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0


def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores: tests that start processes leave a core idle for a seventh of their time."""
    return (os.cpu_count() or 1) + 1


def pytest_collection_finish() -> None:
    _freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Generator[None, object, object]:
    started = time.process_time()
    try:
        return (yield)
    finally:
        if time.process_time() - started > LONG:
            _freeze()


def _freeze() -> None:
    """Keep garbage collections, one of which precedes every measured step, from traversing what stays anyway.

    Imported modules make one take 0.3 s, and each compiled graph, of which torch keeps guards for good, adds to it.
    The planner clears `functools.lru_cache`s, for which it asks the collector, so these stay tracked.
    """
    gc.collect()
    caches = [ctypes.py_object(c) for c in gc.get_objects() if type(c) is functools._lru_cache_wrapper]
    gc.freeze()
    for cache in caches:
        ctypes.pythonapi.PyObject_GC_UnTrack(cache)
        ctypes.pythonapi.PyObject_GC_Track(cache)


@pytest.fixture(autouse=True)
def _one_thread_one_seed():
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _no_mode_and_no_compiled_code_stays():
    """A test is the same after whichever tests: torch.compile takes sizes that it saw change for symbols, for one."""
    yield
    for mode in reversed(modes_here()):
        switch_off(mode)
    torch.compiler.reset()


@pytest.fixture
def unwatched(monkeypatch):
    """For tests of one plan, and of what it serves: no other is made for what a loop does outside the graphs."""
    monkeypatch.setattr("planner.runtime.watch._may_record", lambda: False)


@pytest.fixture(scope="module")
def short_searches():
    """For tests of what holds for every schedule, the best or not: each search does a small part of its work."""
    with pytest.MonkeyPatch.context() as patch:
        hardly_search(patch)
        yield
