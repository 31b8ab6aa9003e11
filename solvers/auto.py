"""The default solver: starts from relaxations and from segments, then rounds of annealing, judged by the exact replay.

A start is every op once, a segmentation as in `chen`, or what a relaxation of the problem keeps (`guides`): where that
is only a little above its own bound, as with room to spare it often is, nothing is left to do. Otherwise walks from the
most promising starts run side by side; the best of them go on, cooler and longer, until the work is spent. Work is
counted in simulated steps, never by a clock (unless that runs out), so that the answer depends on the problem alone.

A walk decides gap by gap, see `policy`; repeated blocks, found by their structure, also change together and copy from
one another, so that what works in one block spreads to the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from solvers.anneal import THREADS, Effort, Found, Search, Walk, energy_of, ready
from solvers.bounds import minimum_peak_bound, relax
from solvers.chen import candidates, cuts, keep_across
from solvers.compiled import Goal
from solvers.errors import InfeasibleError
from solvers.guides import guides
from solvers.problem import Problem
from solvers.progress import bar
from solvers.schedule import Answer, Schedule, every_op_once, simulate

EXACT = 8  # problems of no more ops are solved by `ilp`, whose model then holds every schedule that is worth it
STEPS = 80e6  # of each thread, without a time limit: 2 s; and as many for the lowest peak
STEPS_PER_OP = 45e3  # and for each op: 10 s for a decoder of 80 layers
CHANGES = 4000  # of each gap by a walk, at most: small problems are settled long before
ROUNDS = ((8, 0.01, 0.3), (4, 0.006, 0.3), (4, 0.003, 0.25), (2, 0.001, 0.15))  # walks, hottest, share of the work
COLDEST = 1e-3  # of the hottest
WARMED = 20  # changes of each gap that a walk needs to make good what its heat spoils; with fewer it begins cooler
RELAXING = 10.0  # seconds; with a longer time limit relaxations take more, with a shorter one less
OVER = 2.0  # energy of a peak above the budget by all the room there is; every op once more is 1
STRICTER = 4.0  # times OVER, where the most promising peak is above the budget
ENOUGH = 5e-4  # above the bound, as a share of the cost, is not worth a search
EXACTLY = 2e-5  # nor is this where a time limit says how much a search may take


def auto(problem: Problem, *, time_limit: float | None = None, progress: bool | None = None) -> Answer:
    """The best schedule found within the budget, never costlier than `chen`'s, with a proven bound on the cost.

    Args:
        problem: what to schedule; up to `EXACT` ops it is solved exactly.
        time_limit: seconds on two cores; None for about 2, and more for thousands of ops. It becomes a count of
            simulated steps; the clock itself only matters where the machine is slower than expected.
        progress: show a bar; None for only where a terminal is watching.

    Raises:
        InfeasibleError: nothing found fits; its `minimum` is a budget that succeeds.
    """
    once = every_op_once(problem)
    if problem.budget is None or simulate(problem, once).peak <= problem.budget:
        return Answer(once, problem.total_cost)
    if len(problem.ops) <= EXACT:
        from solvers.ilp import ilp  # which starts from what `search` finds

        return ilp(problem, time_limit=time_limit, progress=progress)
    return search(problem, time_limit=time_limit, progress=progress)


def search(problem: Problem, *, time_limit: float | None = None, progress: bool | None = None) -> Answer:
    """What `auto` does with problems of more than `EXACT` ops whose budget is below the peak of every op once."""
    ready()
    effort = effort_of(problem, time_limit)
    with bar_of(effort, progress) as bar:
        return _solve(Search(problem, bar.update), effort)


def _solve(search: Search, effort: Effort) -> Answer:
    problem = search.problem
    assert problem.budget is not None
    if (least := minimum_peak_bound(problem)) > problem.budget:
        raise _infeasible(search, leanest_of(search, effort), least)
    share = 1.0 if (left := effort.left()) is None else min(4.0, left / RELAXING)
    relaxed = relax(problem, share)
    bound = relaxed.bound
    slack = ENOUGH if effort.deadline is None else EXACTLY
    enough = bound + slack * (problem.total_cost + bound)
    goal = goal_of(problem)
    starts: list[Found] = []
    guided = (search.keep_only(keep) for keep in guides(problem, relaxed, share))
    for found in chained(guided, segments(search), iter([search.keep_only()])):
        starts.append(found)
        if found.peak <= problem.budget and found.extra <= enough:
            break
    best = _best(problem, starts)
    tight = best is None
    if tight:
        starts = [*chained(nested(search)), *starts]
    if best is None or best.extra > enough:
        # where no segments fit, perhaps nothing does: some time is left to find the leanest
        best = _anneal(search, goal, starts, effort.part(0.6 if tight else 1.0), enough)
    if best is None:
        best = leanest_of(search, effort, enough=problem.budget)
        if best.peak > problem.budget:
            raise _infeasible(search, best, least)
    if tight and best.extra > enough:
        best = _anneal(search, goal._replace(penalty=STRICTER * goal.penalty), [best], effort, enough) or best
    note = "time ran out before the end of the search" if search.late else ""
    return Answer(search.schedule(best.policy), problem.total_cost + bound, note)


def _infeasible(search: Search, leanest: Found, bound: int) -> InfeasibleError:
    return InfeasibleError(search.problem.budget or 0, leanest.peak, bound, search.schedule(leanest.policy))


@dataclass(frozen=True, slots=True)
class Minimum:
    """The leanest schedule that was found, its peak, and a proven lower bound on the peak of any; bytes."""

    schedule: Schedule
    peak: int
    bound: int


def minimum_peak(problem: Problem, *, time_limit: float | None = None, progress: bool | None = None) -> Minimum:
    """The schedule of the lowest peak that the search finds, whatever it costs; the budget is not looked at.

    Args:
        problem: what to schedule.
        time_limit: as for `auto`.
        progress: as for `auto`.
    """
    ready()
    effort = effort_of(problem, time_limit)
    with bar_of(effort, progress) as bar:
        found = Search(problem, bar.update)
        leanest = leanest_of(found, effort)
        return Minimum(found.schedule(leanest.policy), leanest.peak, minimum_peak_bound(problem))


def effort_of(problem: Problem, time_limit: float | None) -> Effort:
    default = Effort(STEPS + STEPS_PER_OP * len(problem.ops))
    return default if time_limit is None else Effort.within(time_limit)


def bar_of(effort: Effort, progress: bool | None) -> Any:
    """A bar for the steps of a search."""
    return bar("solving", progress, total=THREADS * effort.steps, unit=" steps", unit_scale=True)


def chained(*starts: Iterator[Found | None]) -> Iterator[Found]:
    return (found for each in starts for found in each if found is not None)


def segments(search: Search) -> Iterator[Found | None]:
    """What `chen` tries."""
    problem = search.problem
    return (search.keep_only(keep_across(problem, cuts(problem, k))) for k in candidates(problem))


def nested(search: Search) -> Iterator[Found | None]:
    """Segments inside segments: keep what crosses the outer cuts, hold what crosses the inner ones."""
    problem = search.problem
    for outer in (1, *candidates(problem)[::3]):
        keep = keep_across(problem, cuts(problem, outer), last=False)
        yield search.keep_only(keep)
        for inner in (3, 8, 20):
            at = cuts(problem, outer * inner)
            hold = keep_across(problem, at, last=False)
            yield search.keep_only(keep, hold)
            yield search.nest(keep, hold, at)


def goal_of(problem: Problem) -> Goal:
    budget = float(problem.budget or 0)
    room = max(1.0, budget - problem.resident)
    return Goal(1 / (problem.total_cost or 1.0), OVER / room, budget, budget, problem.resident)


def _best(problem: Problem, found: list[Found]) -> Found | None:
    fitting = [f for f in found if problem.budget is None or f.peak <= problem.budget]
    return min(fitting, key=lambda f: f.extra, default=None)


def _anneal(search: Search, goal: Goal, starts: list[Found], effort: Effort, enough: float) -> Found | None:
    """The best of rounds of walks, each from the best of the round before; None where none fits.

    They end when re-runs cost no more than `enough`.
    """
    ops = max(1, len(search.problem.ops))
    pool = sorted(starts, key=lambda f: energy_of(goal, f))
    # hot walks forget where they began; what every op once leads to is seldom what segments lead to
    pool = [*islice(pool, 3), starts[-1]]
    seed = 0
    found, best = list(starts), _best(search.problem, starts)
    for at, (walks, hot, share) in enumerate(ROUNDS):
        until = effort.until(share / sum(later for _, _, later in ROUNDS[at:]))
        steps, seconds = each_of(search, Effort(share * effort.steps, until), walks)
        hot *= min(1.0, steps / (WARMED * len(search.choices.gaps) * ops + 1))
        chosen = [pool[i % len(pool)] for i in range(walks)]
        round_ = [Walk(f.policy, hot, hot * COLDEST, steps, seconds, seed + i) for i, f in enumerate(chosen)]
        found += search.walk(round_, goal, goal.price * enough)
        seed += walks
        pool, best = sorted(found, key=lambda f: energy_of(goal, f)), _best(search.problem, found)
        while pool[0].peak > goal.budget:  # a little too much memory was the cheaper choice
            goal = goal._replace(penalty=STRICTER * goal.penalty)
            if best is None:
                break
            pool = sorted(found, key=lambda f: energy_of(goal, f))
        pool = pool[: max(1, walks // 2)]
        if best is not None and best.extra <= enough:
            break
    return best


def each_of(search: Search, effort: Effort, walks: int) -> tuple[float, float | None]:
    """Steps and seconds for each of the walks that share an effort."""
    left = effort.left()
    longest = CHANGES * len(search.choices.gaps) * len(search.problem.ops)
    return min(longest, effort.steps * THREADS / walks), None if left is None else left * THREADS / walks


def leanest_of(search: Search, effort: Effort, target: int = 0, enough: int = 0) -> Found:
    """The leanest start, annealed for its peak down to `target`; cost only breaks ties.

    The walks end at a peak of `enough`, and are the same for any: what one call has reached, another one reaches too.
    """
    problem = search.problem
    starts = [*chained(nested(search), segments(search), iter([search.keep_only()]))]
    best = min(starts, key=lambda f: (f.peak, f.extra))
    variable = max(1, best.peak - problem.resident)
    goal = Goal(1e-3 / (problem.total_cost or 1.0), 1 / variable, float(target), float("inf"), problem.resident)
    ops = max(1, len(problem.ops))
    steps = min(CHANGES * len(search.choices.gaps) * ops, effort.steps)
    walks = [Walk(best.policy, 0.02, 2e-5, steps / 2, effort.left(), seed) for seed in range(2 * THREADS)]
    return min((best, *search.walk(walks, goal, goal.penalty * enough)), key=lambda f: (f.peak, f.extra))
