"""Modules: their calls, hooks and tables of tensors. Torch 2.11 to 2.15."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase as NormBase
from torch.nn.modules.module import (
    _global_backward_hooks,
    _global_backward_pre_hooks,
    _global_forward_hooks,
    _global_forward_pre_hooks,
)

__all__ = [
    "GLOBAL_HOOKS",
    "TABLES",
    "NormBase",
    "buffers_of",
    "call_function",
    "call_of",
    "has_forward_hooks",
    "hook_tables",
    "managed_by_fsdp",
    "modules_in",
    "own_calls",
    "parameters_in",
    "parameters_of",
    "replace_call",
    "replace_conversions",
    "replaced_call",
    "replaced_calls",
    "tables_of",
    "unsaved_buffers",
    "with_call",
]

# hooks on every module (torch 2.11 to 2.15)
GLOBAL_HOOKS = (_global_forward_pre_hooks, _global_forward_hooks, _global_backward_pre_hooks, _global_backward_hooks)
_HOOKS = (
    "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs", "_backward_hooks", "_backward_pre_hooks",
)  # fmt: skip
TABLES = ("_modules", "_parameters", *_HOOKS)  # of a module: of its modules, of its parameters, and of hooks
_REPLACED = "_compiled_call_impl"
_replaced, _hooks_of = attrgetter(_REPLACED), attrgetter(*_HOOKS)
_modules_of, _parameters_of = attrgetter("_modules"), attrgetter("_parameters")


def modules_in(model: nn.Module) -> list[nn.Module]:
    """The modules of a model, as `Module.modules` gives them, in a fourth of its time (`_modules`, 2.11 to 2.15)."""
    seen: dict[nn.Module, None] = {}
    ahead: list[nn.Module | None] = [model]
    while ahead:
        module = ahead.pop()
        if module is not None and module not in seen:
            seen[module] = None
            if children := module._modules:
                ahead.extend(reversed(children.values()))
    return list(seen)


def each_parameter(model: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters of a model, one by one, some more than once: the first comes sooner than of `Module.parameters`.

    Reads `_modules` and `_parameters` (torch 2.11 to 2.15).
    """
    seen: set[nn.Module] = set()
    ahead: list[nn.Module | None] = [model]
    while ahead:
        module = ahead.pop()
        if module is not None and module not in seen:
            seen.add(module)
            yield from (p for p in module._parameters.values() if p is not None)
            ahead.extend(reversed(module._modules.values()))


def parameters_in(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    """The own parameters of some modules, each once, in their order (`_parameters`, torch 2.11 to 2.15)."""
    return list({id(p): p for module in modules for p in module._parameters.values() if p is not None}.values())


def tables_of(modules: Sequence[nn.Module]) -> list[dict[str, Any]]:
    """The modules' tables of modules, and then of parameters (`_modules`, `_parameters`, torch 2.11 to 2.15)."""
    return [*map(_modules_of, modules), *map(_parameters_of, modules)]


def call_of(module: nn.Module) -> Callable[..., Any]:
    """A module's call with its hooks, whatever was put in its place (`Module._call_impl`, torch 2.11 to 2.15)."""
    call: Callable[..., Any] = module._call_impl
    return call


def call_function(module: nn.Module) -> Callable[..., Any]:
    """The function of a module's call with its hooks, which is given the module (`Module._call_impl`, 2.11 to 2.15)."""
    call: Callable[..., Any] = type(module)._call_impl
    return call


def with_call(module: nn.Module, call: Callable[..., Any]) -> nn.Module:
    """A module that shares its parts with another one, and is called otherwise (`Module._call_impl`, 2.11 to 2.15)."""
    made, kind = copy.copy(module), type(module)
    made.__class__ = type(kind.__name__, (kind,), {"_call_impl": call, "__module__": kind.__module__})
    return made


def replaced_call(module: nn.Module) -> Any:
    """The callable in the place of a module's call, as `Module.compile()` puts one there, or None (2.11 to 2.15)."""
    return getattr(module, _REPLACED, None)


def replaced_calls(modules: Sequence[nn.Module]) -> list[Any]:
    """`replaced_call` of each module."""
    return list(map(_replaced, modules))


def replace_call(module: nn.Module, call: Callable[..., Any] | None) -> None:
    """Put a callable in the place of a module's call; None for its own call (`_compiled_call_impl`, 2.11 to 2.15).

    Copies and pickles of the module have their own call: `Module.__getstate__` leaves it out.
    """
    if call is None:
        vars(module).pop(_REPLACED, None)
    else:
        vars(module)[_REPLACED] = call


@contextmanager
def own_calls(model: nn.Module) -> Iterator[None]:
    """A while in which a model and its parts have their own calls, whatever `Module.compile()` put in place."""
    replaced = [(module, call) for module in modules_in(model) if (call := replaced_call(module)) is not None]
    for module, _ in replaced:
        replace_call(module, None)
    try:
        yield
    finally:
        for module, call in replaced:
            replace_call(module, call)


def replace_conversions() -> Callable[[], None]:
    """Have `Module.to` leave alone what it does not convert, in all threads; returns what undoes it.

    It exchanges fake parameters even for themselves, which fails where anything else refers to them (`Module._apply`,
    torch 2.11 to 2.15).
    """
    own = nn.Module._apply

    def apply(self: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        if not torch.compiler.is_compiling():
            with torch.no_grad():
                if all(fn(t) is t for t in (*self.parameters(recurse), *self.buffers(recurse))):
                    return self
        converted: nn.Module = own(self, fn, recurse)  # type: ignore[no-untyped-call]
        return converted

    def undo() -> None:
        nn.Module._apply = own  # type: ignore[method-assign]

    nn.Module._apply = apply  # type: ignore[method-assign]
    return undo


def has_forward_hooks(module: nn.Module) -> bool:
    """Whether hooks run before or after a module's `forward` (`Module._forward_hooks`, torch 2.11 to 2.15)."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def hook_tables(module: nn.Module) -> tuple[dict[int, Any], ...]:
    """A module's own tables of hooks that its call runs (torch 2.11 to 2.15)."""
    return _hooks_of(module)


def buffers_of(module: nn.Module) -> dict[str, Any]:
    """A module's own table of buffers, to be read and written, None for one that is not set (2.11 to 2.15)."""
    return module._buffers


def parameters_of(module: nn.Module) -> dict[str, Any]:
    """A module's own table of parameters, to be read and written, None for one that is not set (2.11 to 2.15)."""
    return module._parameters


def unsaved_buffers(module: nn.Module) -> set[str]:
    """The names of buffers that are left out of a module's `state_dict` (`persistent=False`; torch 2.11 to 2.15)."""
    return module._non_persistent_buffers_set


def managed_by_fsdp(module: nn.Module) -> bool:
    """Whether `fully_shard` or FullyShardedDataParallel manages a module (torch 2.11 to 2.15)."""
    return hasattr(module, "_is_fsdp_managed_module")
