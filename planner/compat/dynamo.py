"""torch.compile: settings, compiled calls, and the compiler's own state. Torch 2.11 to 2.15."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
import torch._dynamo.config as dynamo_config
import torch._functorch.config as functorch_config
from torch import nn
from torch._C._dynamo.eval_frame import reset_code
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.eval_frame import OptimizeContext, OptimizedModule, cached_backends, innermost_backend
from torch._dynamo.exc import Unsupported
from torch._dynamo.external_utils import wrap_inline
from torch._guards import TracingContext

from planner.compat.frames import with_room
from planner.compat.interrupts import interrupted_between_ops
from planner.compat.modules import call_of

__all__ = [
    "Compiled",
    "Unsupported",
    "aot_autograd",
    "call_past_wrappers",
    "compile_call",
    "compile_wrapped",
    "compiled_by",
    "compiled_call",
    "dynamo_config",
    "forget_compiled",
    "forward_compiled_by",
    "functorch_config",
    "guarded_by_aot",
    "inner_module",
    "is_tracing",
    "own_frame",
    "through",
    "wrappers_of",
]


def compile_call(
    model: nn.Module,
    backend: Callable[..., Any],
    settings: Callable[[], AbstractContextManager[object]] = nullcontext,
    *,
    whole: bool = False,
    function: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """A module's call with its hooks (`Module._call_impl`), compiled with static shapes (torch 2.11 to 2.15).

    Args:
        model: whose call it is.
        backend: as for `torch.compile`.
        settings: gives a context in which frames are compiled, and no graph runs.
        whole: whether to raise what breaks the graph, as `torch.compile(fullgraph=True)` does.
        function: what is called with the module in the place of its call, such as a method of its class.
    """
    call = own_frame(model, function or type(model)._call_impl)
    optimize = torch._dynamo.optimize(
        backend, dynamic=False, nopython=whole
    )  # torch.compile without a name for the backend
    if isinstance(optimize, OptimizeContext):  # it is another object where torch.compile is disabled
        compile_frame: Any = optimize.callback

        @with_room
        def compile_under_settings(*frame: Any) -> Any:
            with interrupted_between_ops(), settings():
                return compile_frame(*frame)

        compile_under_settings._torchdynamo_orig_backend = compile_frame  # type: ignore[attr-defined]
        optimize.callback = compile_under_settings  # type: ignore[assignment]
    compiled: Callable[..., Any] = optimize(call)
    cached_backends.pop(id(backend), None)  # kept for torch._dynamo.reset(), which has nothing to do for ours
    return compiled


@torch.compiler.disable  # type: ignore[untyped-decorator]  # it would look at each finalizer of the process
def own_frame(module: nn.Module, function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls another one with a module, in a frame whose code no other call has (torch 2.11 to 2.15).

    Dynamo keeps what it compiled as long as the code object that it belongs to. With a code object of its own, guards
    of other calls are not in its way, and all that was compiled goes with it. A frame of ours on top also lets Dynamo
    see modules that are torch's own (nn.Sequential).
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(module, *args, **kwargs)

    call.__code__ = call.__code__.replace(co_varnames=call.__code__.co_varnames)
    weakref.finalize(call, reset_code, call.__code__)  # the code is held by what was compiled for it
    return call


def forget_compiled(compiled: Any) -> None:
    """Drop what Dynamo compiled for a function that torch.compile returned (torch 2.11 to 2.15)."""
    code: CodeType = compiled._torchdynamo_orig_callable.__code__
    reset_code(code)


def is_tracing() -> bool:
    """Whether AOTAutograd traces a graph now, on fake tensors (`TracingContext.try_get`, torch 2.11 to 2.15)."""
    return TracingContext.try_get() is not None


def guarded_by_aot() -> bool:
    """Whether AOTAutograd guards what torch.compile traces now by the storages that inputs share (2.11 to 2.15)."""
    context = TracingContext.try_get()
    return context is None or bool(context.guards_context.aotautograd_guards)


@dataclass(frozen=True)
class Compiled:
    """How a model was compiled: the name of the backend, the settings of Inductor, and what `dynamic` was given."""

    backend: str
    settings: Mapping[str, Any]
    dynamic: bool | None


def compiled_by(module: Any) -> Compiled | None:
    """How a module is compiled, by `torch.compile(module)` or `module.compile()`; None where it is not (2.11 to 2.15).

    Read off `OptimizedModule.dynamo_ctx`, or the closure of `Module._compiled_call_impl`, and the backend inside.
    """
    return _compiled_in(getattr(module, "dynamo_ctx", None) or _context_of(compiled_call(module)))


def forward_compiled_by(module: nn.Module) -> Compiled | None:
    """How the `forward` of a module is compiled, on it or in its class; None where it is not (2.11 to 2.15)."""
    forward = module.__dict__.get("forward", type(module).forward)
    return _compiled_in(_context_of(forward if hasattr(forward, "_torchdynamo_orig_callable") else None))


def _context_of(call: Any) -> Any:
    names = () if call is None else zip(call.__code__.co_freevars, call.__closure__ or (), strict=True)
    return next((cell.cell_contents for name, cell in names if name == "self"), None)


def _compiled_in(context: Any) -> Compiled | None:
    if not callable(getattr(context, "callback", None)):  # `torch.compiler.disable` has none
        return None
    backend: Any = innermost_backend(context.callback)
    name = getattr(backend, "compiler_name", None) or getattr(backend, "__name__", type(backend).__name__)
    return Compiled(str(name), dict(getattr(backend, "config", {})), context._dynamic)


def compiled_call(module: Any) -> Any:
    """What `module.compile()` put in the place of its call; None where something else, or nothing, is there."""
    call = getattr(module, "_compiled_call_impl", None)
    return call if hasattr(call, "_torchdynamo_orig_callable") else None


def inner_module(module: nn.Module) -> nn.Module | None:
    """The module in a wrapper that torch.compile(module) made (`_orig_mod`, 2.11 to 2.15); None for another module."""
    inner = dict(module.named_children()).get("_orig_mod")
    return inner if isinstance(inner, nn.Module) else None


class Through:
    """In the place of the `forward` of what `torch.compile(model)` made: it calls the model, and compiles nothing.

    Attributes:
        model: the model.
        compiled: its call as it would be compiled (`dynamo_ctx`, `wrap_inline`, 2.11 to 2.15).
        backend: that it would be compiled with.
    """

    def __init__(self, wrapper: Any, model: nn.Module) -> None:
        self.model, by = model, compiled_by(wrapper)
        self.compiled: Callable[..., Any] = wrapper.dynamo_ctx(wrap_inline(call_of(model)))
        self.backend = "" if by is None else by.backend

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        token = _THROUGH.set(self)
        try:
            return self.model(*args, **kwargs)
        finally:
            _THROUGH.reset(token)


_THROUGH: ContextVar[Through | None] = ContextVar("through", default=None)


def through(model: nn.Module) -> Through | None:
    """What has called a model that is called now by way of what `torch.compile(model)` made; None for other calls."""
    found = _THROUGH.get()
    return found if found is not None and found.model is model else None


def call_past_wrappers(model: nn.Module) -> list[Through]:
    """Have what `torch.compile(model)` made call the model itself; what does so now."""
    wrappers: list[Any] = wrappers_of(model)
    for wrapper in wrappers:
        if not isinstance(wrapper.forward, Through):
            wrapper.forward = Through(wrapper, model)
    return [wrapper.forward for wrapper in wrappers]


def compile_wrapped(model: nn.Module) -> None:
    """Have what `torch.compile(model)` made be compiled as it was (`OptimizedModule._initialize`, 2.11 to 2.15)."""
    for wrapper in wrappers_of(model):
        wrapper._initialize()


def wrappers_of(model: nn.Module) -> list[OptimizedModule]:
    """What `torch.compile(model)` has made, as far as it is alive (`OptimizedModule`, 2.11 to 2.15). O(all objects)."""
    # torch keeps no list of them; isinstance() would ask objects for their class, and some of them run code for that
    return [x for x in gc.get_objects() if type(x) is OptimizedModule and inner_module(x) is model]
