"""The default solver: several starts, then a search over what to keep, all judged by the exact simulator.

Starts are no recomputation, every segmentation of `chen`, segments nested in segments, and dropping what is cheapest
to recompute per byte. The best ones are improved by keeping values again, in ever smaller groups, while it fits, and
then by annealing. The work is limited by a count of simulated steps, never by a clock: the answer depends on the
problem alone.
"""

from __future__ import annotations

from tqdm import tqdm

from .anneal import Candidate, Search, anneal
from .bounds import minimum_peak_bound
from .chen import candidates, cuts, keep_across
from .errors import InfeasibleError
from .problem import Problem
from .schedule import Answer, Schedule, every_op_once

STEPS = 2_000_000  # simulated steps in each of its two parts: about a second of one core, whatever the problem's size


def auto(problem: Problem, *, progress: bool | None = None) -> Answer:
    """The best schedule found within the budget, never costlier than `chen`'s.

    About `STEPS` simulated steps for the starts and as many for the search: O(1) simulations of a large problem,
    more of a small one.

    Raises:
        InfeasibleError: nothing found fits; its `minimum` is the peak of `lowest(problem)`, which always fits.
    """
    if problem.budget is None:
        return Answer(every_op_once(problem))
    with _bar(progress) as bar:
        search = Search(problem, bar.update)
        full = _keep_all(search)
        if full.peak <= problem.budget:
            return Answer(full.schedule)
        starts = [c for c in (*_segments(search), *_cheapest(search, full)) if c.peak <= problem.budget]
        starts = [_improve(search, c, STEPS // 8) for c in sorted(starts, key=lambda c: c.cost)[:3]]
        starts += [c for c in [_cheaper(search, full, 0.02)] if c.peak <= problem.budget]
        if not starts:
            leanest = _lowest(search)
            if leanest.peak > problem.budget:
                raise InfeasibleError(problem.budget, leanest.peak, minimum_peak_bound(problem))
            starts = [leanest]
        best = min(starts, key=lambda c: c.cost)
        best = _improve(search, _cheaper(search, best, 0.001), STEPS // 4)
    return Answer(best.schedule)


def lowest(problem: Problem, *, progress: bool | None = None) -> Schedule:
    """The schedule of the lowest peak that the search finds, whatever it costs; the budget is not looked at."""
    with _bar(progress) as bar:
        return _lowest(Search(problem, bar.update)).schedule


def _bar(progress: bool | None) -> tqdm[None]:
    disable = None if progress is None else not progress
    return tqdm(desc="solving", unit=" steps", unit_scale=True, leave=False, disable=disable)


def _keep_all(search: Search) -> Candidate:
    return search.attempt(frozenset(search.values))


def _segments(search: Search) -> list[Candidate]:
    """What `chen` tries."""
    problem = search.problem
    return [search.attempt(frozenset(keep_across(problem, cuts(problem, k)))) for k in candidates(problem)]


def _nested(search: Search) -> list[Candidate]:
    """Segments inside segments: keep what crosses the outer cuts, hold what crosses the inner ones."""
    problem = search.problem
    found = []
    for outer in candidates(problem)[::3]:
        keep = frozenset(keep_across(problem, cuts(problem, outer), last=False))
        found.append(search.attempt(keep))
        for inner in (3, 8):
            fine = keep_across(problem, cuts(problem, outer * inner), last=False)
            found.append(search.attempt(keep, frozenset(fine)))
    return found


def _price(search: Search) -> dict[int, float]:
    """Time to run a value's op again, per byte of it."""
    problem = search.problem
    return {v: problem.ops[problem.producer[v]].cost / max(1, problem.sizes[v]) for v in search.values}


def _cheapest(search: Search, full: Candidate) -> list[Candidate]:
    """Drop the values that are cheapest to recompute per byte, as few as fit."""
    problem, budget = search.problem, search.problem.budget or 0
    price = _price(search)
    needed = (v for v in search.values if problem.readers[v][-1] >= problem.boundary)
    order = sorted(needed, key=lambda v: (price[v], v))
    low, high, found = 0, len(order), []
    while low < high:
        middle = (low + high) // 2
        found.append(search.attempt(full.keep.difference(order[:middle])))
        low, high = (low, middle) if found[-1].peak <= budget else (middle + 1, high)
    return found


def _lowest(search: Search) -> Candidate:
    """The leanest start, annealed for its peak; cost only breaks ties."""
    problem = search.problem
    best = min((_keep_all(search), *_segments(search), *_nested(search)), key=lambda c: (c.peak, c.cost))
    variable = max(1, best.peak - problem.resident)

    def energy(peak: int, cost: float) -> float:
        return peak / variable + 1e-3 * cost / (problem.total_cost or 1.0)

    return anneal(search, best, energy, 0.02, STEPS)


def _cheaper(search: Search, start: Candidate, hottest: float) -> Candidate:
    """Annealed for its cost; bytes over the budget are paid for, at twice the whole step's time for all of it."""
    problem = search.problem
    assert problem.budget is not None
    budget, total = problem.budget, problem.total_cost or 1.0
    room = max(1, budget - problem.resident)

    def energy(peak: int, cost: float) -> float:
        return cost / total + 2 * max(0, peak - budget) / room

    return anneal(search, start, energy, hottest, STEPS // 2, fits=lambda c: c.peak <= budget)


def _improve(search: Search, start: Candidate, steps: int) -> Candidate:
    """Keep values again while it fits: dearest per byte first, in groups that halve when none fits."""
    budget, best, begin = search.problem.budget or 0, start, search.steps
    price = _price(search)
    size = max(1, len(search.values) // 4)
    while size:
        dropped = sorted((v for v in search.values if v not in best.keep), key=lambda v: (-price[v], v))
        improved = False
        for at in range(0, len(dropped), size):
            if search.steps - begin > steps:
                return best
            trial = search.attempt(best.keep.union(dropped[at : at + size]), best.hold)
            if trial.peak <= budget and trial.cost < best.cost:
                best, improved = trial, True
        if not improved or size > 1:
            size //= 2
    return best
