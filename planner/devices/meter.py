"""Allocator events of a piece of code, as torch's profiler reports them; plans are judged by them."""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate

from torch.profiler import ProfilerActivity, profile, record_function

from planner.compat.profiler import allocations_of, events_of, is_profiling, recorded_in_thread
from planner.errors import CaptureError

_MARK = "marked by the planner: "  # unlike the name of any op


@dataclass(frozen=True, slots=True)
class Allocations:
    """Allocations and frees, in order.

    Attributes:
        deltas: bytes of each event, negative for a free.
        marks: for each `marked` block, in order, its name and the range of events inside it.
    """

    deltas: tuple[int, ...]
    marks: tuple[tuple[str, range], ...]

    def peak(self, within: range | None = None) -> int:
        """The most bytes live at once, above those live when the range began."""
        part = self.deltas if within is None else self.deltas[within.start : within.stop]
        return max(accumulate(part, initial=0))


def record_allocations(run: Callable[[], object], *, anywhere: bool = False) -> Allocations:
    """Run something on the CPU under `torch.profiler` and return the CPU allocator's events.

    Args:
        run: what.
        anywhere: whether it may run in a thread of its own, where a profiler is running already in this one: torch
            crashes where another is begun inside it. Neither sees the other.

    Raises:
        CaptureError: a profiler is running already, and `run` has to run here.
    """
    if is_profiling() and anywhere:
        return _recorded(recorded_in_thread(run))
    if is_profiling():
        raise CaptureError(
            "a profiler is running, in which a step cannot be measured: do it before, or end the profiler first"
        )
    # the profiler of torch 2.13 otherwise announces its start and stop on stderr
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        run()
    memory = _of_this_profile(allocations_of(profiler))
    spans: list[tuple[int, int, str]] = []
    for event in events_of(profiler):
        if (name := event.name()).startswith(_MARK):
            spans.append((event.start_ns(), event.start_ns() + event.duration_ns(), name.removeprefix(_MARK)))
    times = [m[0] for m in memory]
    marks = tuple(
        (name, range(bisect_left(times, begin), bisect_left(times, end))) for begin, end, name in sorted(spans)
    )
    return Allocations(tuple(m[1] for m in memory), marks)


def _of_this_profile(events: Iterable[tuple[int, int, int]]) -> list[tuple[int, int]]:
    """Time and bytes of each event, but for frees of blocks that an earlier profile of the process saw: those
    of blocks that none saw are not told, either.
    """
    live: set[int] = set()
    found = []
    for time, address, nbytes in events:
        if nbytes > 0 or address in live:
            (live.add if nbytes > 0 else live.discard)(address)
            found.append((time, nbytes))
    return found


def _recorded(events: Iterable[tuple[str, str, int]]) -> Allocations:
    deltas: list[int] = []
    marks: list[tuple[str, range]] = []
    open_: list[tuple[str, int]] = []
    for kind, name, nbytes in events:
        if kind == "memory_alloc":
            deltas.append(nbytes)
        elif kind == "push":
            open_.append((name, len(deltas)))
        elif kind == "pop":
            name, begin = open_.pop()
            if name.startswith(_MARK):
                marks.append((name.removeprefix(_MARK), range(begin, len(deltas))))
    return Allocations(tuple(deltas), tuple(marks))


@contextmanager
def marked(name: str) -> Iterator[None]:
    """Name the events of a block in `record_allocations`."""
    with record_function(_MARK + name):
        yield
