"""What `torch.profiler` does not say in public. Torch 2.11 to 2.13."""

from __future__ import annotations

from typing import Any

from torch._C._autograd import DeviceType, _profiler_enabled
from torch.profiler import profile

__all__ = ["DeviceType", "events_of", "is_profiling"]


def is_profiling() -> bool:
    """Whether a profiler runs in this thread (torch 2.11 to 2.13)."""
    return _profiler_enabled()


def events_of(profiler: profile) -> list[Any]:
    """All events of a profile that has ended, allocations included, as Kineto has them (torch 2.11 to 2.13).

    Each has `name()`, `start_ns()`, `duration_ns()`, `device_type()` and `nbytes()`; an allocator's is "[memory]".
    """
    events: list[Any] = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    return events
