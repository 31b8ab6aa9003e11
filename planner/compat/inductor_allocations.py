"""What generated code of Inductor allocates, shown to dispatch modes: it does so past the dispatcher."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch._C._dynamo import guards

_DEVICES = ("cpu", "cuda", "xpu")


_shown = False


def show_allocations(shown: Callable[[], bool]) -> None:
    """Have generated code allocate by `torch.empty_strided`, where `shown` says so, until `hide_allocations`.

    Its modules take the functions from `torch._C._dynamo.guards` as they are loaded, and are in `PyCodeCache.modules`
    (2.11 to 2.15).
    """
    global _shown
    _shown = True
    for name, device in _names():
        own = getattr(guards, name)
        if not isinstance(own, _Dispatched):
            _replace(name, own, _Dispatched(own, device, shown))


def hide_allocations() -> None:
    """Have it allocate as it did."""
    global _shown
    if not _shown:
        return
    _shown = False
    for name, _ in _names():
        seen = getattr(guards, name)
        if isinstance(seen, _Dispatched):
            _replace(name, seen, seen.own)


class _Dispatched:
    """In the place of a function that allocates past the dispatcher."""

    def __init__(self, own: Callable[..., torch.Tensor], device: str, shown: Callable[[], bool]) -> None:
        self.own, self.shown = own, shown
        self._dispatched = partial(torch.empty_strided, device=device)

    def __call__(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return self._dispatched(size, stride, dtype=dtype) if self.shown() else self.own(size, stride, dtype)


def _names() -> Iterator[tuple[str, str]]:
    return ((name, device) for device in _DEVICES if hasattr(guards, name := f"_empty_strided_{device}"))


def _replace(name: str, old: Any, new: Any) -> None:
    setattr(guards, name, new)
    for module in _generated():
        if getattr(module, name[1:], None) is old:
            setattr(module, name[1:], new)


def _generated() -> list[ModuleType]:
    loaded = sys.modules.get("torch._inductor.codecache")
    return [] if loaded is None else list(loaded.PyCodeCache.modules)
