"""Tells those who watch a training loop of the steps of optimizers, by torch's hooks."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import nn, optim
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from planner.compat.modules import each_parameter
from planner.compat.pytree import tree_leaves
from planner.compat.tensors import entries_of
from planner.core.call import gradient_of, storages
from planner.requests.optimizers import trained_by, wraps_another


class Listener(Protocol):
    """Who is told."""

    def optimizer_steps(self, optimizer: optim.Optimizer) -> None:
        """An optimizer is about to step."""

    def optimizer_stepped(self, optimizer: optim.Optimizer) -> None:
        """An optimizer has stepped."""


_listeners: weakref.WeakSet[Listener] = weakref.WeakSet()
_handles: list[Any] = []
_stepping: list[weakref.ref[optim.Optimizer]] = []


class ModelsOptimizers:
    """The optimizers that step parameters of a model, as far as they were seen to.

    Args:
        model: which.

    Attributes:
        entries: of the gradients that were sparse when they stepped, by the parameters' names; the most.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._stepped: list[weakref.ref[optim.Optimizer]] = []
        self._seen: weakref.WeakSet[optim.Optimizer] = weakref.WeakSet()  # of all models
        self._kept: dict[int, int] = {}  # the tensors and numbers in the state of each, by identity
        self.entries: dict[str, int] = {}

    def all(self) -> list[optim.Optimizer]:
        """Those that have stepped, and still exist."""
        return [optimizer for ref in self._stepped if (optimizer := ref()) is not None]

    def late_state(self, counted: int) -> int:
        """Bytes of their states beyond those that plans count, as of slow weights that come with every tenth step; 0
        where nothing has come to a state since this was last asked, and where one is new. O(parameters).
        """
        states = {id(optimizer): [*optimizer.state.values()] for optimizer in self.all()}
        before, self._kept = self._kept, {at: sum(map(len, state)) for at, state in states.items()}
        if self._kept == before or not self._kept.keys() <= before.keys() or (model := self._model()) is None:
            return 0
        device = next(model.parameters()).device
        there = [t for t in tree_leaves([*states.values()]) if isinstance(t, torch.Tensor) and t.device == device]
        return max(0, sum(storages(there).values()) - counted)

    @property
    def any_seen(self) -> bool:
        """Whether one has stepped."""
        return bool(self._stepped)

    @property
    def any_at_all(self) -> bool:
        """Whether one has stepped, of whatever model."""
        return bool(self._seen)

    def knows(self, optimizer: optim.Optimizer) -> bool:
        """Whether it was seen to step, whatever it trains."""
        return optimizer in self._seen

    def step_now(self) -> bool:
        """Whether one is in its step."""
        return any(map(self.has, stepping()))

    def has(self, optimizer: optim.Optimizer) -> bool:
        """Whether it is one of these, or will be."""
        if (model := self._model()) is None:
            return False
        return optimizer in self.all() or not trained_by(optimizer).isdisjoint(map(id, model.parameters()))

    def add(self, optimizer: optim.Optimizer) -> Sequence[torch.Tensor]:
        """It has stepped: the parameters of the model that it trains; none where another one inside it steps them."""
        if (model := self._model()) is None:
            return []
        self._seen.add(optimizer)
        own = {id(p): p for p in each_parameter(model)}
        trained = [] if wraps_another(optimizer) else [own[at] for at in trained_by(optimizer) & own.keys()]
        if trained and optimizer not in self.all():
            self._stepped.append(weakref.ref(optimizer))
        if sparse := {id(p): n for p in trained if (n := entries_of(gradient_of(p)))}:
            found = [(name, sparse[id(p)]) for name, p in model.named_parameters() if id(p) in sparse]
            self.entries |= {name: max(n, self.entries.get(name, 0)) for name, n in found}
        return trained


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


@torch.compiler.disable  # type: ignore[untyped-decorator]  # `torch.compile(optimizer.step)` would compile it, too
def _steps(optimizer: optim.Optimizer, *_: Any) -> None:
    _steps_no_more(optimizer)  # a step that has raised left it there
    _stepping.append(weakref.ref(optimizer))
    for listener in list(_listeners):
        listener.optimizer_steps(optimizer)


def _steps_no_more(optimizer: optim.Optimizer) -> None:
    _stepping[:] = [ref for ref in _stepping if ref() not in (None, optimizer)]


@torch.compiler.disable  # type: ignore[untyped-decorator]  # likewise
def _stepped(optimizer: optim.Optimizer, *_: Any) -> None:
    _steps_no_more(optimizer)
    for listener in list(_listeners):
        listener.optimizer_stepped(optimizer)
