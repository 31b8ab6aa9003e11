"""The default solver: several starts, then a search over keep decisions, all judged by the exact simulator.

Starts are no recomputation, every segmentation of `chen`, segments nested in segments, and dropping what is cheapest to
recompute per byte. The best start is improved by keeping values again, in ever smaller groups, while it still
fits. The work is limited by a count of simulated steps, never by a clock: the answer depends on the problem alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tqdm import tqdm

from .bounds import minimum_peak_bound
from .chen import candidates, cuts, keep_across
from .errors import InfeasibleError
from .policy import droppable, realize
from .problem import Problem
from .schedule import Answer, Schedule, every_op_once, simulate

STEPS = 1_200_000  # simulated steps in all: about 2 s of one core, whatever the size of the problem


@dataclass(frozen=True, slots=True)
class _Candidate:
    keep: frozenset[int]
    hold: frozenset[int] | None
    schedule: Schedule
    peak: int
    cost: float


class _Search:
    """Tries policies and counts the simulated steps that they took."""

    def __init__(self, problem: Problem, bar: tqdm[None]) -> None:
        self.problem = problem
        self.values = droppable(problem)
        self.steps = 0
        self.bar = bar

    def spent(self, share: float) -> bool:
        return self.steps >= share * STEPS

    def attempt(self, keep: Iterable[int], hold: Iterable[int] | None = None) -> _Candidate:
        kept, held = frozenset(keep), None if hold is None else frozenset(hold)
        schedule = realize(self.problem, kept, held)
        timeline = simulate(self.problem, schedule)
        self.steps += len(schedule.steps)
        self.bar.update(len(schedule.steps))
        return _Candidate(kept, held, schedule, timeline.peak, timeline.cost)

    def keep_all(self) -> _Candidate:
        return self.attempt(v for v, made in enumerate(self.problem.producer) if made < self.problem.boundary)


def auto(problem: Problem, *, progress: bool | None = None) -> Answer:
    """The best schedule found within the budget, never costlier than `chen`'s.

    About `STEPS` simulated steps, so O(1) simulations of a large problem and more of a small one.

    Raises:
        InfeasibleError: nothing found fits; its `minimum` is the peak of `lowest(problem)`, which always fits.
    """
    if problem.budget is None:
        return Answer(every_op_once(problem))
    with _bar(progress) as bar:
        search = _Search(problem, bar)
        full = search.keep_all()
        if full.peak <= problem.budget:
            return Answer(full.schedule)
        starts = [c for c in (*_segments(search), *_cheapest(search)) if c.peak <= problem.budget]
        if not starts:
            leanest = _lowest(search)
            if leanest.peak > problem.budget:
                raise InfeasibleError(problem.budget, leanest.peak, minimum_peak_bound(problem))
            starts = [leanest]
        starts.sort(key=lambda c: c.cost)
        search.steps = 0
        best = min((_improve(search, c, 1 / 3 * (n + 1)) for n, c in enumerate(starts[:3])), key=lambda c: c.cost)
    return Answer(best.schedule)


def lowest(problem: Problem, *, progress: bool | None = None) -> Schedule:
    """The schedule of the lowest peak that the search finds, whatever it costs; the budget is not looked at."""
    with _bar(progress) as bar:
        return _lowest(_Search(problem, bar)).schedule


def _bar(progress: bool | None) -> tqdm[None]:
    disable = None if progress is None else not progress
    return tqdm(desc="solving", unit=" steps", unit_scale=True, leave=False, disable=disable)


def _segments(search: _Search) -> list[_Candidate]:
    problem = search.problem
    return [search.attempt(keep_across(problem, cuts(problem, k))) for k in candidates(problem)]


def _nested(search: _Search) -> list[_Candidate]:
    """Segments inside segments: keep what crosses the outer cuts, hold what crosses the inner ones."""
    problem = search.problem
    found = []
    counts = candidates(problem)
    for outer in counts[::3]:
        for inner in (3, 8):
            fine = cuts(problem, outer * inner)
            keep = keep_across(problem, cuts(problem, outer), last=False)
            found.append(search.attempt(keep, keep_across(problem, fine, last=False)))
        found.append(search.attempt(keep_across(problem, cuts(problem, outer), last=False)))
    return found


def _cheapest(search: _Search) -> list[_Candidate]:
    """Drop the values that are cheapest to recompute per byte, as few as fit."""
    problem = search.problem
    assert problem.budget is not None
    price = {v: problem.ops[problem.producer[v]].cost / max(1, problem.sizes[v]) for v in search.values}
    order = sorted(search.values, key=lambda v: (price[v], v))
    everything = frozenset(v for v, made in enumerate(problem.producer) if made < problem.boundary)
    low, high, found = 0, len(order), []
    while low < high:
        middle = (low + high) // 2
        found.append(search.attempt(everything - set(order[:middle])))
        low, high = (low, middle) if found[-1].peak <= problem.budget else (middle + 1, high)
    return found


def _lowest(search: _Search) -> _Candidate:
    """The leanest start, then values live at its peak dropped one after the other while that lowers it."""
    start = search.steps
    best = min((search.keep_all(), *_segments(search), *_nested(search)), key=lambda c: (c.peak, c.cost))
    values = set(search.values)
    tried: set[tuple[int, int]] = set()
    while search.steps - start < STEPS:
        at, live = _peak(search.problem, best.schedule)
        choices = sorted(
            (v for v in live & values if (best.peak, v) not in tried), key=lambda v: (-search.problem.sizes[v], v)
        )
        if not choices:
            break
        v = choices[0]
        tried.add((best.peak, v))
        hold = values if best.hold is None else best.hold
        if v in best.keep:
            trial = search.attempt(best.keep - {v}, hold)
        elif v in hold:
            trial = search.attempt(best.keep, hold - {v})
        else:
            continue
        if (trial.peak, trial.cost) < (best.peak, best.cost):
            best = trial
    return best


def _peak(problem: Problem, schedule: Schedule) -> tuple[int, set[int]]:
    """The step of the peak, and the values held there that its op neither reads nor writes."""
    timeline = simulate(problem, schedule)
    at = timeline.held.index(timeline.peak)
    live: set[int] = set()
    for i, gone in zip(schedule.steps[:at], timeline.frees[:at], strict=True):
        live.update(problem.ops[i].writes)
        live.difference_update(gone)
    op = problem.ops[schedule.steps[at]]
    return at, live.difference(op.reads, op.writes)


def _improve(search: _Search, start: _Candidate, share: float) -> _Candidate:
    """Keep values again while it fits: dearest per byte first, in groups that halve when none fits."""
    problem, best = search.problem, start
    assert problem.budget is not None
    price = {v: problem.ops[problem.producer[v]].cost / max(1, problem.sizes[v]) for v in search.values}
    size = max(1, len(search.values) // 4)
    while size and not search.spent(share):
        dropped = sorted((v for v in search.values if v not in best.keep), key=lambda v: (-price[v], v))
        improved = False
        for at in range(0, len(dropped), size):
            group = dropped[at : at + size]
            trial = search.attempt(best.keep.union(group), best.hold)
            if trial.peak <= problem.budget and trial.cost < best.cost:
                best, improved = trial, True
            if search.spent(share):
                break
        if not improved or size > 1:
            size //= 2
    return best
