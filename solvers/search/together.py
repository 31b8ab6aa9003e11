"""The search with a link: keep, recompute and move, decided together, never worse than without moves.

First the problem is searched without the link. What that finds is a start of a second search, among policies that also
say which values stay on the host. Its other starts keep what a relaxation keeps, of this problem or of one without a
link and with a larger budget, and move as much of it as must leave, first what is not used for longest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

import numpy as np

from solvers.bounds.cost import relax
from solvers.bounds.peak import minimum_peak_bound
from solvers.bounds.relaxation import Relaxed
from solvers.problem import Problem
from solvers.protocol import Answer
from solvers.schedule import every_op_once, simulate
from solvers.search.annealing import Search, ready
from solvers.search.arrays import Ints
from solvers.search.effort import Effort, bar_of, effort_of
from solvers.search.evaluation import Candidate
from solvers.search.leanest import leanest_of
from solvers.search.lp_starts import lp_starts
from solvers.search.offload import MoveSearch
from solvers.search.policy import keep_only
from solvers.search.rounds import aim_of, anneal, cheapest, improved, infeasible, refuse, relaxed_starts

INFLATED = (0.05, 0.12, 0.2, 0.35, 0.6, 1.0)  # of the bytes up to the peak of every op once, added to the budget
QUICKLY = 0.1  # of the effort of the relaxations of inflated budgets
EACH = 2  # rounded relaxations of each inflated budget
ROUNDED = 4  # rounded relaxations with the link
ENOUGH = 1e-3  # a candidate within this share of the cost above the bound ends the search, unless there is a time limit
WALKING = 0.8  # of the work of a search without a link, what walks with moves take


def search_with_moves(problem: Problem, *, time_limit: float | None = None, progress: bool | None = None) -> Answer:
    """The search of `auto` where values may leave, for problems whose budget is below the peak of every op once.

    Takes about twice as long as the search without a link.
    """
    ready()
    efforts = [effort_of(problem, time_limit and time_limit * share) for share in (0.5, 1.0)]
    with bar_of(Effort(efforts[0].steps + efforts[1].steps), progress) as bar:
        plain = Search(problem.without_link(), bar.update)
        search = MoveSearch(problem, bar.update)
        without = _without_moves(plain, efforts[0])
        return _solve(search, without, efforts[1])


def _without_moves(plain: Search, effort: Effort) -> Candidate | None:
    assert plain.problem.budget is not None
    if minimum_peak_bound(plain.problem) > plain.problem.budget:
        return None
    aim = aim_of(plain, effort)
    return cheapest(plain.problem, improved(plain, aim, relaxed_starts(plain, aim), effort))


def _solve(search: MoveSearch, without: Candidate | None, effort: Effort) -> Answer:
    problem = search.problem
    assert problem.budget is not None
    refuse(search, minimum_peak_bound)
    aim = aim_of(search, effort)
    if effort.deadline is None:
        enough = aim.relaxed.bound + ENOUGH * (problem.total_cost + aim.relaxed.bound)
        aim = replace(aim, enough=enough)
    starts = [] if without is None else [without]
    best = cheapest(problem, starts)
    if best is None or best.extra > aim.enough:
        once = search.keep_only()
        for start in moving_starts(search, problem, aim.relaxed, aim.share):
            starts.append(start)
            if start.peak <= problem.budget and start.extra <= aim.enough:
                break
        starts += [] if once is None else [once]
        best = cheapest(problem, starts)
        if best is None or best.extra > aim.enough:
            best = cheapest(problem, anneal(search, aim, starts, effort.part(WALKING)))
    if best is None:
        leanest = leanest_of(search, effort_of(problem, None), enough=problem.budget)
        if leanest.peak > problem.budget:
            raise infeasible(search, leanest)
        best = cheapest(problem, anneal(search, aim, [leanest], effort)) or leanest
    note = "time ran out before the end of the search" if search.late else ""
    found = [search.judge(c.policy) for c in (best, without) if c is not None]
    schedules = [search.schedule(c) for c in found if c is not None and c.peak <= problem.budget]
    schedule = min(schedules, key=lambda s: simulate(problem, s).cost)
    return Answer(schedule, problem.total_cost + aim.relaxed.bound, note)


def moving_starts(search: MoveSearch, problem: Problem, relaxed: Relaxed, effort: float = 1.0) -> Iterator[Candidate]:
    """Policies that fit the problem's budget by moves, from relaxations; `effort` is a share of their work."""
    budget, effort = problem.budget or 0, QUICKLY * effort
    away = np.array([relaxed.away.get(v, 0.0) for v in range(len(problem.sizes))])
    order = np.argsort(-away[search.tables.value[search.movable]].round(2), kind="stable")
    for keep in islice(lp_starts(problem, relaxed, effort), ROUNDED):
        for gaps in (search.movable[order], search.movable):
            yield from _fitted(search, budget, keep, gaps)
    more = simulate(problem, every_op_once(problem)).peak - budget
    for share in INFLATED:
        inflated = problem.without_link().with_budget(budget + int(more * share))
        keeps: list[frozenset[int] | None] = [*islice(lp_starts(inflated, relax(inflated, effort), effort), EACH)]
        for kept in [*keeps, *([None] if share == 1 else [])]:
            yield from _fitted(search, budget, kept, search.movable)


def _fitted(search: MoveSearch, budget: int, keep: frozenset[int] | None, order: Ints) -> Iterator[Candidate]:
    """The policy that keeps some values and moves the fewest of them, in an order, that let it fit; or all of them."""
    policy = keep_only(search.problem, search.tables, keep)
    gaps = order[policy.keep[order] > 0]
    low, high = 0, len(gaps)
    while low < high:
        middle = (low + high) // 2
        candidate = search.away(policy, gaps[:middle], budget)
        if candidate is None:
            return
        if candidate.peak <= budget:
            high = middle
        else:
            low = middle + 1
    if (candidate := search.away(policy, gaps[:low], budget)) is not None:
        yield candidate
