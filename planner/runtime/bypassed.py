"""Warns where a loop trains a planned model without calling it, or any more: by other methods, or modules inside it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection
from typing import Any, Protocol

import torch
from torch import nn, optim
from torch.optim.optimizer import register_optimizer_step_pre_hook

from planner.compat.dynamo import call_past_wrappers
from planner.compat.tensors import version_of
from planner.errors import warn
from planner.requests.optimizers import trained_by
from planner.runtime.entries import callable_modules, outermost


class Handle(Protocol):
    """What ends the watch."""

    def remove(self) -> None: ...


def watch(model: nn.Module, planned: Callable[[], bool]) -> Handle:
    """Warn, once, at the step of an optimizer for which gradients came to a model; until `remove()`.

    Args:
        model: its call is planned, and has not run yet; it is held weakly.
        planned: whether the calls that the loop made are planned for instead.
    """
    there = {id(p): (id(p.grad), version_of(p.grad)) for p in model.parameters() if p.grad is not None}
    watched: list[weakref.ref[nn.Module]] = [weakref.ref(model)]

    def stepping(optimizer: optim.Optimizer, *_: Any) -> None:
        trains = watched[0]() if watched else None
        if trains is None or planned():
            return
        stepped = trained_by(optimizer)
        trained = {
            name
            for name, p in trains.named_parameters()
            if id(p) in stepped and p.grad is not None and there.get(id(p)) != (id(p.grad), version_of(p.grad))
        }
        if trained:
            watched.clear()  # the hooks are being called: none can be removed now
            if call_past_wrappers(trains):
                warn(
                    f"torch.compile() was called on this {type(trains).__name__} after apply(), and its first step ran "
                    "without the plan. From now on it runs by it: compile a model before apply(), or not at all"
                )
            else:
                _warn(trains, trained, "since apply()")

    handle: Handle = register_optimizer_step_pre_hook(stepping)
    weakref.finalize(model, handle.remove).atexit = False
    return handle


class Bypassed:
    """Warns, once, where a loop that has called a planned model goes on to train it without calling it.

    That is at the second step in turn of an optimizer for which gradients were made, with no call before: the first one
    may be of a second optimizer, for the same backward pass.

    Args:
        model: the planned one; it is held weakly.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model: weakref.ref[nn.Module] | None = weakref.ref(model)
        self._called = False  # since an optimizer has stepped the model
        self._before: dict[int, weakref.ref[torch.Tensor]] = {}  # the gradients at steps without a call
        self._steps: weakref.WeakKeyDictionary[optim.Optimizer, bool] = weakref.WeakKeyDictionary()
        self._handle: Handle | None = None

    def called(self) -> None:
        """The model is called; where gradients are off, that trains nothing. O(1)."""
        if not torch.is_grad_enabled():
            return
        self._called = True
        if self._handle is None:
            see = weakref.WeakMethod(self._stepping)

            def stepping(optimizer: optim.Optimizer, *_: Any) -> None:
                if (own := see()) is not None:
                    own(optimizer)

            self._handle = register_optimizer_step_pre_hook(stepping)
            weakref.finalize(self, self._handle.remove)

    def end(self) -> None:
        """The plan is taken off."""
        if self._handle is not None:
            self._handle.remove()
        self._model = None

    def _stepping(self, optimizer: optim.Optimizer) -> None:
        model = None if self._model is None else self._model()
        if model is None:
            return
        if optimizer not in self._steps:
            self._steps[optimizer] = not trained_by(optimizer).isdisjoint(map(id, model.parameters()))
        if not self._steps[optimizer]:
            return
        if self._called:
            self._called, self._before = False, {}
            return
        stepped, before = trained_by(optimizer), self._before
        graded = [(name, id(p), p.grad) for name, p in model.named_parameters() if id(p) in stepped]
        made = [name for name, at, g in graded if g is not None and at in before and before[at]() is not g]
        self._before = before | {at: weakref.ref(g) for _, at, g in graded if g is not None}
        if made:
            self._model = None  # the hooks are being called: none can be removed now
            _warn(model, made, "in its latest steps")


def _warn(model: nn.Module, trained: Collection[str], when: str) -> None:
    paths = [entry.path for entry in outermost(callable_modules(model))]
    own = [path for path in paths if any(parameter.startswith(f"{path}.") for parameter in trained)]
    calls = ", ".join(f"plan(model.{path}, ...)" for path in own[:3])
    parts = f", or plan the modules that it calls, such as {calls}, each within a share of the budget" if calls else ""
    warn(
        f"{type(model).__name__} trains without its plan: an optimizer steps it, and it was not called {when}. "
        "A plan runs where the model is called, as model(batch): not in its other methods, in model.forward(batch), "
        f"or where a loop calls the modules in it. Let forward() do what the loop does{parts}"
    )
