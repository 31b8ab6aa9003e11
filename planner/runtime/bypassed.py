"""Warns where a loop trains a planned model without calling it: by other methods, or by modules inside it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection
from typing import Any, Protocol

from torch import nn, optim
from torch.optim.optimizer import register_optimizer_step_pre_hook

from planner.compat.dynamo import call_past_wrappers
from planner.compat.tensors import version_of
from planner.errors import warn
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
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
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
                _warn(trains, trained)

    handle: Handle = register_optimizer_step_pre_hook(stepping)
    return handle


def _warn(model: nn.Module, trained: Collection[str]) -> None:
    paths = [entry.path for entry in outermost(callable_modules(model))]
    own = [path for path in paths if any(parameter.startswith(f"{path}.") for parameter in trained)]
    calls = ", ".join(f"plan(model.{path}, ...)" for path in own[:3])
    parts = f", or plan the modules that it calls, such as {calls}, each within a share of the budget" if calls else ""
    warn(
        f"{type(model).__name__} trains without its plan: an optimizer steps it, and it was not called since apply(). "
        "A plan runs where the model is called, as model(batch): not in its other methods, in model.forward(batch), "
        f"or where a loop calls the modules in it. Let forward() do what the loop does{parts}"
    )
