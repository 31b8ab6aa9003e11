"""Which modules to checkpoint and what to keep of them: choices by a surrogate, checked by tracing what really runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import count

from .surrogate import State, Surrogate
from .trace import Trace
from .wrap import Choice

LEVELS = 8  # sizes of modules that are tried
ROUNDS = 3  # how often a choice that fits is improved
CHECKS = 12  # traces of a choice, beside those for the lowest peak
SLACK = 0.01  # of the budget: with less to spare, a choice is not improved


@dataclass(frozen=True)
class Step:
    """A traced step.

    Attributes:
        choice: what was checkpointed.
        state: the same in numbers of the step without.
        trace: what ran.
        held: bytes while each op ran, beside what is there all the time.
        sizes: bytes of each storage.
        margin: bytes for fragmentation.
        peak: bytes, all that the budget counts.
        seconds: estimated time.
    """

    choice: Choice
    state: State
    trace: Trace = field(repr=False)
    held: Sequence[int] = field(repr=False)
    sizes: Sequence[int] = field(repr=False)
    margin: int
    peak: int
    seconds: float


@dataclass(frozen=True)
class Entry:
    """A way to choose.

    Attributes:
        modules: what is checkpointed at first.
        whole_first: whether modules are left alone before results are kept in others.
        preferred: ops whose results are kept before others.
        target: bytes that the surrogate may hold.
        rounds: how often the target was corrected.
    """

    modules: tuple[str, ...]
    whole_first: bool
    preferred: frozenset[int]
    target: int
    rounds: int = 0


def levels(model: Surrogate) -> list[tuple[str, ...]]:
    """Sets of modules of which none is in another one, each of modules that save up to some number of bytes."""
    size = {path: sum(model.sizes[s] for s in unit.saved) for path, unit in model.units.items()}
    distinct = sorted(set(size.values()))
    limits = {distinct[round(i * (len(distinct) - 1) / (LEVELS - 1))] for i in range(LEVELS)} if distinct else set()
    found = {tuple(_below(model, size, limit)) for limit in limits}
    return sorted(found, key=lambda paths: (len(paths), paths))


def _below(model: Surrogate, size: Mapping[str, int], limit: int) -> list[str]:
    """The outermost modules that save no more than the limit; those that have no such modules in them as well."""
    chosen: list[str] = []
    units = sorted(model.units.values(), key=lambda u: (-u.calls.start, len(u.calls)))  # inner ones first
    for unit in units:
        inner = [p for p in chosen if model.units[p].calls.start in unit.calls]
        if size[unit.path] <= limit or not inner:
            chosen = [p for p in chosen if p not in inner] + [unit.path]
    return sorted(chosen, key=lambda p: model.units[p].begin)


def lean(model: Surrogate, modules: Sequence[str]) -> State:
    """Nothing kept but what has to be."""
    return {path: model.units[path].forced for path in modules}


def fill(model: Surrogate, entry: Entry) -> State | None:
    """Begin with the leanest state and spend what the target leaves; None where not even that is within it."""
    state = dict(lean(model, entry.modules))
    if not state or model.timeline(state)[0].max(initial=0) > entry.target:
        return None
    if entry.whole_first:
        _leave_alone(model, state, entry.target)
    _keep(model, state, entry.target, entry.preferred)
    _leave_alone(model, state, entry.target)
    return state


def _leave_alone(model: Surrogate, state: dict[str, frozenset[int]], target: int) -> None:
    """Take whole modules out, those first that run again for longest."""
    for path in sorted(state, key=lambda p: -model.seconds_of(p, state[p])):
        kept = state.pop(path)
        if model.timeline(state)[0].max(initial=0) > target:
            state[path] = kept


def _keep(model: Surrogate, state: dict[str, frozenset[int]], target: int, preferred: frozenset[int]) -> None:
    """Keep results, those first that are preferred, or take the most time per byte."""
    held, dropped = model.timeline(state)
    items = []
    for path in state:
        unit = model.units[path]
        for group in unit.optional:
            made = [s for i in group for s in model.trace.ops[i].writes]
            begin = {s: dropped.get(s, model.last_read[s] + 1) for s in made}
            more = {s: at for s, at in begin.items() if at < unit.starts and model.trace.died[s] <= len(held)}
            seconds = sum(model.costs[i].seconds for i in group)
            nbytes = sum(model.sizes[s] for s in more)
            items.append((preferred.isdisjoint(group), -seconds / max(nbytes, 1), path, group, more))
    for _, _, path, group, more in sorted(items, key=lambda item: item[:2]):
        starts = model.units[path].starts
        nbytes = sum(model.sizes[s] for s in more)
        if more and held[min(more.values()) : starts].max(initial=0) + nbytes > target:
            continue
        for s, at in more.items():
            held[at:starts] += model.sizes[s]
        state[path] = state[path] | frozenset(group)


def search(
    model: Surrogate,
    check: Callable[[State], Step | None],
    baseline: Step,
    budget: int,
    preferred: frozenset[int] = frozenset(),
) -> tuple[Step | None, Step]:
    """The fastest choice that is within the budget, as far as is found; and the one of the lowest peak of all checked.

    Ways to choose are tried in the order of the seconds that the surrogate gives them; each is corrected by what
    tracing its choice shows, and tried again. Where none fits, the leanest choices are traced.

    Args:
        model: the surrogate.
        check: traces a choice; None where that fails.
        baseline: the step without checkpoints.
        budget: bytes.
        preferred: ops whose results another plan keeps.
    """
    if baseline.peak <= budget:
        return baseline, baseline
    queue: list[tuple[float, int, Entry, State]] = []
    best: Step | None = None
    leanest = baseline

    def push(entry: Entry) -> None:
        state = fill(model, entry)
        if state is not None:
            heappush(queue, (baseline.seconds + model.seconds(state), next(order), entry, state))

    def checked(state: State) -> Step | None:
        nonlocal best, leanest
        found = check(state)
        if found is not None:
            leanest = min(leanest, found, key=lambda step: step.peak)
            if found.peak <= budget and (best is None or found.seconds < best.seconds):
                best = found
        return found

    order, sets = count(), levels(model)
    for modules in sets:
        for whole_first in (False, True):
            push(Entry(modules, whole_first, frozenset(), budget))
        if preferred:
            push(Entry(modules, False, preferred, budget))
    for _ in range(CHECKS):
        if not queue or (best is not None and queue[0][0] >= best.seconds):
            break
        _, _, entry, state = heappop(queue)
        found = checked(state)
        miss = 0 if found is None else found.peak - budget
        if miss > 0 or (entry.rounds < ROUNDS and -miss > SLACK * budget):
            push(replace(entry, target=entry.target - miss, rounds=entry.rounds + 1))
    if best is None:
        for modules in sets:
            checked(lean(model, modules))
    return best, leanest
