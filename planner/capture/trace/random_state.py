"""The random state of Python and NumPy, which a model may draw from while it is planned: kept, and foreseen."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import nn

from planner.capture.trace.named import named_by_classes, value_of
from planner.compat.modules import modules_in

_KINDS = (random.Random, np.random.RandomState, np.random.Generator)


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
        places = [(*place, value) for place in _places(model) if type(value := value_of(*place)) is np.random.Generator]
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
    return [value_of(*place) for place in _named_places(modules)]


def _named_places(modules: Iterable[nn.Module]) -> list[tuple[Any, str]]:
    """The variables that are such generators."""
    return [place for place in named_by_classes(modules) if isinstance(value_of(*place), (*_KINDS, torch.Generator))]


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
