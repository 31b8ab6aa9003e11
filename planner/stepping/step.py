"""Steps a parameter by its optimizer, alone, from within the backward pass of a planned graph."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

import torch
from torch import nn, optim
from torch.fx.node import has_side_effect
from torch.utils.weak import WeakTensorKeyDictionary

from planner.compat.autograd import (
    graph_is_kept,
    hooks_of,
    is_backward_call,
    post_accumulate_hooks,
    running_node,
    running_pass,
)
from planner.compat.fake import FakeTensor
from planner.errors import ApplyError
from planner.parallel.group import world_size
from planner.stepping.spent import SpentGradient, is_clear, spent

# each makes nothing of a parameter's gradient but that parameter's own step
ONE_BY_ONE = frozenset(
    kind
    for kind in vars(optim).values()
    if isinstance(kind, type)
    and issubclass(kind, optim.Optimizer)
    and kind not in (optim.Optimizer, optim.LBFGS, optim.SparseAdam)
)
_STEPPED: Any = WeakTensorKeyDictionary()  # parameter -> its Stepping


@has_side_effect
def step_now(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    """Step one parameter by its whole gradient, which nothing else reads any more; of fake tensors, nothing.

    Raises:
        ApplyError: the loop does what does not go with it. Where a backward pass was not to be stepped at all, it is
            raised before any parameter is.
    """
    if isinstance(parameter, FakeTensor):
        return
    stepping = _STEPPED.get(parameter)
    if stepping is None:
        raise ApplyError(
            "a parameter that is to be stepped in the backward pass is not in the model that the plan is on (a copy, "
            "or a parameter that came later): plan that model with its own optimizer"
        )
    stepping.step(parameter, gradient)


def step_of(kind: type[optim.Optimizer]) -> Callable[[optim.Optimizer], Any]:
    """The step of a class of optimizers, without the hooks that torch wraps around it, of which some are global."""
    step: Any = kind.step
    stripped: Callable[[optim.Optimizer], Any] = step.__wrapped__ if hasattr(step, "hooked") else step
    return stripped


def has_gradient_hooks(parameter: torch.Tensor) -> bool:
    """Whether hooks see a parameter's gradient."""
    return bool(hooks_of(parameter) or post_accumulate_hooks(parameter))


class Stepping:
    """The parameters of one model, stepped by one optimizer while a plan is on the model.

    Args:
        model: whose parameters.
        optimizer: has all of them that need gradients, and their state; it is not kept alive.
        waiting: a method: autograd's node -> how many calls of the model beside its own wait for their backward pass;
            what it is of is not kept alive.
    """

    def __init__(self, model: nn.Module, optimizer: optim.Optimizer, waiting: Callable[[Any], int]) -> None:
        self._model, self._optimizer = weakref.ref(model), weakref.ref(optimizer)
        self._waiting = weakref.WeakMethod(waiting)
        self._pass = -1  # the number of the latest backward pass
        self._group_of: dict[int, int] = {}  # id of a parameter -> number of its group, which would keep it alive
        self._settings: list[dict[str, Any]] = []  # of each group, in the latest backward pass
        for p in model.parameters():
            if p.requires_grad:
                _STEPPED[p] = self
        self._handle = optimizer.register_step_pre_hook(self._loop_steps)

    def end(self) -> None:
        """The optimizer steps as usual from now on."""
        self._handle.remove()
        model = self._model()
        for p in model.parameters() if model is not None else ():
            if _STEPPED.get(p) is self:
                del _STEPPED[p]
            if isinstance(p.grad, SpentGradient):
                p.grad = None

    def step(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        """Step one of the parameters; raises ApplyError as `step_now` does."""
        optimizer = self._optimizer()
        if optimizer is None:
            raise ApplyError("the optimizer that steps in the backward pass is gone: keep it while the plan is on")
        if running_pass() != self._pass:
            self._begin(optimizer)
            self._pass = running_pass()
        at = self._group_of.get(id(parameter))
        if at is None or not is_clear(parameter.grad):
            what = "is not in the optimizer any more" if at is None else "gets a gradient from elsewhere, too"
            raise ApplyError(
                f"a parameter of shape {tuple(parameter.shape)} {what}, so that it cannot be stepped in the backward "
                "pass. Others are stepped already. Plan with step_in_backward=False"
            )
        with _alone(optimizer, optimizer.param_groups[at], parameter):
            parameter.grad = gradient
            step_of(type(optimizer))(optimizer)
        parameter.grad = spent(parameter)

    def _begin(self, optimizer: optim.Optimizer) -> None:
        """A backward pass has come to its first step; raises ApplyError where it must not step."""
        model = self._model()
        trained = [p for p in model.parameters() if p.requires_grad] if model is not None else []
        if wrong := self._wrong(trained):
            raise ApplyError(
                f"step_in_backward=True: {wrong}. No parameter was stepped in this backward pass. Change that, or "
                "plan with step_in_backward=False; the next step trains by the plan after zero_grad()"
            )
        self._group_of = {id(p): at for at, group in enumerate(optimizer.param_groups) for p in group["params"]}
        self._settings = [_settings(group) for group in optimizer.param_groups]

    def _loop_steps(self, optimizer: optim.Optimizer, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """The loop calls `optimizer.step()`: parameters that were stepped have no gradient any more."""
        if any(closure is not None for closure in (*args[1:], *kwargs.values())):
            raise ApplyError(
                "optimizer.step(closure) runs a backward pass inside the step, and with step_in_backward=True the step "
                "is inside the backward pass: call loss.backward(), then optimizer.step() without a closure"
            )
        for group, used in zip_longest(optimizer.param_groups, self._settings[: len(optimizer.param_groups)]):
            now = _settings(group)
            for p in group["params"]:
                if not isinstance(p.grad, SpentGradient):
                    continue
                if changed := [f"{key}={x!r}" for key, x in now.items() if used is not None and used.get(key) != x]:
                    raise ApplyError(
                        f"{', '.join(changed)} was set between loss.backward(), in which step_in_backward=True has "
                        "stepped the parameters by what was set before, and optimizer.step(): set it before "
                        "loss.backward(), and call a scheduler's step() after optimizer.step()"
                    )
                p.grad = None

    def _wrong(self, trained: list[nn.Parameter]) -> str:
        """What is wrong with stepping in this backward pass, in words; empty for nothing."""
        if not all(is_clear(p.grad) for p in trained):
            return (
                "gradients are there that neither optimizer.step() nor zero_grad() has cleared, and a gradient that is "
                "used at once cannot be added to others (gradient accumulation)"
            )
        waiting = self._waiting()
        if waiting is not None and waiting(running_node()):
            return (
                "another call of the model waits for its backward pass, and a step changes the weights that it was "
                "computed with (call the model under no_grad() where no gradient is taken)"
            )
        if graph_is_kept():
            return "the backward pass keeps its graph (retain_graph=True), whose weights are changed as it runs"
        if not is_backward_call(running_node()):
            return "torch.autograd.grad, or backward(inputs=...), asks for some gradients and not for a step"
        if any(map(has_gradient_hooks, trained)):
            return "a parameter has a hook on its gradient, which would not run"
        return f"{world_size()} processes train, each by gradients of its own" if world_size() > 1 else ""


@contextmanager
def _alone(optimizer: optim.Optimizer, group: Mapping[str, Any], parameter: torch.Tensor) -> Iterator[None]:
    """An optimizer with one parameter, which has no gradient afterwards; no gradients of it, and no autocast."""
    groups, kind = optimizer.param_groups, parameter.device.type
    optimizer.param_groups = [{**group, "params": [parameter]}]
    try:
        with torch.no_grad(), torch.autocast(kind, enabled=False):
            yield
    finally:
        optimizer.param_groups = groups
        parameter.grad = None


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Learning rate, weight decay and the like of a group of parameters, as they are now."""
    return {key: x.item() if isinstance(x, torch.Tensor) else x for key, x in group.items() if key != "params"}
