"""Records the ops on fake tensors outside compiled graphs, with the module, line and autograd node that called each."""

from __future__ import annotations

import inspect
import linecache
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from planner.capture.provenance import running_module, user_place
from planner.compat import pytree
from planner.compat.dynamo import is_tracing
from planner.compat.fake import FakeTensorMode, replace_dispatch
from planner.compat.ops import OpOverload


@dataclass(frozen=True, slots=True)
class EagerCall:
    """One op that ran outside every compiled graph, the autograd node that called it, the user's line and module."""

    target: OpOverload
    args: Any
    kwargs: Mapping[str, Any]
    result: Any
    node: int
    stack_trace: str
    module: str


class Recording:
    """Records the ops that are called on the tensors of a fake mode.

    Attributes:
        mode: the fake mode.
        paths: those of the model's modules, by their identities.
        calls: the ops recorded since `taken()`.
        node: number of the autograd node that runs now; 0 for none.
    """

    def __init__(self, mode: FakeTensorMode, paths: Mapping[int, str]) -> None:
        self.mode = mode
        self.paths = paths
        self.calls: list[EagerCall] = []
        self.node = 0
        self._pauses = 1
        self._dispatch = replace_dispatch(mode, self.dispatch)

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an op on fake tensors."""
        self.pause()
        try:
            result = self._dispatch(func, types, args, kwargs or {})
        finally:
            self.resume()
        if not self._pauses and not is_tracing():
            frame = inspect.currentframe()
            path, line = user_place(frame)
            trace = f'File "{path}", line {line}, in ?\n    {linecache.getline(path, line).strip()}'
            module = running_module(frame, self.paths)
            # a graph that only stands for these ops has no way to write a generator
            own, named = pytree.tree_map_only(torch.Generator, lambda g: None, (args, dict(kwargs or {})))
            self.calls.append(EagerCall(func, own, named, result, self.node, trace, module))
        return result

    def pause(self) -> None:
        """Record nothing until `resume()`; pauses nest, and the mode begins with one."""
        self._pauses += 1

    def resume(self) -> None:
        """Undo one `pause()`."""
        self._pauses -= 1

    def taken(self) -> tuple[EagerCall, ...]:
        """The ops recorded since this was last called."""
        taken = tuple(self.calls)
        self.calls.clear()
        return taken
