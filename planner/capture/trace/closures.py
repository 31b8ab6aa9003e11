"""Functions that a model holds and that hold parts of it: `copy.deepcopy` leaves them to call the original."""

from __future__ import annotations

import dis
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from operator import is_
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from planner.compat.modules import buffers_of, parameters_of
from planner.errors import CaptureError

_CONTAINERS = (dict, OrderedDict, list, tuple)
_READS = frozenset({"LOAD_GLOBAL", "LOAD_NAME"})
_TABLES = frozenset({"_modules", "_parameters", "_buffers"})


def rebind_functions(model: nn.Module, copied: nn.Module, memo: Mapping[int, Any]) -> None:
    """Have a copy of a model call functions whose variables are parts of the copy. O(what the functions reach).

    As `module.forward = torch.compile(module.forward)` leaves them, or hooks: their closures, defaults, attributes and
    the global variables that they name are followed, through further functions. Others stay as they are.

    Args:
        model: the original.
        copied: a copy, which is changed.
        memo: of `copy.deepcopy`, by which the copy was made.
    """
    held = (x for m in model.modules() for x in (m, *parameters_of(m).values(), *buffers_of(m).values()))
    parts = {id(x) for x in held if x is not None}
    attributes = [v for m in model.modules() for name, v in m.__dict__.items() if name not in _TABLES]
    found = {id(f): f for f in _functions(attributes, set()) if _reaches(f, parts, set())}
    copies = _Copies(parts, memo, {key: _twin(f) for key, f in found.items()})
    for key, f in found.items():
        _fill(copies.twins[key], f, copies)
    for module in copied.modules():
        for name, value in [*module.__dict__.items()]:
            if name not in _TABLES and (new := _bound(value, copies)) is not value:
                module.__dict__[name] = new


@dataclass(frozen=True)
class _Copies:
    """What stands for what: parts of the model, by their identities, their copies, and the copies of functions."""

    parts: Collection[int]
    memo: Mapping[int, Any]
    twins: Mapping[int, FunctionType]


def _bound(x: Any, copies: _Copies) -> Any:
    """A value with copies in the place of the parts that it leads to; itself where it leads to none.

    No closure that calls itself: it would keep the model and its copy until Python's collector comes.
    """
    if id(x) in copies.parts:
        return copies.memo.get(id(x), x)
    if type(x) is FunctionType:
        return copies.twins.get(id(x), x)
    again = partial(_bound, copies=copies)
    if type(x) is MethodType:
        made = MethodType(again(x.__func__), again(x.__self__))
        return x if made.__func__ is x.__func__ and made.__self__ is x.__self__ else made
    if type(x) is partial:
        inside = x.func, x.args, x.keywords
        new = tuple(map(again, inside))
        return x if all(map(is_, new, inside)) else partial(new[0], *new[1], **new[2])
    if type(x) in _CONTAINERS:
        old = _inside(x)
        values = list(map(again, old))
        if not all(map(is_, values, old)):
            return type(x)(zip(x, values, strict=True) if isinstance(x, dict) else values)
    return x


def _twin(f: FunctionType) -> FunctionType:
    """A function like another one, whose closure is empty, with the global variables that it names: others, such as a
    script's batch, are not to live as long as it.
    """
    cells = tuple(CellType() for _ in f.__closure__ or ()) or None
    named = {
        name: f.__globals__[name] for name in (*_names(f.__code__), "__builtins__", "__name__") if name in f.__globals__
    }
    twin = FunctionType(f.__code__, named, f.__name__, f.__defaults__, cells)
    twin.__kwdefaults__, twin.__qualname__, twin.__module__ = f.__kwdefaults__, f.__qualname__, f.__module__
    return twin


def _fill(twin: FunctionType, f: FunctionType, copies: _Copies) -> None:
    for cell, old in zip(twin.__closure__ or (), f.__closure__ or (), strict=True):
        if (content := _content(old)) is not old:
            cell.cell_contents = _bound(content, copies)
    twin.__defaults__, twin.__kwdefaults__ = _bound(f.__defaults__, copies), _bound(f.__kwdefaults__, copies)
    twin.__dict__.update({name: _bound(value, copies) for name, value in f.__dict__.items()})
    twin.__globals__.update({name: _bound(value, copies) for name, value in _globals(f)})


def _functions(held: Collection[Any], seen: set[int]) -> Iterator[FunctionType]:
    """Functions among values, and those that these lead to, each once."""
    for x in held:
        if id(x) in seen:
            continue
        seen.add(id(x))
        if type(x) is FunctionType:
            yield x
        yield from _functions(_inside(x), seen)


def _reaches(x: Any, parts: Collection[int], seen: set[int]) -> bool:
    """Whether a value is of the parts, by their identities, or leads to one."""
    if id(x) in parts:
        return True
    if id(x) in seen:
        return False
    seen.add(id(x))
    return any(_reaches(y, parts, seen) for y in _inside(x))


def _inside(x: Any) -> list[Any]:
    """What a function, a method, a partial or a container holds; nothing for others."""
    if type(x) is FunctionType:
        cells = [_content(cell) for cell in x.__closure__ or ()]
        return [*cells, x.__defaults__, x.__kwdefaults__, x.__dict__, *(value for _, value in _globals(x))]
    if type(x) is MethodType:
        return [x.__func__, x.__self__]
    if type(x) is partial:
        return [x.func, x.args, x.keywords]
    if type(x) in _CONTAINERS:
        return list(x.values()) if isinstance(x, dict) else list(x)
    return []


def _globals(f: FunctionType) -> Iterator[tuple[str, Any]]:
    """The global variables that a function names and that may lead to a model: no functions of other files."""
    for name in _names(f.__code__):
        value = f.__globals__.get(name)
        if type(value) is FunctionType and value.__globals__ is not f.__globals__:
            continue
        if isinstance(value, (nn.Module, torch.Tensor)) or type(value) in (FunctionType, MethodType, partial):
            yield name, value


def _names(code: CodeType) -> set[str]:
    """The global variables that code reads, with that of functions in it."""
    inner = (_names(c) for c in code.co_consts if isinstance(c, CodeType))
    return {i.argval for i in dis.get_instructions(code) if i.opname in _READS}.union(*inner)


def _content(cell: CellType) -> Any:
    """What a variable of a closure holds; the variable where it was not given anything yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return cell


@contextmanager
def gradients_kept(model: nn.Module) -> Iterator[None]:
    """A context in which the gradients of a model's parameters stay as they are, while a copy of it is traced.

    Raises:
        CaptureError: they did not: code of the copy calls the original, by what `rebind_functions()` does not follow.
    """
    before = {name: (p, p.grad) for name, p in model.named_parameters() if p.is_leaf}  # a computed one has none
    changed = []
    try:
        yield
    finally:
        for name, (p, gradient) in before.items():
            if p.grad is not gradient:
                p.grad = gradient
                changed.append(name)
    if changed:
        raise CaptureError(
            f"{type(model).__name__} was traced as a copy, and its code calls the original, whose {changed[0]} got a "
            "gradient. A function that was put into the place of a method reaches it by functions of other files: have "
            "it call the method by `self`, or by a variable of its own"
        )
