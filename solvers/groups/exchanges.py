"""Sets of groups to begin with, and what each of their groups may be exchanged for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from solvers.groups.grouped import State
from solvers.groups.memory_model import MemoryModel

LEVELS = 8  # sizes of groups that are tried


@dataclass(frozen=True)
class Exchange:
    """Groups to run again in the place of one.

    Attributes:
        name: of the one.
        instead: groups in it; maybe none.
        gain: time.
        more: bytes that are held more while each op runs.
        rate: time gained per byte held at the end of the forward pass.
    """

    name: str
    instead: tuple[str, ...]
    gain: float
    more: NDArray[np.int64]
    rate: float


def levels(model: MemoryModel) -> list[tuple[str, ...]]:
    """Sets of groups of which none is in another one, each of groups that save up to some number of bytes."""
    size = {name: sum(model.problem.sizes[v] for v in group.saved) for name, group in model.groups.items()}
    distinct = sorted(set(size.values()))
    limits = {distinct[round(i * (len(distinct) - 1) / (LEVELS - 1))] for i in range(LEVELS)} if distinct else set()
    found = {tuple(_below(model, size, limit)) for limit in limits}
    return sorted(found, key=lambda names: (len(names), names))


def _below(model: MemoryModel, size: Mapping[str, int], limit: int) -> list[str]:
    """The outermost groups that save no more than the limit; those that have no such groups in them as well."""
    chosen: list[str] = []
    for group in reversed(model.grouped.groups):  # inner ones first
        inner = [name for name in chosen if name in group.inner]
        if size[group.name] <= limit or not inner:
            chosen = [name for name in chosen if name not in inner] + [group.name]
    return sorted(chosen, key=lambda name: model.groups[name].begin)


def lean(model: MemoryModel, names: Sequence[str]) -> dict[str, frozenset[int]]:
    """Nothing kept but what has to be."""
    return {name: model.groups[name].forced for name in names}


def exchanges(model: MemoryModel, names: Sequence[str], sets: Sequence[Sequence[str]]) -> list[Exchange]:
    """What could be done instead of running each of the groups again, the most time per byte first.

    Args:
        model: the memory model.
        names: of the groups that run again.
        sets: of groups, to choose those in each of them from.
    """
    state = lean(model, names)
    held, _ = model.timeline(state)
    found = []
    for name in names:
        inner = {tuple(other for other in each if other in model.groups[name].inner) for each in sets}
        for instead in {(), *inner}:
            others = {other: kept for other, kept in state.items() if other != name}
            gain = model.cost_of(name, state[name]) - model.cost(lean(model, instead))
            if gain > 0:
                more = model.timeline({**others, **lean(model, instead)})[0] - held
                rate = gain / max(int(more[model.grouped.turn]), 1)
                found.append(Exchange(name, instead, gain, more, rate))
    return sorted(found, key=lambda e: (-e.rate, e.name, e.instead))


def trim(model: MemoryModel, names: Sequence[str], offers: Sequence[Exchange]) -> State:
    """The leanest state, with smaller groups, or none, in the place of those where that lowers the peak."""
    state = lean(model, names)
    held, _ = model.timeline(state)
    for offer in offers:
        if offer.name in state and (held + offer.more).max() < held.max():
            held = held + offer.more
            state.pop(offer.name)
            state.update(lean(model, offer.instead))
    return state
