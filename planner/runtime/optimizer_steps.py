"""Tells those who watch a training loop of the steps of optimizers, by torch's hooks."""

from __future__ import annotations

import weakref
from typing import Any, Protocol

from torch import optim
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook


class Listener(Protocol):
    """Who is told."""

    def optimizer_steps(self, optimizer: optim.Optimizer) -> None:
        """An optimizer is about to step."""

    def optimizer_stepped(self, optimizer: optim.Optimizer) -> None:
        """An optimizer has stepped."""


_listeners: weakref.WeakSet[Listener] = weakref.WeakSet()
_handles: list[Any] = []
_stepping: list[weakref.ref[optim.Optimizer]] = []


def listen() -> None:
    """See optimizers step from now on."""
    if not _handles:
        _handles.append(register_optimizer_step_pre_hook(_steps))
        _handles.append(register_optimizer_step_post_hook(_stepped))


def tell(listener: Listener) -> None:
    """Tell a listener, who is held weakly, of all steps from now on."""
    _listeners.add(listener)


def stepping() -> list[optim.Optimizer]:
    """The optimizers that step now."""
    return [optimizer for ref in _stepping if (optimizer := ref()) is not None]


def _steps(optimizer: optim.Optimizer, *_: Any) -> None:
    _steps_no_more(optimizer)  # a step that has raised left it there
    _stepping.append(weakref.ref(optimizer))
    for listener in list(_listeners):
        listener.optimizer_steps(optimizer)


def _steps_no_more(optimizer: optim.Optimizer) -> None:
    _stepping[:] = [ref for ref in _stepping if ref() not in (None, optimizer)]


def _stepped(optimizer: optim.Optimizer, *_: Any) -> None:
    _steps_no_more(optimizer)
    for listener in list(_listeners):
        listener.optimizer_stepped(optimizer)
