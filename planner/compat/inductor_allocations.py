"""What generated code of Inductor reads and allocates, shown to dispatch modes: it does so past the dispatcher."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch._C._dynamo import guards

_DEVICES = ("cpu", "cuda", "xpu")
_GENERATED = "torch._inductor.runtime.compile_tasks."

_shown = False


def show_allocations(shown: Callable[[], bool]) -> None:
    """Have generated code allocate by `torch.empty_strided`, where `shown` says so, until `hide_allocations`, and have
    it detach what it checks the layout of: its inputs, and results of other kernels.

    Its modules take the functions from `torch._C._dynamo.guards` as they are loaded, and are in `sys.modules` by the
    name that `torch._inductor.runtime.compile_tasks` gives them (2.11 to 2.15).
    """
    global _shown
    _shown = True
    for name, device in _names():
        own = getattr(guards, name)
        if not isinstance(own, _Shown):
            _replace(name, own, _Dispatched(own, shown, device) if device else _Checked(own, shown))


def hide_allocations() -> None:
    """Have it allocate as it did."""
    global _shown
    if not _shown:
        return
    _shown = False
    for name, _ in _names():
        seen = getattr(guards, name)
        if isinstance(seen, _Shown):
            _replace(name, seen, seen.own)


class _Shown:
    """In the place of a function that generated code calls past the dispatcher."""

    def __init__(self, own: Callable[..., Any], shown: Callable[[], bool]) -> None:
        self.own, self.shown = own, shown


class _Dispatched(_Shown):
    """In the place of one that allocates."""

    def __init__(self, own: Callable[..., torch.Tensor], shown: Callable[[], bool], device: str) -> None:
        super().__init__(own, shown)
        self._dispatched = partial(torch.empty_strided, device=device)

    def __call__(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return self._dispatched(size, stride, dtype=dtype) if self.shown() else self.own(size, stride, dtype)


class _Checked(_Shown):
    """In the place of one that checks the layout of a tensor, or from torch 2.15 on of several."""

    def __call__(self, tensors: torch.Tensor | Sequence[torch.Tensor], *layout: Any) -> None:
        if self.shown():
            for t in [tensors] if isinstance(tensors, torch.Tensor) else tensors:
                t.detach()
        self.own(tensors, *layout)


def _names() -> Iterator[tuple[str, str]]:
    """The names of the functions, each with the device on which it allocates; "" for one that checks layouts."""
    names = {"assert_size_stride": "", "assert_size_stride_grouped": ""}
    names |= {f"_empty_strided_{device}": device for device in _DEVICES}
    return ((name, device) for name, device in names.items() if hasattr(guards, name))


def _replace(name: str, old: Any, new: Any) -> None:
    setattr(guards, name, new)
    there = name.removeprefix("_")
    for module in _generated():
        if getattr(module, there, None) is old:
            setattr(module, there, new)


def _generated() -> list[ModuleType]:
    return [module for name, module in [*sys.modules.items()] if name.startswith(_GENERATED)]
