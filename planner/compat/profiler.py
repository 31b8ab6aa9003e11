"""What `torch.profiler` does not say in public. Torch 2.11 to 2.15."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch._C._autograd import _profiler_enabled
from torch._C._profiler import _EventType, _ExperimentalConfig
from torch.profiler import profile

__all__ = ["allocations_of", "events_of", "is_profiling", "recorded_in_thread"]


def is_profiling() -> bool:
    """Whether a profiler runs in this thread (torch 2.11 to 2.15)."""
    return _profiler_enabled()


def events_of(profiler: profile) -> list[Any]:
    """All events of a profile that has ended, as Kineto has them (torch 2.11 to 2.15).

    Each has `name()`, `start_ns()` and `duration_ns()`.
    """
    events: list[Any] = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    return events


def allocations_of(profiler: profile) -> list[tuple[int, int, int]]:
    """What the CPU's allocator did in a profile that has ended, in order (torch 2.11 to 2.15).

    Returns:
        For each event its time in nanoseconds, the address, and the bytes, negative for a free.
    """
    found = []
    stack: list[Any] = list(profiler.profiler.kineto_results.experimental_event_tree())  # type: ignore[union-attr]
    while stack:
        event = stack.pop()
        stack += event.children
        if event.tag == _EventType.Allocation and event.extra_fields.device.type == "cpu":
            found.append((event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size))
    return sorted(found, key=lambda each: each[0])


def recorded_in_thread(run: Callable[[], object]) -> list[tuple[str, str, int]]:
    """What torch's older profiler records of a function, in a thread of its own, where no other profiler sees it.

    A profile by Kineto cannot be begun inside another (`torch.autograd.profiler_legacy`, 2.11 to 2.15).

    Returns:
        Events in order, as (kind, name, bytes): "push" and "pop" of named ranges, "memory_alloc".
    """

    def record() -> list[tuple[str, str, int]]:
        own: Any = torch.autograd
        settings = own.ProfilerConfig(own.ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig())
        own._enable_profiler_legacy(settings)
        try:
            run()
        finally:
            threads = own._disable_profiler_legacy()
        return [(e.kind(), e.name(), e.cpu_memory_usage()) for events in threads for e in events]

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(record).result()
