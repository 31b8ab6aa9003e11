"""Which modules to checkpoint and which results in them to keep: a memory model chooses, and a trace checks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import count, product
from math import exp

import numpy as np
from numpy.typing import NDArray

from planner.core.recipe import Choice
from planner.core.step import Replay, Step
from planner.eager.memory_model import MemoryModel, State

LEVELS = 8  # sizes of modules that are tried
SHARES = (0.0, 0.5, 1.0)
SEEDS = 3  # orders in which to spend memory: by rate, and by rates disturbed at random
DISTURBED = 0.4
ROUNDS = 3  # how often a choice that fits is improved
CHECKS = 10  # traces of choices
LEANEST = 4  # further ones, where none of those fits
SLACK = 0.01  # of the budget: with less to spare, a choice is not improved
WORTH = 0.002  # of the time: a choice that promises less is not traced


@dataclass(frozen=True)
class Trial:
    """A choice whose step was traced.

    Attributes:
        choice: what was checkpointed.
        state: the same in numbers of the step without checkpoints.
        step: what ran, with its margin for fragmentation.
        replay: every op of it, once.
    """

    choice: Choice
    state: State
    step: Step = field(repr=False)
    replay: Replay = field(repr=False)

    @property
    def peak(self) -> int:
        """All bytes that the budget counts."""
        return self.replay.timeline.peak

    @property
    def seconds(self) -> float:
        """Estimated time of the step."""
        return self.replay.timeline.cost


@dataclass(frozen=True)
class Entry:
    """A way to choose.

    Attributes:
        modules: what is checkpointed at first.
        share: how much of what the target leaves may go to checkpointing smaller modules, or none, in their place,
            before it goes to keeping results in them.
        preferred: ops whose results are kept before others.
        target: bytes that the memory model may hold.
        rounds: how often the target was corrected.
        seed: of what disturbs the order in which memory is spent; 0 for nothing.
    """

    modules: tuple[str, ...]
    share: float
    preferred: frozenset[int]
    target: int
    rounds: int = 0
    seed: int = 0


@dataclass(frozen=True)
class Exchange:
    """Modules to checkpoint in the place of one.

    Attributes:
        path: of the one.
        modules: in it; maybe none.
        gain: seconds.
        more: bytes that are held more while each op runs.
        rate: seconds gained per byte held at the end of the forward pass.
    """

    path: str
    modules: tuple[str, ...]
    gain: float
    more: NDArray[np.int64]
    rate: float


def levels(model: MemoryModel) -> list[tuple[str, ...]]:
    """Sets of modules of which none is in another one, each of modules that save up to some number of bytes."""
    size = {path: sum(model.sizes[s] for s in candidate.saved) for path, candidate in model.candidates.items()}
    distinct = sorted(set(size.values()))
    limits = {distinct[round(i * (len(distinct) - 1) / (LEVELS - 1))] for i in range(LEVELS)} if distinct else set()
    found = {tuple(_below(model, size, limit)) for limit in limits}
    return sorted(found, key=lambda paths: (len(paths), paths))


def _below(model: MemoryModel, size: Mapping[str, int], limit: int) -> list[str]:
    """The outermost modules that save no more than the limit; those that have no such modules in them as well."""
    chosen: list[str] = []
    candidates = sorted(model.candidates.values(), key=lambda u: (-u.calls.start, len(u.calls)))  # inner ones first
    for candidate in candidates:
        inner = [p for p in chosen if model.candidates[p].calls.start in candidate.calls]
        if size[candidate.path] <= limit or not inner:
            chosen = [p for p in chosen if p not in inner] + [candidate.path]
    return sorted(chosen, key=lambda p: model.candidates[p].begin)


def lean(model: MemoryModel, modules: Sequence[str]) -> dict[str, frozenset[int]]:
    """Nothing kept but what has to be."""
    return {path: model.candidates[path].forced for path in modules}


def exchanges(model: MemoryModel, modules: Sequence[str], sets: Sequence[Sequence[str]]) -> list[Exchange]:
    """What could be done instead of checkpointing each of the modules, the most seconds per byte first.

    Args:
        model: the memory model.
        modules: what is checkpointed.
        sets: of modules, to choose those in each of them from.
    """
    state = lean(model, modules)
    held, _ = model.timeline(state)
    turn = next((i for i, op in enumerate(model.trace.ops) if op.phase != "forward"), 0)
    found = []
    for path in modules:
        calls = model.candidates[path].calls
        inner = {tuple(p for p in other if p != path and model.candidates[p].calls.start in calls) for other in sets}
        for instead in {(), *inner}:
            others = {p: kept for p, kept in state.items() if p != path}
            gain = model.seconds_of(path, state[path]) - model.seconds(lean(model, instead))
            if gain > 0:
                more = model.timeline({**others, **lean(model, instead)})[0] - held
                found.append(Exchange(path, instead, gain, more, gain / max(int(more[turn]), 1)))
    return sorted(found, key=lambda e: (-e.rate, e.path, e.modules))


def fill(model: MemoryModel, entry: Entry, offers: Sequence[Exchange]) -> State | None:
    """Begin with the leanest state and spend what the target leaves; None where not even that is within it."""
    state = lean(model, entry.modules)
    held, _ = model.timeline(state)
    least = int(held.max(initial=0))
    if not state or least > entry.target:
        return None
    taken: dict[str, Exchange] = {}
    random = np.random.default_rng(entry.seed)
    noise = DISTURBED * (entry.seed > 0)
    rates = [offer.rate * exp(noise * random.standard_normal()) for offer in offers]
    for _, offer in sorted(zip(rates, offers, strict=True), key=lambda pair: -pair[0]):
        now = taken.get(offer.path)
        if now is None or offer.gain > now.gain:
            after = held + offer.more if now is None else held + offer.more - now.more
            if after.max() <= least + entry.share * (entry.target - least):
                held, taken[offer.path] = after, offer
    for path, offer in taken.items():
        state.pop(path)
        state.update(lean(model, offer.modules))
    _keep(model, state, entry.target, entry.preferred, random, noise)
    _leave_alone(model, state, entry.target)
    return state


def trim(model: MemoryModel, modules: Sequence[str], offers: Sequence[Exchange]) -> State:
    """The leanest state, with smaller modules, or none, in the place of those where that lowers the peak."""
    state = lean(model, modules)
    held, _ = model.timeline(state)
    for offer in offers:
        if offer.path in state and (held + offer.more).max() < held.max():
            held = held + offer.more
            state.pop(offer.path)
            state.update(lean(model, offer.modules))
    return state


def _leave_alone(model: MemoryModel, state: dict[str, frozenset[int]], target: int) -> None:
    """Take whole modules out, those first that run again for longest."""
    for path in sorted(state, key=lambda p: -model.seconds_of(p, state[p])):
        kept = state.pop(path)
        if model.timeline(state)[0].max(initial=0) > target:
            state[path] = kept


def _keep(
    model: MemoryModel,
    state: dict[str, frozenset[int]],
    target: int,
    preferred: frozenset[int],
    random: np.random.Generator,
    noise: float,
) -> None:
    """Keep results, those first that are preferred, or take the most time per byte."""
    held, dropped = model.timeline(state)
    items = []
    for path in state:
        candidate = model.candidates[path]
        for group in candidate.optional:
            freed = {s: dropped.get(s, model.trace.died[s]) for i in group for s in model.trace.ops[i].writes}
            more = {s: at for s, at in freed.items() if at < candidate.starts}
            seconds = sum(model.costs[i].seconds for i in group)
            nbytes = sum(model.sizes[s] for s in more)
            rate = seconds / max(nbytes, 1) * exp(noise * random.standard_normal())
            items.append((preferred.isdisjoint(group), -rate, path, group, more))
    for _, _, path, group, more in sorted(items, key=lambda item: item[:2]):
        starts = model.candidates[path].starts
        nbytes = sum(model.sizes[s] for s in more)
        if more and held[min(more.values()) : starts].max(initial=0) + nbytes > target:
            continue
        for s, at in more.items():
            held[at:starts] += model.sizes[s]
        state[path] = state[path] | frozenset(group)


def search(
    model: MemoryModel,
    check: Callable[[State], Trial | None],
    baseline: Trial,
    budget: int,
    preferred: frozenset[int] = frozenset(),
) -> tuple[Trial | None, Trial]:
    """The fastest choice that is within the budget, as far as is found; and the one of the lowest peak of all checked.

    Ways to choose are tried in the order of the seconds that the memory model gives them; each is corrected by what
    tracing its choice shows, and tried again. Where none fits, the leanest choices are traced.

    Args:
        model: the memory model.
        check: traces a choice; None where that fails.
        baseline: the step without checkpoints.
        budget: bytes.
        preferred: ops whose results another plan keeps.
    """
    if baseline.peak <= budget:
        return baseline, baseline
    queue: list[tuple[float, int, Entry, State]] = []
    best: Trial | None = None
    leanest = baseline
    seen: set[frozenset[tuple[str, frozenset[int]]]] = set()

    def push(entry: Entry) -> None:
        state = fill(model, entry, offers[entry.modules])
        key = frozenset(state.items()) if state is not None else frozenset()
        if state and key not in seen:
            seen.add(key)
            heappush(queue, (baseline.seconds + model.seconds(state), next(order), entry, state))

    def checked(state: State) -> Trial | None:
        nonlocal best, leanest
        found = check(state)
        if found is not None:
            leanest = min(leanest, found, key=lambda trial: trial.peak)
            if found.peak <= budget and (best is None or found.seconds < best.seconds):
                best = found
        return found

    order, sets = count(), levels(model)
    offers = {modules: exchanges(model, modules, sets) for modules in sets}
    for modules in sets:
        for share, seed in product(SHARES, range(SEEDS)):
            push(Entry(modules, share, frozenset(), budget, seed=seed))
        if preferred:
            push(Entry(modules, 0.0, preferred, budget))
    error: dict[tuple[str, ...], int] = {}  # what the model's peak lacks, by what is checkpointed at first
    checks = 0
    while queue and checks < CHECKS and (best is None or queue[0][0] < (1 - WORTH) * best.seconds):
        _, _, entry, state = heappop(queue)
        target = budget - error.get(entry.modules, 0)
        if entry.target > target:
            push(replace(entry, target=target))
            continue
        checks += 1
        found = checked(state)
        if found is not None:
            error[entry.modules] = found.peak - int(model.timeline(state)[0].max())
            if found.peak > budget or (entry.rounds < ROUNDS and budget - found.peak > SLACK * budget):
                push(replace(entry, target=budget - error[entry.modules], rounds=entry.rounds + 1))
    if best is None:
        for modules in sorted(sets, key=lambda m: int(model.timeline(lean(model, m))[0].max()))[:LEANEST]:
            checked(lean(model, modules))
            if (state := trim(model, modules, offers[modules])) != lean(model, modules):
                checked(state)
    return best, leanest
