"""Which groups to run again and which results in them to keep: a memory model chooses, and a judge checks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from heapq import heappop, heappush
from itertools import count, product
from typing import Protocol, TypeVar

from solvers.groups.exchanges import exchanges, lean, levels, trim
from solvers.groups.fill import Entry, fill
from solvers.groups.grouped import State
from solvers.groups.memory_model import MemoryModel

SHARES = (0.0, 0.5, 1.0)
SEEDS = 3  # orders in which to spend memory: by rate, and by rates disturbed at random
ROUNDS = 3  # how often a choice that fits is improved
CHECKS = 10  # choices that are judged
LEANEST = 4  # further ones, where none of those fits
SLACK = 0.01  # of the budget: with less to spare, a choice is not improved
WORTH = 0.002  # of the time: a choice that promises less is not judged


class Judged(Protocol):
    """What the judge found of a choice."""

    @property
    def peak(self) -> int:
        """All bytes that the budget counts."""

    @property
    def cost(self) -> float:
        """Time of the step."""


Found = TypeVar("Found", bound=Judged)


def search(
    model: MemoryModel,
    check: Callable[[State], Found | None],
    baseline: Found,
    budget: int,
    preferred: frozenset[int] = frozenset(),
) -> tuple[Found | None, Found]:
    """The fastest choice that is within the budget, as far as is found; and the one of the lowest peak of all checked.

    Ways to choose are tried in the order of the time that the memory model gives them; each is corrected by what
    the judge says of its choice, and tried again. Where none fits, the leanest choices are judged.

    Args:
        model: the memory model.
        check: judges a choice; None where that fails.
        baseline: the step in which nothing runs again.
        budget: bytes.
        preferred: ops whose results are kept before others at first.
    """
    if baseline.peak <= budget:
        return baseline, baseline
    queue: list[tuple[float, int, Entry, State]] = []
    best: Found | None = None
    leanest = baseline
    seen: set[frozenset[tuple[str, frozenset[int]]]] = set()

    def push(entry: Entry) -> None:
        state = fill(model, entry, offers[entry.names])
        key = frozenset(state.items()) if state is not None else frozenset()
        if state and key not in seen:
            seen.add(key)
            heappush(queue, (baseline.cost + model.cost(state), next(order), entry, state))

    def checked(state: State) -> Found | None:
        nonlocal best, leanest
        found = check(state)
        if found is not None:
            leanest = min(leanest, found, key=lambda each: each.peak)
            if found.peak <= budget and (best is None or found.cost < best.cost):
                best = found
        return found

    order, sets = count(), levels(model)
    offers = {names: exchanges(model, names, sets) for names in sets}
    for names in sets:
        for share, seed in product(SHARES, range(SEEDS)):
            push(Entry(names, share, frozenset(), budget, seed=seed))
        if preferred:
            push(Entry(names, 0.0, preferred, budget))
    error: dict[tuple[str, ...], int] = {}  # what the model's peak lacks, by what runs again at first
    checks = 0
    while queue and checks < CHECKS and (best is None or queue[0][0] < (1 - WORTH) * best.cost):
        _, _, entry, state = heappop(queue)
        target = budget - error.get(entry.names, 0)
        if entry.target > target:
            push(replace(entry, target=target))
            continue
        checks += 1
        found = checked(state)
        if found is not None:
            error[entry.names] = found.peak - int(model.timeline(state)[0].max())
            if found.peak > budget or (entry.rounds < ROUNDS and budget - found.peak > SLACK * budget):
                push(replace(entry, target=budget - error[entry.names], rounds=entry.rounds + 1))
    if best is None:
        for names in sorted(sets, key=lambda s: int(model.timeline(lean(model, s))[0].max()))[:LEANEST]:
            checked(lean(model, names))
            if (state := trim(model, names, offers[names])) != lean(model, names):
                checked(state)
    return best, leanest
