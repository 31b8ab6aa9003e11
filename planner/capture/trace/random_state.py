"""The random state of Python and NumPy, which a model may draw from while it is planned: kept, and foreseen."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch
from torch import nn

from planner.capture.trace.generators import Found, generators_of
from planner.capture.trace.named import Place, assign
from planner.compat.modules import modules_in


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
    replaced: list[tuple[Place, Any]] = []
    if chance is not None:
        words = (_twister_word(chance),) * 624  # a Mersenne Twister's state is its next outputs, tempered
        found = _found(model)
        for generator in _generators(found):
            if hasattr(generator, "setstate"):
                generator.setstate((3, (*words, 0), None))
            elif hasattr(generator, "set_state"):
                with suppress(ValueError):  # it was given another bit generator
                    generator.set_state(("MT19937", words, 0))
        replaced = [(place, g) for place, g in found if place is not None and type(g) is np.random.Generator]
    try:
        for place, _ in replaced:
            assign(*place, np.random.Generator(_twister(words)))
        drawn = undrawing(model)
        yield drawn
    finally:
        for place, generator in replaced:
            assign(*place, generator)
        undraw()


def undrawing(model: nn.Module | None = None, found: Iterable[Found] | None = None) -> Callable[[], bool]:
    """A function that puts the state of these generators back to the present one; it says whether any had changed.

    Args:
        model: as in `random_kept`.
        found: its own generators, where they are known.
    """
    own = _found(model) if found is None else found
    before = [(generator, _state_of(generator)) for generator in _generators(own)]

    def restore() -> bool:
        drawn = [(g, state) for g, state in before if _comparable(_state_of(g)) != _comparable(state)]
        for generator, state in drawn:
            _set_state(generator, state)
        return bool(drawn)

    return restore


def _found(model: nn.Module | None) -> list[Found]:
    return [] if model is None else generators_of(modules_in(model))


def _generators(found: Iterable[Found]) -> list[Any]:
    """Python's and NumPy's own generators, and these, each once."""
    own = {id(g): g for _, g in found if not isinstance(g, torch.Generator)}
    return [random, np.random, *own.values()]


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
