"""The search: starts from relaxations and from segments, then rounds of annealing, judged by the exact replay.

A start is the schedule of every op once, a segmentation as in `chen`, or the values that a relaxation of the problem
keeps (`lp_starts`). Where the best start costs little more than the relaxation's bound, as with room to spare it often
does, the search is over. Otherwise walks from the most promising starts run side by side; the best of them go on,
cooler and longer, until the work is spent. Work is counted in simulated steps, not by a clock (unless a time limit runs
out), so that the answer depends on the problem alone.

A walk decides gap by gap, see `policy`; repeated blocks, which are known by their structure, also change together and
copy decisions from one another, so that a good decision in one block spreads to the others. Where a graph is so large
that a walk changes each gap only a few times, the first rounds decide on several blocks at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice

from solvers.bounds.cost import relax
from solvers.bounds.peak import first_runs_bound, minimum_peak_bound
from solvers.bounds.relaxation import Relaxed
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
TIED = (8, 4, 2, 1)  # repeated blocks that the walks of a round decide on together, at most
SEED = 0  # of the first walk; each further walk has the next number
POOL = 3  # starts of least energy that the first round walks from, beside every op once
WARMED = 20  # changes of each gap that a walk needs to repair the damage of its heat; with fewer it begins cooler
RELAXING = 10.0  # seconds; with a longer time limit relaxations take more, with a shorter one less
OVER = 2.0  # energy of a peak above the budget by all the room there is; the cost of every op once is 1
STRICTER = 4.0  # OVER is multiplied by it where the most promising peak is above the budget
ENOUGH = 5e-4  # a candidate within this share of the cost above the bound ends the search
EXACTLY = 2e-5  # the same where a time limit says how much a search may take
SETTLED = 2e-3  # without a time limit, the same once a round of walks has found nothing better
BRIEFLY = 0.25  # share of the usual work of relaxations for a search that is to be brief
SHORTLY = 0.1  # share of the effort for such a search, where no start fits
TIGHT = 0.6  # share of the effort for a first schedule that fits, where no start fits


def search(
    problem: Problem, *, time_limit: float | None = None, progress: bool | None = None, brief: bool = False
) -> Answer:
    """The search of `auto`, for problems whose budget is below the peak of every op once.

    `brief` ends it at the cheapest start that fits, or where none does, after a tenth of the usual walks.
    """
    if time_limit is not None and not brief:
        ready()
    effort = effort_of(problem, time_limit)
    with bar_of(effort, progress) as bar:
        return _solve(Search(problem, bar.update), effort, brief=brief)


def _solve(search: Search, effort: Effort, *, brief: bool) -> Answer:
    problem = search.problem
    assert problem.budget is not None
    refuse(search, first_runs_bound)
    aim = aim_of(search, effort, BRIEFLY) if brief else aim_of(search, effort)
    starts = relaxed_starts(search, replace(aim, enough=aim.settled) if brief else aim)
    best = cheapest(problem, starts)
    if tight := best is None:
        refuse(search, minimum_peak_bound)
    if brief:
        effort = effort.part(SHORTLY)
    found = starts if brief and best is not None else improved(search, aim, starts, effort)
    if (best := cheapest(problem, found)) is None:
        best = leanest_of(search, effort_of(problem, None), enough=problem.budget)
        if best.peak > problem.budget:
            raise infeasible(search, best)
    if tight and best.extra > aim.enough:
        goal = aim.goal._replace(penalty=STRICTER**2 * aim.goal.penalty)
        near = min(found, key=lambda c: energy_of(goal, c))  # it may cost much less than what fits by a hair
        best = cheapest(problem, anneal(search, replace(aim, goal=goal), [near, best], effort)) or best
    note = "time ran out before the end of the search" if search.late else ""
    bound = problem.total_cost + aim.relaxed.bound
    return Answer(search.schedule(best), bound, note, brief=brief and best.extra > aim.enough)


@dataclass(frozen=True, slots=True)
class Aim:
    """What a search is after: a goal, its relaxation, and the costs of re-runs that end it.

    Attributes:
        goal: the energy.
        relaxed: the relaxation, whose bound is one on the cost of re-runs.
        share: of the usual work, what relaxations take.
        enough: a candidate of this cost ends the search.
        settled: the same, once a round of walks has found nothing better.
    """

    goal: Goal
    relaxed: Relaxed
    share: float
    enough: float
    settled: float


def aim_of(search: Search, effort: Effort, most: float = 4.0) -> Aim:
    """The aim for a problem with a budget; `most` is the largest share of the usual work that relaxations may take."""
    problem = search.problem
    share = min(most, 1.0 if (left := effort.left()) is None else left / RELAXING)
    relaxed = relax(problem, share)
    bound = relaxed.bound
    slack = ENOUGH if effort.deadline is None else EXACTLY
    enough = bound + slack * (problem.total_cost + bound)
    settled = bound + SETTLED * (problem.total_cost + bound) if effort.deadline is None else enough
    return Aim(goal_of(problem), relaxed, share, enough, settled)


def relaxed_starts(search: Search, aim: Aim) -> list[Candidate]:
    """Starts from relaxations, segments and every op once, up to the first one that is good enough."""
    starts: list[Candidate] = []
    relaxations = (search.keep_only(keep) for keep in lp_starts(search.problem, aim.relaxed, aim.share))
    for start in chained(relaxations, segments(search), iter([search.keep_only()])):
        starts.append(start)
        if start.peak <= aim.goal.budget and start.extra <= aim.enough:
            break
    return starts


def improved(search: Search, aim: Aim, starts: list[Candidate], effort: Effort) -> list[Candidate]:
    """Some starts, and what walks from them find, unless one of them is good enough."""
    best = cheapest(search.problem, starts)
    if best is not None and best.extra <= aim.enough:
        return starts
    if best is None:
        starts = [*chained(nested(search)), *starts]
    # where no start fits, perhaps no schedule does: some effort is left to look for the leanest
    return anneal(search, aim, starts, effort.part(TIGHT if best is None else 1.0))


def refuse(search: Search, bound: Callable[[Problem], int]) -> None:
    """Raise InfeasibleError where a bound on the peak is above the budget.

    The leanest schedule is searched with the default effort, so that what is named is reached under any time limit.
    """
    problem = search.problem
    assert problem.budget is not None
    if bound(problem) > problem.budget:
        raise infeasible(search, leanest_of(search, effort_of(problem, None)))


def infeasible(search: Search, leanest: Candidate) -> InfeasibleError:
    """The error that no schedule fits, with the leanest one."""
    problem = search.problem
    return InfeasibleError(problem.budget or 0, leanest.peak, minimum_peak_bound(problem), search.schedule(leanest))


def goal_of(problem: Problem) -> Goal:
    """The goal of the cheapest schedule within the budget."""
    budget = float(problem.budget or 0)
    room = max(1.0, budget - problem.resident)
    return Goal(1 / (problem.total_cost or 1.0), OVER / room, budget, budget, problem.resident)


def cheapest(problem: Problem, candidates: Sequence[Candidate]) -> Candidate | None:
    """The cheapest of the candidates that fit the budget; None where none does."""
    fitting = [c for c in candidates if problem.budget is None or c.peak <= problem.budget]
    return min(fitting, key=lambda c: c.extra, default=None)


def anneal(search: Search, aim: Aim, starts: list[Candidate], effort: Effort) -> list[Candidate]:
    """Some starts, and what rounds of walks find, each from the best candidates of the round before.

    As long as none fits, walks come back with what nearly does, and the next go on from there, and from the leanest
    starts anew: where the budget is tight, schedules that fit are few, and far from any start. The rounds end when a
    candidate fits whose re-runs cost no more than `aim.enough`; or no more than `aim.settled`, where a round found
    nothing cheaper.
    """
    problem, gaps, goal = search.problem, len(search.choices.gaps), aim.goal
    pool = sorted(starts, key=lambda c: energy_of(goal, c))
    # hot walks forget where they began; every op once leads to other schedules than segments do
    pool = [*islice(pool, POOL), starts[-1]]
    seed = SEED
    candidates, best = list(starts), cheapest(problem, starts)
    for at, (walks, hot, share) in enumerate(ROUNDS):
        until = effort.until(share / sum(later for _, _, later in ROUNDS[at:]))
        steps, seconds = each_of(problem, gaps, Effort(share * effort.steps, until), walks)
        needed = WARMED * gaps * len(problem.ops) + 1
        hot *= min(1.0, steps / needed)
        tied = min(TIED[at], math.ceil(needed / max(1.0, steps)))  # so many times fewer decisions need what there is
        last = at == len(ROUNDS) - 1
        ceiling = goal.budget if best is not None or last else math.inf
        chosen = [pool[i % len(pool)] for i in range(walks)]
        round_ = [Walk(c.policy, hot, hot * COLDEST, steps, seconds, seed + i, tied) for i, c in enumerate(chosen)]
        candidates += search.walk(round_, goal._replace(ceiling=ceiling), goal.price * aim.enough)
        seed += walks
        before = best
        pool, best = sorted(candidates, key=lambda c: energy_of(goal, c)), cheapest(problem, candidates)
        while pool[0].peak > goal.budget:  # the energy preferred a peak above the budget
            goal = goal._replace(penalty=STRICTER * goal.penalty)
            pool = sorted(candidates, key=lambda c: energy_of(goal, c))
            if best is None:
                break
        pool = pool[: max(1, walks // 2)]
        if best is None:
            lean = sorted(starts, key=lambda c: energy_of(goal, c))[: len(pool)]
            # the last round is too cold to repair a peak
            pool = lean if at == len(ROUNDS) - 2 else [*chain.from_iterable(zip(pool, lean, strict=False))]
        if best is not None and best.extra <= (aim.settled if best is before else aim.enough):
            break
    return candidates
