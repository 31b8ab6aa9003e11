"""One way to choose: begin with the leanest choice of some groups, and spend the memory that is left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp

import numpy as np

from solvers.groups.exchanges import Exchange, lean
from solvers.groups.grouped import State
from solvers.groups.memory_model import MemoryModel

DISTURBED = 0.4  # by how much the order in which memory is spent is disturbed at random


@dataclass(frozen=True)
class Entry:
    """A way to choose.

    Attributes:
        names: of the groups that run again at first.
        share: how much of what the target leaves may go to running smaller groups again, or none, in their place,
            before it goes to keeping results in them.
        preferred: ops whose results are kept before others.
        target: bytes that the memory model may hold.
        rounds: how often the target was corrected.
        seed: of what disturbs the order in which memory is spent; 0 for nothing.
    """

    names: tuple[str, ...]
    share: float
    preferred: frozenset[int]
    target: int
    rounds: int = 0
    seed: int = 0


def fill(model: MemoryModel, entry: Entry, offers: Sequence[Exchange]) -> State | None:
    """Begin with the leanest state and spend what the target leaves; None where not even that is within it."""
    state = lean(model, entry.names)
    held, _ = model.timeline(state)
    least = int(held.max(initial=0))
    if not state or least > entry.target:
        return None
    taken: dict[str, Exchange] = {}
    random = np.random.default_rng(entry.seed)
    noise = DISTURBED * (entry.seed > 0)
    rates = [offer.rate * exp(noise * random.standard_normal()) for offer in offers]
    for _, offer in sorted(zip(rates, offers, strict=True), key=lambda pair: -pair[0]):
        now = taken.get(offer.name)
        if now is None or offer.gain > now.gain:
            after = held + offer.more if now is None else held + offer.more - now.more
            if after.max() <= least + entry.share * (entry.target - least):
                held, taken[offer.name] = after, offer
    for name, offer in taken.items():
        state.pop(name)
        state.update(lean(model, offer.instead))
    _keep(model, state, entry, random, noise)
    _leave_alone(model, state, entry.target)
    return state


def _leave_alone(model: MemoryModel, state: dict[str, frozenset[int]], target: int) -> None:
    """Take whole groups out, those first that run again for longest."""
    for name in sorted(state, key=lambda n: -model.cost_of(n, state[n])):
        kept = state.pop(name)
        if model.timeline(state)[0].max(initial=0) > target:
            state[name] = kept


def _keep(
    model: MemoryModel, state: dict[str, frozenset[int]], entry: Entry, random: np.random.Generator, noise: float
) -> None:
    """Keep results, those first that are preferred, or take the most time per byte."""
    ops, sizes = model.problem.ops, model.problem.sizes
    held, dropped = model.timeline(state)
    items = []
    for name in state:
        group = model.groups[name]
        for kept in group.optional:
            freed = {v: dropped.get(v, model.freed[v]) for i in kept for v in ops[i].writes}
            more = {v: at for v, at in freed.items() if at < group.starts}
            cost = sum(ops[i].cost for i in kept)
            nbytes = sum(sizes[v] for v in more)
            rate = cost / max(nbytes, 1) * exp(noise * random.standard_normal())
            items.append((entry.preferred.isdisjoint(kept), -rate, name, kept, more))
    for _, _, name, kept, more in sorted(items, key=lambda item: item[:2]):
        starts = model.groups[name].starts
        nbytes = sum(sizes[v] for v in more)
        if more and held[min(more.values()) : starts].max(initial=0) + nbytes > entry.target:
            continue
        for v, at in more.items():
            held[at:starts] += sizes[v]
        state[name] = state[name] | frozenset(kept)
