"""Variables outside of a model that its code names, and the containers among them that it writes into."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from inspect import unwrap
from itertools import chain
from types import CodeType, FunctionType
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from planner.compat.modules import hook_tables

MOST_FUNCTIONS = 1000  # whose code is looked at, of a class of modules
Place = tuple[Any, Any]  # what has the variable (the globals of a function, a cell, an object, a list), and its name
CONTAINERS = (dict, OrderedDict, defaultdict, Counter, list, set, deque)
_NAMED = WeakKeyDictionary[type[nn.Module], list[Place]]()


def _named_by_classes(modules: Iterable[nn.Module]) -> list[Place]:
    """The variables that methods of modules, or functions that they call, name, and that are containers.

    O(modules), and O(code) for the first module of a class.
    """
    kinds = set(map(type, modules))
    for kind in kinds.difference(_NAMED):
        _NAMED[kind] = [place for place in named_by(kind) if isinstance(value_of(*place), CONTAINERS)]
    return [place for kind in kinds for place in _NAMED[kind]]


def named_containers(modules: Iterable[nn.Module]) -> list[Any]:
    """The containers that methods and hooks of modules, or functions that they call, use by a variable outside of them:
    a list of features, to which hooks append.
    """
    modules = list(modules)
    hooks = [hook for module in modules for table in hook_tables(module) for hook in table.values()]
    places = [*_named_by_classes(modules), *named_in(f for f in hooks if isinstance(f, FunctionType))]
    values = [value_of(*place) for place in places]
    return [value for value in values if isinstance(value, CONTAINERS)]


def value_of(place: Any, name: str) -> Any:
    """That of a variable of a function's; None for one that has none yet."""
    return place.get(name) if isinstance(place, dict) else getattr(place, name, None)


def assign(place: Any, name: Any, value: Any) -> None:
    """Give a variable a value."""
    if isinstance(place, (dict, list)):
        place[name] = value
    else:
        setattr(place, name, value)


def named_by(kind: type[nn.Module]) -> Iterator[Place]:
    """The variables outside of a class that its methods name, or functions that they call."""
    own = chain.from_iterable(vars(c).values() for c in kind.__mro__)
    return named_in(f for f in own if isinstance(f, FunctionType))


def named_in(functions: Iterable[FunctionType]) -> Iterator[Place]:
    """The variables outside of functions that these name, or functions that they call."""
    left = list(functions)
    seen = set[int]()
    while left and len(seen) < MOST_FUNCTIONS:
        f = unwrap(left.pop())
        if id(f) in seen or (f.__module__ or "").partition(".")[0] == "torch":  # these have none that a step changes
            continue
        seen.add(id(f))
        names = [(f.__globals__, name) for name in _names(f.__code__) if name in f.__globals__]
        names += [(cell, "cell_contents") for cell in f.__closure__ or ()]
        yield from names
        left += [value for name in names if isinstance(value := value_of(*name), FunctionType)]


def _names(code: CodeType) -> Iterator[str]:
    """The names that code uses, with those of the functions in it, as a hook that it registers."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)
