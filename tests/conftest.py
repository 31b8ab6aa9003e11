import logging
import os
import tempfile
import time
from collections.abc import Generator

import pytest
import torch

from planner.compat.dispatch import modes_here, switch_off
from planner.compat.frames import with_room

from .problems import hardly_search
from .quick import collect_seldom, compile_and_no_more, freeze

LONG = 1.0  # seconds of the processor, after which what a test has left is frozen

_cache = tempfile.TemporaryDirectory(prefix="checkpoint-planner-")  # not the user's
os.environ["CHECKPOINT_PLANNER_CACHE"] = _cache.name
os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler of torch 2.13 otherwise announces itself on stderr

# pytest's handlers on a logger that does not propagate would have torch.compile write out every graph and guard
logging.getLogger("torch.__trace").propagate = True

compile_and_no_more()
collect_seldom()


def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores: tests that start processes leave cores idle for a seventh of their time."""
    return (os.cpu_count() or 1) + 1


def pytest_collection_finish() -> None:
    freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Generator[None, object, object]:
    started = time.process_time()
    try:
        return (yield)
    finally:
        if time.process_time() - started > LONG:
            freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> None:
    pyfuncitem.obj = with_room(pyfuncitem.obj)


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
    monkeypatch.setattr("planner.runtime.watch.may_record", lambda: False)


@pytest.fixture
def always_compiled(monkeypatch):
    """For tests of compiled calls: those whose steps fit the budget in eager mode are compiled, too."""
    for module in ("planner.session.provider", "planner.planning.pipeline"):
        monkeypatch.setattr(f"{module}.fits_uncompiled", lambda *_: False)


@pytest.fixture(scope="module")
def short_searches():
    """For tests of what holds for every schedule, the best or not: each search does a small part of its work."""
    with pytest.MonkeyPatch.context() as patch:
        hardly_search(patch)
        yield
