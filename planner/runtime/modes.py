"""What the state of a model and of torch means for a planned call, where no signature and no guard tells."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from planner.compat.autograd import holds_saved, in_backward, is_custom, is_jit_tracing, is_transformed
from planner.compat.dispatch import LastingMode, modes_here
from planner.compat.dynamo import compiled_call
from planner.compat.modules import GLOBAL_HOOKS, each_parameter, modules_in, replaced_call, replaced_calls
from planner.core.call import tensors_in
from planner.errors import ApplyError
from planner.runtime.entries import LIGHTNING, EntryPoint


def trains(model: nn.Module, args: Any, kwargs: Any) -> bool:
    """Whether a call holds anything for a backward pass: gradients are on, and something needs one."""
    if not torch.is_grad_enabled() or is_jit_tracing() or torch.compiler.is_exporting():
        return False
    return any(p.requires_grad for p in each_parameter(model)) or any(
        t.requires_grad for t in tensors_in((args, kwargs))
    )


def redirected(model: nn.Module) -> bool:
    """Whether Lightning has put another method in the place of `forward`, to call it through what DDP wraps around."""
    forward = vars(model).get("forward")
    of = str(getattr(forward, "__module__", "")).partition(".")[0]
    return getattr(forward, "__name__", "") == "wrapped_forward" and of in LIGHTNING


def unguarded(classes: Iterable[type[nn.Module]]) -> tuple[object, ...]:
    """What torch.compile writes into a graph and does not look at again: hooks on every module, classes' `forward`."""
    return (*map(tuple, GLOBAL_HOOKS), *(c.forward for c in classes))


def refuse_transformed(model: nn.Module, parameters: Iterable[torch.Tensor], args: Any, kwargs: Any) -> None:
    """Raise ApplyError where torch.func or forward-mode AD goes through a call, whose graphs are for backward passes.

    Args:
        model: whose call it is.
        parameters: those of the model.
        args: positional arguments of the call.
        kwargs: its keyword arguments.
    """
    if what := is_transformed(t for tree in (list(parameters), args, kwargs) for t in tensors_in(tree)):
        name = type(model).__name__
        raise ApplyError(
            f"{name} was called inside {what}, and its plan is for loss.backward(). Call it under torch.no_grad() "
            "where no gradient is taken, or remove() the plan around the call and apply() it again. The next step "
            "trains by the plan as before"
        )


def refuse_compiled(model: nn.Module, own: Any, modules: Sequence[nn.Module] | None = None) -> None:
    """Raise ApplyError where a model, or a module in it, has a call of its own (`compile()`, a plan) beside `own`.

    `modules` are those of the model, where the caller has them.
    """
    first, *others = replaced_calls(modules_in(model) if modules is None else modules)
    if first is not own and not isinstance(first, EntryPoint):
        raise ApplyError(f"this {type(model).__name__} is already compiled with model.compile(); plan it uncompiled")
    if others.count(None) == len(others):
        return
    called = ((name, replaced_call(module)) for name, module in model.named_modules() if name)
    name = next((name for name, call in called if call is not None and not isinstance(call, EntryPoint)), "")
    if not name:
        return
    part = f"{name} of this {type(model).__name__}"
    if compiled_call(model.get_submodule(name)) is not None:
        raise ApplyError(
            f"{part} is compiled by its compile(): leave that out, and give plan() what torch.compile(model) returns, "
            "which plans the kernels of all of it; or plan only the parts"
        )
    raise ApplyError(
        f"{part} runs under a plan of its own; one plan serves the whole: remove() the plan of {name}, or plan only "
        "the parts"
    )


def backward_node(results: Iterable[Any]) -> weakref.ref[Any] | None:
    """The autograd node of a compiled region, from what the region returned; held weakly."""
    for t in results:
        node = t.grad_fn if isinstance(t, torch.Tensor) else None
        while node is not None and not is_custom(node):  # a view on top of it
            node = node.next_functions[0][0] if node.next_functions else None
        if node is not None:
            return weakref.ref(node)
    return None


def waits(node: weakref.ref[Any]) -> bool:
    """Whether a region's activations are still held for a backward pass."""
    alive = node()
    return alive is not None and holds_saved(alive)


def may_record() -> bool:
    """Whether a mode may stay on: where neither a mode of the loop's own nor a backward pass would end in its place."""
    return all(isinstance(mode, LastingMode) for mode in modes_here()) and not in_backward()
