"""Random number generators that a model may draw from: where its modules and its code have them."""

from __future__ import annotations

import functools
import random
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import nn

from planner.capture.trace.named import CONTAINERS, Place, named_by, named_in, value_of
from planner.compat.modules import modules_in, tables_of
from planner.core.call import PLAIN

KINDS = (random.Random, np.random.RandomState, np.random.Generator, torch.Generator)
_DEEPEST = 3  # containers in objects in containers
_MOST = 1000  # objects that are looked into, of each attribute
_TABLES = {dict, OrderedDict, set}
_LEAVES = (ModuleType, nn.Module, torch.Tensor, np.ndarray, random.SystemRandom)
_NAMED = WeakKeyDictionary[type[nn.Module], list[Place]]()
Found = tuple[Place | None, Any]  # what has the generator by which name or index, None for what cannot be assigned; it


def generators_of(modules: Iterable[nn.Module]) -> list[Found]:
    """The generators that modules have as attributes, in containers, functions and objects too, or as attributes of
    their classes; and those that methods of modules, or functions that they call, use by a variable outside of them.

    O(attributes), and O(code) for the first module of a class.
    """
    modules = list(modules)
    tables, seen, barren = set(map(id, tables_of(modules))), dict[int, int](), dict[int, int]()
    found = list[Found]()
    for own in map(vars, modules):
        for name, x in own.items():
            kind = type(x)
            if kind in PLAIN or (kind in _TABLES and (not x or id(x) in tables)):
                continue  # most are empty tables
            if kind is not tuple or not PLAIN.issuperset(map(type, x)):  # as a stride is
                found += _reached((own, name), x, _DEEPEST, seen)
    for kind in set(map(type, modules)):
        for place in _named(kind, barren):
            found += _reached(place, value_of(*place), _DEEPEST, seen)
    return found


def torch_generators(model: nn.Module) -> list[torch.Generator]:
    """Those of torch that a model's modules have."""
    return of_torch(generators_of(modules_in(model)))


def of_torch(found: Iterable[Found]) -> list[torch.Generator]:
    """Those of torch, each once."""
    return list({id(g): g for _, g in found if isinstance(g, torch.Generator)}.values())


def _named(kind: type[nn.Module], barren: dict[int, int]) -> list[Place]:
    """The attributes of a class, and the variables that its code names, that led to generators at its first use.

    `barren` is what other classes have led to, without a generator: the globals of a library's modules, mostly.
    """
    if kind not in _NAMED:
        own = ((c, name) for c in kind.__mro__ if not _has_none(c) for name in vars(c))
        places = [*named_by(kind), *own]
        if any(True for place in places for _ in _reached(place, value_of(*place), _DEEPEST, barren)):
            barren.clear()
            places = [place for place in places if any(_reached(place, value_of(*place), _DEEPEST, {}))]
        else:
            places = []
        _NAMED[kind] = places
    return _NAMED[kind]


def _has_none(kind: type) -> bool:
    """Whether a class is torch's, Python's, or one of what runs planned models: no generator of a model is in those."""
    return str(kind.__module__).partition(".")[0] in ("torch", "builtins", "planner")


def _reached(place: Place | None, x: Any, deepest: int, seen: dict[int, int]) -> Iterator[Found]:
    """What is a generator, by each of its places, or what containers, functions and objects hold of those.

    Each of these is looked into once, or again where that goes deeper: `seen` says how deep that was, by identity.
    """
    left, most = [(place, x, deepest)], len(seen) + _MOST
    while left and len(seen) < most:
        place, x, deeper = left.pop()
        kind = type(x)  # isinstance() asks objects for their class, and some raise
        if issubclass(kind, _LEAVES):
            continue
        if issubclass(kind, KINDS):
            yield place, x
        elif deeper > seen.get(id(x), 0):
            seen[id(x)] = deeper
            left += [(inner, value, deeper - 1) for inner, value in _inside(x, kind) if type(value) not in PLAIN]


def _inside(x: Any, kind: type) -> Iterator[tuple[Place | None, Any]]:
    if issubclass(kind, dict):
        yield from (((x, name), value) for name, value in list(x.items()))
    elif issubclass(kind, list):
        yield from (((x, at), value) for at, value in enumerate(x))
    elif issubclass(kind, tuple) or kind in CONTAINERS:
        yield from ((None, value) for value in list(x))
    elif kind is FunctionType:
        yield from ((place, value_of(*place)) for place in named_in([x]))
    elif kind in (MethodType, BuiltinFunctionType):
        yield None, x.__self__
    elif issubclass(kind, functools.partial):
        yield from ((None, value) for value in (x.func, *x.args, *x.keywords.values()))
    elif not _has_none(own := x if issubclass(kind, type) else kind):
        held = getattr(x, "__dict__", None) if own is kind and kind.__dictoffset__ else None
        if isinstance(held, dict):
            yield from (((held, name), value) for name, value in list(held.items()))
        yield from (((own, name), value) for name, value in list(vars(own).items()) if issubclass(type(value), KINDS))
