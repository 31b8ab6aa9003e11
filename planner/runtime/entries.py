"""Where a training loop may go into a model without calling it: its methods, and the modules in it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from planner.compat.modules import call_function, replace_call, replaced_call

LOOPS = {"backward", "manual_backward", "zero_grad"}  # what calls these is a training loop itself
LIGHTNING = ("lightning", "lightning_fabric", "pytorch_lightning")  # its packages
STEPS = {"training_step", "validation_step"}  # and so are these of Lightning, which log as they go


@dataclass(frozen=True, slots=True)
class Entry:
    """A method of a model, or the call of a module in it.

    Attributes:
        path: of the module; "" for the model itself.
        method: its method; "" for its call.
    """

    path: str
    method: str = ""

    def __str__(self) -> str:
        return ".".join(filter(None, (self.path, self.method))) or "the model"

    def of(self, model: nn.Module) -> tuple[nn.Module, Callable[..., Any]]:
        """The module, and the function that is called with it."""
        module = model.get_submodule(self.path)
        return module, getattr(type(module), self.method) if self.method else call_function(module)


class EntryPoint:
    """Stands in for a method, or for a module's call, and has a function decide what becomes of it.

    Args:
        model: whose entry it is.
        entry: which.
        called: is given the entry, and the positional and keyword arguments of its calls.
    """

    def __init__(self, model: nn.Module, entry: Entry, called: Callable[[Entry, Any, Any], Any]) -> None:
        self.model, self.entry, self.called = model, entry, called
        self.module, self.__wrapped__ = entry.of(model)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.called(self.entry, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """In a copy of the model, the copy's own method; of a module's call none is left (`nn.RNNBase` copies it)."""
        if not self.entry.method:
            return None
        return MethodType(self.__wrapped__, memo.get(id(self.model), self.model))

    def __reduce__(self) -> Any:
        """In a pickle, the model's own method; of a module's call none is left."""
        return (getattr, (self.model, self.entry.method)) if self.entry.method else (type(None), ())

    def put(self) -> None:
        """Take the place."""
        if self.entry.method:
            vars(self.model)[self.entry.method] = self
        elif replaced_call(self.module) is None:
            replace_call(self.module, self)

    def leave(self) -> None:
        """Leave it, if it is still taken."""
        if self.entry.method:
            if vars(self.model).get(self.entry.method) is self:
                del vars(self.model)[self.entry.method]
        elif replaced_call(self.module) is self:
            replace_call(self.module, None)


def put_all(points: Iterable[EntryPoint]) -> None:
    """See where a loop goes into a model."""
    for point in points:
        point.put()


def leave(points: Iterable[EntryPoint]) -> None:
    """Have the loop go into the model as it is."""
    for point in points:
        point.leave()


def entries_of(model: nn.Module) -> list[Entry]:
    """The entries of a model: public methods that use its modules or parameters, and every module that can be called.

    Whether a method does is read from the names in its code, and in that of the methods that it calls.
    """
    return [*(Entry("", name) for name in _methods(model)), *callable_modules(model)]


def outermost(entries: Iterable[Entry]) -> list[Entry]:
    """The methods, and the modules that are in no other one of these; a module comes after those around it."""
    found: list[Entry] = []
    for entry in entries:
        if not any(other.path and entry.path.startswith(f"{other.path}.") for other in found):
            found.append(entry)
    return found


def callable_modules(model: nn.Module) -> Iterator[Entry]:
    """The modules in a model that can be called, each after those around it."""
    for path, module in model.named_modules():
        if path and type(module).forward is not nn.Module.forward:  # as that of a ModuleList
            yield Entry(path)


def _methods(model: nn.Module) -> list[str]:
    functions: dict[str, CodeType] = {}
    names: dict[str, set[str]] = {}
    for kind in type(model).__mro__:
        if kind is nn.Module:
            break
        if kind.__module__.partition(".")[0] in LIGHTNING:  # `log()` is none of its author's
            continue
        for name, found in vars(kind).items():
            if isinstance(found, FunctionType) and name not in vars(model):
                functions.setdefault(name, found.__code__)
                names.setdefault(name, set()).update(_names(found.__code__))  # it may call that of a base class
    own = {*dict(model.named_children()), *(name for name, _ in model.named_parameters(recurse=False))}
    using, loops = _reaching(names, own), _reaching(names, LOOPS)
    generators = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
    return [
        name
        for name, code in functions.items()
        if name in using
        and not name.startswith("_")
        and name not in STEPS
        and not hasattr(nn.Module, name)
        and name not in loops
        and not code.co_flags & generators
    ]


def _reaching(names: Mapping[str, set[str]], goals: set[str]) -> set[str]:
    """The goals, and the methods whose code names one, or another method that does. O(methods²)."""
    found, grown = set(goals), True
    while grown:
        more = {name for name, used in names.items() if name not in found and used & found and name != "forward"}
        grown = bool(more)
        found |= more
    return found


def _names(code: CodeType) -> set[str]:
    inner = [_names(each) for each in code.co_consts if isinstance(each, CodeType)]
    return set(code.co_names).union(*inner)
