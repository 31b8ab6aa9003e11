"""The mixed-integer program of rematerialization: Jain et al., "Checkmate" (MLSys 2020), generalised.

First runs keep the order of the ops; stage t ends with the first run of op t and begins with the re-runs before it. The
model decides together, exactly, which ops run again and when each value is freed, as long as the problem is small; a
large one is coarsened first, and the answer is trimmed under the exact simulator.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

from solvers.bounds.peak import minimum_peak_bound
from solvers.exact.checkmate_model import Position, build, nonzeros, positions
from solvers.exact.coarsen import Coarse, coarsen, expand, prune, trim
from solvers.exact.highs import Result, Tick, solve
from solvers.problem import Problem
from solvers.progress import bar
from solvers.protocol import Answer
from solvers.schedule import InfeasibleError, Schedule, every_op_once, simulate
from solvers.search.chen import chen
from solvers.search.leanest import minimum_peak
from solvers.search.rounds import search

TIME_LIMIT = 30.0  # seconds
# Rounds a stage: with one, an op runs at most once a stage and in index order (Checkmate's own model). That misses
# the optimum of 3 % of adversarial graphs of 8 ops and 7 % of those of 10; two rounds miss 0.05 % and 0.2 %, three
# none and 1 in 34,000, four none (112,200 and 34,453 random graphs, against an exhaustive search).
ROUNDS = ((10, 5), (20, 2))  # (up to so many ops, rounds); 1 beyond
# Nonzeros of a model that HiGHS closes, or comes near to closing, in 30 s on one core, by measurement: 51 ops have
# 30,000 and take 8 s, 81 ops 100,000 and 30 s leave a gap of 0.02 %, beyond that the gap grows fast.
NONZEROS = 80_000
TRIES = 4  # coarse budgets tried, where there is time: the coarse model misjudges the peak a little, either way


def ilp(problem: Problem, *, time_limit: float | None = None, progress: bool | None = None) -> Answer:
    """The cheapest schedule within the budget: exact for small problems, coarsened for large ones.

    Up to 10 ops the model has five rounds a stage, which is the whole space of schedules as far as exhaustive search
    could tell; up to 20 ops two; beyond that one, as in Checkmate. A model too large for the time limit is coarsened;
    in it backward ops run once, and nothing is re-run in the forward pass. No answer is costlier than `chen`'s.

    The model of n ops has O(n^2) 0/1 variables and up to O(n^3) nonzeros; solving it is exponential in the worst case.
    Where the backward pass runs twice, the search answers instead. It moves no values: a link only takes its bound.
    With a time limit that cuts the search short, the answer depends on the speed of the machine.

    Args:
        problem: what to schedule; without a budget, every op runs once.
        time_limit: seconds in all, about; None for 30.
        progress: show a bar of the time against the limit; None for only where a terminal is watching.

    Returns:
        The schedule, with a note where it was coarsened or cut short. Its bound holds for every schedule, those outside
        the model too, so that it is low where the model has few rounds; it is 0 where the problem was coarsened.

    Raises:
        InfeasibleError: no schedule within the budget exists, or the search reached none; its `minimum` is a budget
            that succeeds under any time limit: it is looked for with an effort of its own, whatever the limit is.

    References:
        P. Jain et al., "Checkmate: Breaking the Memory Wall with Optimal Tensor Rematerialization", MLSys 2020.
    """
    once = every_op_once(problem)
    if problem.budget is None or simulate(problem, once).peak <= problem.budget:
        return Answer(once, problem.total_cost)
    if problem.link is not None:
        return _without_moves(problem, time_limit, progress)
    limit = TIME_LIMIT if time_limit is None else time_limit
    if problem.waiting is not None and problem.waiting.again is not None:
        answer = search(problem, time_limit=time_limit, progress=progress)
        return replace(
            answer, note=f"{answer.note} Searched: the program does not model a second backward pass.".strip()
        )
    deadline = time.monotonic() + limit
    start = _start(problem, 0.3 * limit)
    leanest = once
    if start is None:
        leanest = _lean(problem)
        start = leanest if simulate(problem, leanest).peak <= problem.budget else None
    laid = positions(problem, _rounds(problem))
    with _bar(limit, progress) as tick:
        if nonzeros(problem, laid) <= _capacity(limit):
            return _exact(problem, laid, start, leanest, deadline, tick)
        return _coarse(problem, start, leanest, deadline, tick)


def _without_moves(problem: Problem, time_limit: float | None, progress: bool | None) -> Answer:
    """The answer without the link: valid with it, too, but schedules that move values may be below its bounds."""
    try:
        answer = ilp(problem.without_link(), time_limit=time_limit, progress=progress)
    except InfeasibleError as e:
        raise InfeasibleError(e.budget, e.minimum, minimum_peak_bound(problem), e.schedule) from None
    return replace(answer, bound=0.0, note=f"{answer.note} The program moves no values.".strip())


def _capacity(seconds: float) -> float:
    """Nonzeros of the largest model worth building for a search of so many seconds."""
    return NONZEROS * math.sqrt(seconds / TIME_LIMIT)


def _rounds(problem: Problem) -> int:
    return next((rounds for most, rounds in ROUNDS if len(problem.ops) <= most), 1)


def _start(problem: Problem, seconds: float) -> Schedule | None:
    """The cheapest schedule that heuristics reach within the budget in so many seconds; None where none fits."""
    assert problem.budget is not None
    unlimited = problem.with_budget(None)
    schedules = [
        every_op_once(problem),
        minimum_peak(problem, time_limit=seconds / 3, progress=False).schedule,
        chen(unlimited),
    ]
    for solver in (lambda p: search(p, time_limit=seconds / 3, progress=False).schedule, chen):
        with suppress(InfeasibleError):
            schedules.append(solver(problem))
    fitting = [schedule for schedule in schedules if simulate(unlimited, schedule).peak <= problem.budget]
    return min(fitting, key=lambda schedule: simulate(unlimited, schedule).cost, default=None)


def _lean(problem: Problem) -> Schedule:
    """The leanest schedule that heuristics reach, the same whatever the time limit."""
    found = (minimum_peak(problem, progress=False).schedule, chen(problem.with_budget(None)))
    return min(found, key=lambda schedule: simulate(problem, schedule).peak)


def _infeasible(problem: Problem, leanest: Schedule) -> InfeasibleError:
    assert problem.budget is not None
    return InfeasibleError(problem.budget, simulate(problem, leanest).peak, minimum_peak_bound(problem), leanest)


def _exact(
    problem: Problem,
    laid: tuple[Position, ...],
    start: Schedule | None,
    leanest: Schedule,
    deadline: float,
    tick: Tick,
) -> Answer:
    """Solve the whole model; raise with the lowest peak there is where it has no solution."""
    assert problem.budget is not None
    result, best = _within(problem, laid, start, deadline, tick)
    if best is None:
        best = min(leanest, _leanest(problem, laid), key=lambda schedule: simulate(problem, schedule).peak)
        if simulate(problem, best).peak > problem.budget:
            raise _infeasible(problem, best)
    note = "" if result.status in ("optimal", "infeasible") else "time ran out before the optimum was proven"
    bound = min(result.bound, _outside(problem)) if result.status in ("optimal", "feasible") else 0.0
    return Answer(best, bound, note)


def _within(
    problem: Problem, laid: tuple[Position, ...], start: Schedule | None, deadline: float, tick: Tick
) -> tuple[Result, Schedule | None]:
    """Solve a model, judge its answer by `simulate`, and take the better of it and `start`.

    The solver's arithmetic has tolerances. Where its answer is over the budget by some bytes, it solves again with
    that much less.
    """
    assert problem.budget is not None
    capacity = problem.budget
    while True:
        model = build(problem, laid, capacity)
        result = solve(problem, model, deadline - time.monotonic(), start, tick)
        if result.steps is None:
            return result, start
        schedule = Schedule(result.steps)
        timeline = simulate(problem, schedule)
        if timeline.peak <= problem.budget:
            break
        if time.monotonic() > deadline:
            return result, start
        capacity -= max(1, timeline.peak - problem.budget)
    if start is not None and simulate(problem, start).cost < timeline.cost:
        schedule = start
    return result, schedule


def _outside(problem: Problem) -> float:
    """A lower bound on the cost of the schedules that the model leaves out.

    With R rounds a stage, those have a stage of R + 1 or more, each of at least one re-run.
    """
    again = sorted(op.cost for op in problem.ops if op.recomputable and op.writes)
    return problem.total_cost + sum(again[:1]) * (_rounds(problem) + 1)


def _leanest(problem: Problem, laid: tuple[Position, ...]) -> Schedule:
    """The schedule of the lowest peak that the model of a small problem can say, however long that takes."""
    if len(problem.ops) > ROUNDS[0][0]:
        return every_op_once(problem)
    steps = solve(problem, build(problem, laid, None), TIME_LIMIT).steps
    return every_op_once(problem) if steps is None else Schedule(steps)


def _coarse(problem: Problem, start: Schedule | None, leanest: Schedule, deadline: float, tick: Tick) -> Answer:
    """Contract, solve, expand and trim, under ever larger coarse budgets while time allows; keep the cheapest."""
    assert problem.budget is not None
    schedules = [] if start is None else [start, trim(problem, start, time.monotonic() + 0.1 * _left(deadline))]
    coarse = _fitting(problem, _left(deadline))
    room = problem.budget - problem.resident
    finished = True
    share = 1.0
    for _ in range(TRIES):
        until = time.monotonic() + 0.85 * _left(deadline)
        small = coarse.problem.with_budget(problem.resident + int(room * share))
        best = _start(small, 0.3 * _left(until) + 0.01)
        if best is not None:
            best = trim(small, best, time.monotonic() + 0.1 * _left(until))
        laid = positions(small, 1, small.boundary)
        result, best = _within(small, laid, best, time.monotonic() + 0.6 * _left(until), tick)
        if result.status not in ("optimal", "infeasible"):
            finished = False
            if best is not None:
                best = _neighbourhoods(small, laid, best, until, tick)
        fits = True
        if best is not None:
            fine = expand(coarse, best)
            fits = simulate(problem, fine).peak <= problem.budget
            schedules.append(trim(problem, fine, time.monotonic() + 0.5 * _left(deadline)))
        share *= 1.06 if fits else 0.93
        if len(coarse.problem.ops) == len(problem.ops) or _left(deadline) < 5.0:
            break
    costs = [(t.cost, n) for n, s in enumerate(schedules) if (t := simulate(problem, s)).peak <= problem.budget]
    if not costs:
        raise _infeasible(problem, leanest)
    if len(coarse.problem.ops) < len(problem.ops):
        note = f"coarsened {len(problem.ops)} ops to {len(coarse.problem.ops)}"
    else:
        note = "backward ops run once"
    return Answer(
        schedules[min(costs)[1]], 0.0, note if finished else f"{note}; time ran out before the end of the search"
    )


def _fitting(problem: Problem, seconds: float) -> Coarse:
    """The finest coarse problem whose model is small enough for the time."""
    backward = min(len(problem.ops) - problem.boundary, 150)
    while True:
        # The forward groups decide which values are kept: they stay finer than the backward ones.
        coarse = coarsen(problem, 2 * backward, backward)
        laid = positions(coarse.problem, 1, coarse.problem.boundary)
        if backward <= 6 or nonzeros(coarse.problem, laid) <= _capacity(seconds):
            return coarse
        backward = int(backward * 0.87)


def _neighbourhoods(
    problem: Problem, laid: tuple[Position, ...], best: Schedule, deadline: float, tick: Tick
) -> Schedule:
    """Free the re-runs of a window of forward ops, solve, and move on to the next window, round and round."""
    assert problem.budget is not None
    width = max(4, problem.boundary // 12)
    model = build(problem, laid, problem.budget)
    cost, at = simulate(problem, best).cost, 0
    while (left := _left(deadline)) > 0.2:
        free = {(at + k) % problem.boundary for k in range(width)}
        at = (at + width // 2) % problem.boundary
        steps = solve(problem, model, min(left, 2.0), best, tick, free).steps
        if steps is None:
            break
        timeline = simulate(problem, pruned := prune(problem, Schedule(steps)))
        if timeline.peak <= problem.budget and timeline.cost < cost:
            best, cost = pruned, timeline.cost
    return best


def _left(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())


@contextmanager
def _bar(limit: float, progress: bool | None) -> Iterator[Tick]:
    """A bar of the seconds against the limit, with the best answer and the bound so far of the model being solved."""
    began = time.monotonic()
    words = "{desc}: {n:.0f} of {total:.0f} s |{bar}| {postfix}"
    with bar("solving", progress, total=round(limit, 1), unit="s", bar_format=words) as shown:

        def tick(best: float, bound: float) -> None:
            shown.set_postfix_str(f"best {best:.6g}, bound {bound:.6g}", refresh=False)
            shown.update(min(limit, time.monotonic() - began) - shown.n)

        yield tick
