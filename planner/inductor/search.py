"""Solve, emit, look, solve again: a schedule of fused ops whose exact peak is within the budget."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import starmap
from math import inf

from planner.capture.joint_graph import tensors
from planner.capture.regions.region import Region
from planner.core.recipe import Settings
from planner.costs.measured_ops import measure
from planner.costs.ops import CONVOLUTIONS
from planner.errors import PlannerError
from planner.inductor.trials import Trial, Trials, trials_of
from planner.requests.request import Request
from solvers import InfeasibleError, Schedule, Solution, minimum_peak, simulate, solve

ROUNDS = 3  # of solving, and looking at what Inductor makes of the schedule
ROOM = 0.05  # of the budget: what is left is not looked for again, nor is what can save no more: a look takes seconds
# steps of a schedule that may come together in the code: few kernels, and no more memory than is modelled
WIDE, NARROW = 6, 1
# convolutions have the layouts of eager mode; for channels last, Inductor copies their weights, and keeps the copies
PLAIN = ("layout_optimization", False)

Tried = tuple[Schedule, int]  # and how near each other steps come together
Found = tuple[Trials, Trial, Trial, Solution]  # the best trial, that of Inductor's own partition, what the solver said


def find_in_layouts(trials: Trials, first: Callable[[Trials], Iterable[Tried]]) -> Found:
    """As `find`, in the layouts in which the plan is the fastest, and with the trials that it is of.

    A step that takes more than its budget may take less in `PLAIN` layouts. Convolutions may take more time in these,
    or less: the machine's own kernels tell, which are timed. Where nothing can be timed, the schedule alone counts.

    Args:
        trials: the step as it is.
        first: of such trials, schedules to try before the solver is asked.

    Raises:
        TooSmall: the leanest schedule is above the budget.
    """
    if (plain := _plain(trials)) is None:
        return trials, *find(trials, first(trials))
    expected = {each.request.settings: _expected(each) for each in (plain, trials)}
    found, error = None, TooSmall(trials.own)
    for each in sorted((plain, trials), key=lambda each: (expected[each.request.settings], each.own.peak)):
        otherwise = expected[each.request.settings]
        if otherwise == inf and error.leanest is not trials.own:
            break
        if found is not None and _takes(found) <= otherwise * (1 + ROOM):
            break
        try:
            new = each, *find(each, first(each))
        except TooSmall as e:
            error = min(error, e, key=lambda error: error.leanest.peak)
        else:
            found = new if found is None else min(found, new, key=_takes)
    if found is None:
        raise error
    return found


def _plain(trials: Trials) -> Trials | None:
    """The trials of a step in `PLAIN` layouts, where it takes more than its budget as it is, and less in these.

    Where convolutions take and make too few bytes to matter, that is not tried.
    """
    request, own = trials.request, trials.own.peak
    if own <= request.budget_bytes or PLAIN[0] in dict(request.settings):
        return None
    if sum(_convolved_bytes(part.fused.fine) for part in trials.parts if part is not None) <= ROOM * own:
        return None
    sources = [None if part is None else part.source for part in trials.parts]
    request = replace(request, settings=plainly(request))
    plain = trials_of(request, trials.graph, sources, trials.lower, trials.tried)
    return plain if plain.own.peak < own else None


def _expected(trials: Trials) -> float:
    """Estimated seconds of the plan, by the model of memory; infinite where that knows none."""
    if trials.own.peak <= trials.request.budget_bytes:
        return trials.own.seconds + _convolving(trials)
    solved = _solved(trials, trials.request.budget_bytes)
    return inf if solved is None else solved.timeline.cost + _convolving(trials)


def _takes(found: Found) -> float:
    return found[1].seconds + _convolving(found[0])


def _convolving(trials: Trials) -> float:
    """Seconds that the convolutions of a step take, each run once, as they are measured; 0 where they cannot be."""
    looks = [part.default for part in trials.parts if part is not None]
    launched = [launch.call for look in looks for launch in look.run.launches if launch.call is not None]
    calls = [call for call in launched if call.target in CONVOLUTIONS]
    if (here := trials.request.measure_on) is None:
        return 0.0
    measured = measure(calls, here, timed=True, progress=trials.request.options.progress)
    return sum(measured[call.key].seconds or 0.0 for call in calls if call.key in measured)


def _convolved_bytes(region: Region) -> int:
    """Bytes of what convolutions take and make: what copies of it in another layout can hold at once."""
    nodes = {x for op in region.ops if op.node.target in CONVOLUTIONS for x in (op.node, *op.node.all_input_nodes)}
    return sum(t.nbytes for node in nodes for t in tensors(node))


def plainly(request: Request) -> Settings:
    """A request's settings of Inductor, with `PLAIN` layouts."""
    return tuple(sorted((*request.settings, PLAIN)))


def find(trials: Trials, first: Iterable[Tried]) -> tuple[Trial, Trial, Solution]:
    """The fastest trial within the budget, that of Inductor's own partition, and what the solver said.

    Inductor's own is taken where it is within the budget: the step is then what torch.compile runs without a plan. Else
    schedules are looked at as they are fused widely, and narrowly where that takes too much. The solver's model of
    memory is not exact: it is given less, or more, by as much as the exact peak of its last schedule was off.

    Args:
        trials: the step.
        first: schedules to try before the solver is asked.

    Raises:
        TooSmall: the leanest schedule is above the budget.
    """
    budget = trials.request.budget_bytes
    own = trials.own
    best = own if own.peak <= budget else next((t for t in starmap(trials.trial, first) if t.peak <= budget), None)
    if best is not None:
        return best, own, _solution(trials, best, own, "", 0.0)
    note, seconds, target = "", 0.0, budget
    tried: list[Trial] = []
    for _ in range(ROUNDS):
        found = _solved(trials, target)
        if found is None or any(t.schedule == found.schedule for t in tried):
            break
        note, seconds = found.note, seconds + found.seconds
        before = best_of(tried, budget)
        for near in (WIDE, NARROW):
            tried.append(trials.trial(found.schedule, near))
            if tried[-1].peak <= budget:
                break
        left = budget - tried[-1].peak
        if before is not None or 0 <= left <= ROOM * budget:
            break
        target = found.timeline.peak + left
    best = best_of(tried, budget) or _lean(trials, [own, *tried])
    return best, own, _solution(trials, best, own, note, seconds)


def best_of(trials: Sequence[Trial], budget: int) -> Trial | None:
    """The fastest trial within a budget, by its estimate; None where none is."""
    return min((t for t in trials if t.peak <= budget), key=lambda t: t.seconds, default=None)


def _lean(trials: Trials, tried: Sequence[Trial]) -> Trial:
    """A trial of little memory, where none that was tried is within the budget.

    Raises:
        TooSmall: the leanest schedule is above the budget.
    """
    budget = trials.request.budget_bytes
    lean = trials.trial(_leanest(trials), NARROW)
    if lean.peak > budget:
        raise TooSmall(min((lean, *tried), key=lambda t: t.peak))
    found = _solved(trials, _modelled(trials, lean) + budget - lean.peak)
    return lean if found is None else best_of([lean, trials.trial(found.schedule, NARROW)], budget) or lean


class TooSmall(PlannerError):
    """No schedule that was tried is within the budget; whoever asked says so in words.

    Attributes:
        leanest: the trial with the lowest peak.
    """

    def __init__(self, leanest: Trial) -> None:
        super().__init__("the budget is too small")
        self.leanest = leanest


def _solved(trials: Trials, target: int) -> Solution | None:
    """The solver's answer for so many bytes of its model, asked once; None where it knows none."""
    if target not in trials.solved:
        options = trials.request.options
        problem = trials.step.problem.with_budget(max(0, target))
        try:
            found = solve(problem, options.solver, time_limit=options.time_limit, progress=options.progress)
        except InfeasibleError:
            found = None
        trials.solved[target] = found
    return trials.solved[target]


def _modelled(trials: Trials, trial: Trial) -> int:
    """The peak of a trial's schedule in the model of memory, in bytes."""
    return simulate(trials.step.problem, trial.schedule).peak


def _leanest(trials: Trials) -> Schedule:
    """The schedule with the lowest peak, as it is modelled."""
    options = trials.request.options
    return minimum_peak(trials.step.problem, time_limit=options.time_limit, progress=options.progress).schedule


def _solution(trials: Trials, best: Trial, own: Trial, note: str, seconds: float) -> Solution:
    """The trial as a solution; no more is known than that Inductor's own partition is made to take the least time."""
    bound = min(best.seconds, own.seconds)
    return Solution(best.replay.schedule, best.replay.timeline, trials.request.options.solver, seconds, bound, note)
