"""The random state of Python and NumPy, which a model may draw from while it is planned: kept, and foreseen."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from inspect import unwrap
from itertools import chain
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import nn

from planner.compat.modules import modules_in

_KINDS = (random.Random, np.random.RandomState, np.random.Generator)
MOST_FUNCTIONS = 1000  # whose code is looked at, of a class of modules
_NAMED = WeakKeyDictionary[type[nn.Module], list[tuple[Any, str]]]()


@contextmanager
def random_kept(model: nn.Module | None = None, chance: float | None = None) -> Iterator[Callable[[], bool]]:
    """Puts the random state of Python and NumPy back at the end.

    Args:
        model: whose own generators are put back as well.
        chance: about what the numbers between 0 and 1 are to be that are drawn meanwhile; None for those that come
            next. Another generator stands in for a `np.random.Generator`, which can have any state.

    Yields:
        A function that puts the state back before the end, and says whether anything was drawn.
    """
    undraw = undrawing(model)
    places: list[tuple[Any, str, Any]] = []
    if chance is not None:
        words = (_twister_word(chance),) * 624  # a Mersenne Twister's state is its next outputs, tempered
        for generator in _generators(model):
            if hasattr(generator, "setstate"):
                generator.setstate((3, (*words, 0), None))
            elif hasattr(generator, "set_state"):
                with suppress(ValueError):  # it was given another bit generator
                    generator.set_state(("MT19937", words, 0))
        places = [(*place, value) for place in _places(model) if type(value := _value(*place)) is np.random.Generator]
    try:
        for place, name, _ in places:
            _assign(place, name, np.random.Generator(_twister(words)))
        drawn = undrawing(model)
        yield drawn
    finally:
        for place, name, value in places:
            _assign(place, name, value)
        undraw()


def undrawing(model: nn.Module | None = None) -> Callable[[], bool]:
    """A function that puts the state of these generators back to the present one; it says whether any had changed."""
    before = [(generator, _state_of(generator)) for generator in _generators(model)]

    def restore() -> bool:
        drawn = [(g, state) for g, state in before if _comparable(_state_of(g)) != _comparable(state)]
        for generator, state in drawn:
            _set_state(generator, state)
        return bool(drawn)

    return restore


def _generators(model: nn.Module | None) -> list[Any]:
    """Python's and NumPy's own generators, those that modules of a model hold, and those that their code names."""
    modules = modules_in(model) if model is not None else ()
    held = list(chain.from_iterable(vars(module).values() for module in modules))
    held += named_generators(modules)
    if not any(issubclass(kind, _KINDS) for kind in set(map(type, held))):
        return [random, np.random]
    return [random, np.random, *(x for x in held if isinstance(x, _KINDS) and not isinstance(x, random.SystemRandom))]


def named_generators(modules: Iterable[nn.Module]) -> list[Any]:
    """The generators that methods of modules, or functions that they call, use by a variable outside of them.

    O(modules), and O(code) for the first module of a class.
    """
    return [_value(*place) for place in _named_places(modules)]


def _named_places(modules: Iterable[nn.Module]) -> list[tuple[Any, str]]:
    """The variables that are such generators."""
    kinds = set(map(type, modules))
    for kind in kinds.difference(_NAMED):
        found = (*_KINDS, torch.Generator)
        _NAMED[kind] = [place for place in _names_in_methods(kind) if isinstance(_value(*place), found)]
    return [place for kind in kinds for place in _NAMED[kind]]


def _names_in_methods(kind: type[nn.Module]) -> Iterator[tuple[Any, str]]:
    """The variables that such code uses: the globals of a function, or a cell, and the name."""
    own = [vars(c).values() for c in kind.__mro__]
    left = [f for f in chain.from_iterable(own) if isinstance(f, FunctionType)]
    seen = set[int]()
    while left and len(seen) < MOST_FUNCTIONS:
        f = unwrap(left.pop())
        if id(f) in seen or (f.__module__ or "").partition(".")[0] == "torch":  # these have none that a step changes
            continue
        seen.add(id(f))
        names = [(f.__globals__, name) for name in f.__code__.co_names if name in f.__globals__]
        names += [(cell, "cell_contents") for cell in f.__closure__ or ()]
        yield from names
        left += [value for name in names if isinstance(value := _value(*name), FunctionType)]


def _places(model: nn.Module | None) -> Iterator[tuple[Any, str]]:
    """The attributes of modules, and the variables of other code, that are or name generators."""
    modules = modules_in(model) if model is not None else ()
    for own in map(vars, modules):
        yield from ((own, name) for name, value in own.items() if isinstance(value, _KINDS))
    yield from _named_places(modules)


def _assign(place: Any, name: str, value: Any) -> None:
    if isinstance(place, dict):
        place[name] = value
    else:
        setattr(place, name, value)


def _twister(words: tuple[int, ...]) -> np.random.MT19937:
    """A Mersenne Twister with a state of 624 words."""
    made = np.random.MT19937()
    made.state = {"bit_generator": "MT19937", "state": {"key": np.array(words, dtype=np.uint32), "pos": 0}}
    return made


def _value(place: Any, name: str) -> Any:
    """That of a variable; None for one that has none yet."""
    return place.get(name) if isinstance(place, dict) else getattr(place, name, None)


def _state_of(generator: Any) -> Any:
    if hasattr(generator, "setstate"):  # Python's
        return generator.getstate()
    if hasattr(generator, "set_state"):  # NumPy's RandomState
        return generator.get_state(legacy=False)
    return generator.bit_generator.state


def _set_state(generator: Any, state: Any) -> None:
    if hasattr(generator, "setstate"):
        generator.setstate(state)
    elif hasattr(generator, "set_state"):
        generator.set_state(state)
    else:
        generator.bit_generator.state = state


def _comparable(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _comparable(value) for key, value in state.items()}
    return state.tobytes() if isinstance(state, np.ndarray) else state


def _twister_word(chance: float) -> int:
    """A word of a Mersenne Twister's state that is tempered into about `chance * 2**32`, and is not 0."""
    word = max(int(chance * 2**32), 1)
    word ^= word >> 18  # the steps of tempering are undone, the last one first
    word ^= word << 15 & 0xEFC60000
    undone = word
    for _ in range(4):
        undone = word ^ (undone << 7 & 0x9D2C5680)
    return undone ^ undone >> 11 ^ undone >> 22
