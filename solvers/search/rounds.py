"""The search: starts from relaxations and from segments, then rounds of annealing, judged by the exact replay.

A start is the schedule of every op once, a segmentation as in `chen`, or the values that a relaxation of the problem
keeps (`lp_starts`). Where the best start costs little more than the relaxation's bound, as with room to spare it often
does, the search is over. Otherwise walks from the most promising starts run side by side; the best of them go on,
cooler and longer, until the work is spent. Work is counted in simulated steps, not by a clock (unless a time limit runs
out), so that the answer depends on the problem alone.

A walk decides gap by gap, see `policy`; repeated blocks, which are known by their structure, also change together and
copy decisions from one another, so that a good decision in one block spreads to the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from solvers.bounds.cost import relax
from solvers.bounds.peak import minimum_peak_bound
from solvers.problem import Problem
from solvers.protocol import Answer
from solvers.schedule import InfeasibleError
from solvers.search.annealing import Search, Walk, energy_of, ready
from solvers.search.arrays import Goal
from solvers.search.effort import Effort, bar_of, each_of, effort_of
from solvers.search.evaluation import Candidate
from solvers.search.leanest import leanest_of
from solvers.search.lp_starts import lp_starts
from solvers.search.starts import chained, nested, segments

ROUNDS = ((8, 0.01, 0.3), (4, 0.006, 0.3), (4, 0.003, 0.25), (2, 0.001, 0.15))  # walks, hottest, share of the work
COLDEST = 1e-3  # the last temperature of a walk, as a share of its first
SEED = 0  # of the first walk; each further walk has the next number
POOL = 3  # starts of least energy that the first round walks from, beside every op once
WARMED = 20  # changes of each gap that a walk needs to repair the damage of its heat; with fewer it begins cooler
RELAXING = 10.0  # seconds; with a longer time limit relaxations take more, with a shorter one less
OVER = 2.0  # energy of a peak above the budget by all the room there is; the cost of every op once is 1
STRICTER = 4.0  # OVER is multiplied by it where the most promising peak is above the budget
ENOUGH = 5e-4  # a candidate within this share of the cost above the bound ends the search
EXACTLY = 2e-5  # the same where a time limit says how much a search may take
SETTLED = 2e-3  # without a time limit, the same once a round of walks has found nothing better
TIGHT = 0.6  # share of the effort for a first schedule that fits, where no start fits


def search(problem: Problem, *, time_limit: float | None = None, progress: bool | None = None) -> Answer:
    """The search of `auto`, for problems whose budget is below the peak of every op once."""
    if time_limit is not None:
        ready()
    effort = effort_of(problem, time_limit)
    with bar_of(effort, progress) as bar:
        return _solve(Search(problem, bar.update), effort)


def _solve(search: Search, effort: Effort) -> Answer:
    problem = search.problem
    assert problem.budget is not None
    whole = effort_of(problem, None)  # for the least budget, so that what is named is reached under any time limit
    if (least := minimum_peak_bound(problem)) > problem.budget:
        raise _infeasible(search, leanest_of(search, whole), least)
    share = 1.0 if (left := effort.left()) is None else min(4.0, left / RELAXING)
    relaxed = relax(problem, share)
    bound = relaxed.bound
    slack = ENOUGH if effort.deadline is None else EXACTLY
    enough = bound + slack * (problem.total_cost + bound)
    settled = bound + SETTLED * (problem.total_cost + bound) if effort.deadline is None else enough
    goal = goal_of(problem)
    starts: list[Candidate] = []
    relaxations = (search.keep_only(keep) for keep in lp_starts(problem, relaxed, share))
    for start in chained(relaxations, segments(search), iter([search.keep_only()])):
        starts.append(start)
        if start.peak <= problem.budget and start.extra <= enough:
            break
    best = _cheapest(problem, starts)
    tight = best is None
    if tight:
        starts = [*chained(nested(search)), *starts]
    if best is None or best.extra > enough:
        # where no start fits, perhaps no schedule does: some effort is left to look for the leanest
        best = _anneal(search, goal, starts, effort.part(TIGHT if tight else 1.0), enough, settled)
    if best is None:
        best = leanest_of(search, whole, enough=problem.budget)
        if best.peak > problem.budget:
            raise _infeasible(search, best, least)
    if tight and best.extra > enough:
        goal = goal._replace(penalty=STRICTER * goal.penalty)
        best = _anneal(search, goal, [best], effort, enough, settled) or best
    note = "time ran out before the end of the search" if search.late else ""
    return Answer(search.schedule(best.policy), problem.total_cost + bound, note)


def _infeasible(search: Search, leanest: Candidate, bound: int) -> InfeasibleError:
    return InfeasibleError(search.problem.budget or 0, leanest.peak, bound, search.schedule(leanest.policy))


def goal_of(problem: Problem) -> Goal:
    """The goal of the cheapest schedule within the budget."""
    budget = float(problem.budget or 0)
    room = max(1.0, budget - problem.resident)
    return Goal(1 / (problem.total_cost or 1.0), OVER / room, budget, budget, problem.resident)


def _cheapest(problem: Problem, candidates: Sequence[Candidate]) -> Candidate | None:
    fitting = [c for c in candidates if problem.budget is None or c.peak <= problem.budget]
    return min(fitting, key=lambda c: c.extra, default=None)


def _anneal(
    search: Search, goal: Goal, starts: list[Candidate], effort: Effort, enough: float, settled: float
) -> Candidate | None:
    """The best of rounds of walks, each from the best candidates of the round before; None where none fits.

    The rounds end when a candidate fits whose re-runs cost no more than `enough`; or no more than `settled`, where a
    round found nothing cheaper.
    """
    problem, gaps = search.problem, len(search.choices.gaps)
    pool = sorted(starts, key=lambda c: energy_of(goal, c))
    # hot walks forget where they began; every op once leads to other schedules than segments do
    pool = [*islice(pool, POOL), starts[-1]]
    seed = SEED
    candidates, best = list(starts), _cheapest(problem, starts)
    for at, (walks, hot, share) in enumerate(ROUNDS):
        until = effort.until(share / sum(later for _, _, later in ROUNDS[at:]))
        steps, seconds = each_of(problem, gaps, Effort(share * effort.steps, until), walks)
        hot *= min(1.0, steps / (WARMED * gaps * len(problem.ops) + 1))
        chosen = [pool[i % len(pool)] for i in range(walks)]
        round_ = [Walk(c.policy, hot, hot * COLDEST, steps, seconds, seed + i) for i, c in enumerate(chosen)]
        candidates += search.walk(round_, goal, goal.price * enough)
        seed += walks
        before = best
        pool, best = sorted(candidates, key=lambda c: energy_of(goal, c)), _cheapest(problem, candidates)
        while pool[0].peak > goal.budget:  # the energy preferred a peak above the budget
            goal = goal._replace(penalty=STRICTER * goal.penalty)
            if best is None:
                break
            pool = sorted(candidates, key=lambda c: energy_of(goal, c))
        pool = pool[: max(1, walks // 2)]
        if best is not None and best.extra <= (settled if best is before else enough):
            break
    return best
