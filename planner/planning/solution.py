"""From a step as a problem to the schedule that is to run: known, adopted, or solved for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from planner.capture.trace.step import TrainingGraph
from planner.core.options import Options
from planner.core.step import Replay, Step, replay
from planner.costs.static_memory import trained_bytes
from planner.errors import LOWER, InfeasibleBudgetError, RankError, gb
from planner.lowering.between import BETWEEN
from planner.lowering.build import LOSS
from planner.lowering.margin import MARGIN
from planner.parallel.group import other_world
from planner.planning.adopt_schedule import adopt_known, adopt_schedule, same_structure
from planner.planning.decisions import AT_PEAK, peak_account
from planner.planning.eager_peak import no_higher_than_eager
from planner.planning.notes import in_brief
from planner.requests.planned import Filed, Known, Planned, source_of
from planner.requests.request import Request
from solvers import BRIEF, InfeasibleError, Op, Solution, cost_bound, solve

OF_THE_LOOP = f"No plan changes {BETWEEN}: what it does once, as a check, it may do before the first one."


def solution_of(
    step: Step,
    request: Request,
    graph: TrainingGraph,
    others: Sequence[Planned] = (),
    known: Known | None = None,
    must_match: bool = False,
) -> Solution:
    """The schedule of a step: a known one where it is of this step and budget, one of another plan where it fits, the
    one that keeps everything and holds no more than eager mode; else the solver's. Arguments as for `make_plan()`.

    Raises:
        InfeasibleBudgetError: no schedule fits.
        RankError: the known plan must match, and does not.
    """
    problem, options = step.problem, request.options
    same = _known(step, request, known, must_match) if known is not None else ""
    if isinstance(same, Solution):
        return same
    if must_match:
        raise RankError(same)
    records = [p.record for p in others if p.record.solver != BRIEF]
    adopted = adopt_schedule(problem, [(r.problem, r.schedule) for r in records if r.problem and r.schedule])
    if adopted is not None:
        return adopted
    if (lean := no_higher_than_eager(problem, request, graph)) is not None:
        return lean
    try:
        limit, progress = options.time_limit, options.progress
        solution = solve(problem, options.solver, time_limit=limit, progress=progress, brief=request.brief)
        return replace(solution, note=f"{solution.note} {same or in_brief(solution)}".strip())
    except InfeasibleError as e:
        leanest = replay(problem, e.schedule)
        takes = {**step.account, **peak_account(step, leanest)}
        unseen = graph.loss.source == "unknown" and request.loop.loss is None
        lower = OF_THE_LOOP if AT_PEAK.format(BETWEEN) in takes else _reaching_lower(options)
        note = _unseen(request) if unseen else ""
        raise InfeasibleBudgetError(
            request.budget_gb,
            e.minimum,
            takes,
            lower=lower,
            note=note,
            leanest=e.schedule,
            late=_cleared_late(request, step, leanest),
        ) from None


def _cleared_late(request: Request, step: Step, leanest: Replay) -> int:
    """Bytes that the least budget grows by in a loop that is not known yet, if that clears the gradients of the step
    before when the forward pass has ended (`optimizer.zero_grad()` before `loss.backward()`).
    """
    if request.loop.loss is not None or request.gradients_copied or request.options.step_in_backward:
        return 0
    problem, gradients = step.problem, trained_bytes(request.model, request.options.shard)
    ran = zip(leanest.schedule.steps, leanest.timeline.held, strict=True)
    if max((h for i, h in ran if i <= problem.boundary), default=0) + gradients <= leanest.timeline.peak:
        return 0
    there = Op("gradients of the step before", (), (len(problem.sizes),), 0.0, 0, False, LOSS)
    loss = problem.ops[problem.boundary]
    loss = replace(loss, reads=(*loss.reads, *there.writes))
    ops = (there, *problem.ops[: problem.boundary], loss, *problem.ops[problem.boundary + 1 :])
    late = replace(problem, ops=ops, sizes=(*problem.sizes, gradients), boundary=problem.boundary + 1)
    try:
        solve(late, request.options.solver, time_limit=request.options.time_limit, progress=False)
    except InfeasibleError as e:
        return max(0, e.minimum - leanest.timeline.peak)
    return 0


def _unseen(request: Request) -> str:
    """In words, what the first step of a loop may show to be needed beside the least budget that is named."""
    gradients = gb(trained_bytes(request.model, request.options.shard))
    more = "" if request.gradients_copied else f", nor whether gradients add up over several calls ({gradients})"
    return (
        f"The loss outside the model is not known yet (loss_fn= tells it){more}: the first step may show that more is "
        "needed."
    )


def _reaching_lower(options: Options) -> str:
    """In words, the options that reach lower budgets beside those that were given."""
    if options.step_in_backward or (options.pieces and options.offload):
        return ""
    if options.offload or options.pieces:
        return "pieces='auto' reaches lower." if options.offload else "offload= reaches lower."
    return LOWER


def _known(step: Step, request: Request, known: Known, must_match: bool) -> Solution | str:
    """The schedule of the known plan, where that is of this step and budget; else a note that says why it is not."""
    record, problem = known.record, step.problem
    if record.problem is None or record.schedule is None:
        why: Solution | str = "it is a plan for eager mode"
    elif must_match:  # sizes may be those of another rank's share
        here = same_structure(problem, record.problem)
        why = adopt_known(problem, problem if here else record.problem, record.schedule, cost_bound(problem))
    elif isinstance(known, Filed) and (other := other_world(record.step.ranks, record.options.shard, request.model)):
        why = other
    elif record.solver == BRIEF:
        why = "it was searched briefly, for a loop that was not known yet"
    elif record.options.solver != request.options.solver:
        why = f"it is of solver={record.options.solver!r}"
    # the margin for fragmentation may be that of another schedule
    elif problem.resident - step.account.get(MARGIN, 0) != record.problem.resident - record.account.get(MARGIN, 0):
        why = "fixed memory (parameters, batch, optimizer state and the like) differs"
    else:
        why = adopt_known(problem, record.problem, record.schedule, record.bound)
    if isinstance(why, str):
        return f"Solved anew, not taken from {source_of(known)}: {why}."
    return replace(why, solver=record.solver, note=f"Taken from {source_of(known)}: the same step and budget.")
