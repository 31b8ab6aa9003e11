"""Fake tensors that can say which ops ran on them, by whom they were called, and for which autograd node."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from planner.capture.provenance import running_module, user_place
from planner.compat.capture import FakeTensorMode, TracingContext


@dataclass(frozen=True, slots=True)
class EagerCall:
    """One op that ran outside every compiled graph, the autograd node that called it, the user's line and module."""

    target: torch._ops.OpOverload
    args: Any
    kwargs: Mapping[str, Any]
    result: Any
    node: int
    stack_trace: str
    module: str


class Recording:
    """Has a fake mode say which ops are called on its tensors.

    Attributes:
        mode: the fake mode.
        paths: those of the model's modules, by their identities.
        calls: what was recorded.
        node: number of the autograd node that runs now; 0 for none.
    """

    def __init__(self, mode: FakeTensorMode, paths: Mapping[int, str]) -> None:
        self.mode = mode
        self.paths = paths
        self.calls: list[EagerCall] = []
        self.node = 0
        self._pauses = 1
        self._dispatch = mode.dispatch
        # not by a subclass: higher-order operators look for what to do under FakeTensorMode itself
        mode.dispatch = self.dispatch  # type: ignore[method-assign]

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an op on fake tensors."""
        self.pause()
        try:
            result = self._dispatch(func, types, args, kwargs or {})
        finally:
            self.resume()
        if not self._pauses and TracingContext.try_get() is None:
            frame = sys._getframe()
            path, line = user_place(frame)
            trace = f'File "{path}", line {line}, in ?\n    {linecache.getline(path, line).strip()}'
            module = running_module(frame, self.paths)
            self.calls.append(EagerCall(func, args, dict(kwargs or {}), result, self.node, trace, module))
        return result

    def pause(self) -> None:
        """Record nothing until `resume()`; pauses nest, and the mode begins with one."""
        self._pauses += 1

    def resume(self) -> None:
        """Undo one `pause()`."""
        self._pauses -= 1

    def taken(self) -> tuple[EagerCall, ...]:
        """What was recorded since this was last called."""
        taken = tuple(self.calls)
        self.calls.clear()
        return taken
