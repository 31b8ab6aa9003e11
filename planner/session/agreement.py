"""One plan for the ranks that train a model together: the first of them plans, the others take its plan over.

The plan goes to the other ranks as the JSON of a plan file, which is checked as a file is. Each rank captures its own
step, and sees there whether the plan is for it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from planner.capture.recomputability import is_collective
from planner.core.identity import difference, identity
from planner.core.options import GB
from planner.core.plan import PlanRecord
from planner.core.verification import FOUND
from planner.errors import BatchError, CaptureError, RankError
from planner.parallel.group import ranks_of, sharded
from planner.planfile.files import data_of, plan_of
from planner.planning.pipeline import make_plan
from planner.requests.planned import Filed, Planned
from planner.requests.request import Request
from planner.session.counted import fitting
from planner.session.messages import Failure, connected, gather

# tasks of the other ranks and of the first one, in each of three exchanges
COME = ("to come to its first planned step",) * 2
PLAN = ("to listen", "to plan")
TAKE_OVER = ("to take over the plan", "to listen")
GRACE = 5.0  # seconds in which ranks that have not come can hear that another has failed


class RankCaptureError(RankError, CaptureError):
    """The step of one of the ranks could not be captured for the largest sizes; all go on without them."""


def agreed(request: Request, plan_here: Callable[[Request], Planned], mine: Planned | None = None) -> Planned:
    """The plan by which every rank that runs this step runs it; all of these ranks call this together.

    Args:
        request: of this rank, with the batch of its step.
        plan_here: plans a request on this rank.
        mine: the plan of this rank that was made for this step before, if one was.

    Raises:
        RankError: another rank cannot plan its step, or has another one, or has ended; on every rank.
        PlannerError: of this rank, where it is the one.
    """
    ranks, group = ranks_of(request.model)
    if not ranks:
        return plan_here(request)
    plan, text = None, None
    with connected(ranks, group) as group:
        here, first = dist.get_rank(), dist.get_process_group_ranks(group)[0]
        hellos = _heard(request, group, (str(identity(request.model)), request.budget_gb), *COME, GRACE)
        for rank, (model, _) in hellos.items():
            if model != hellos[first][0]:
                reason = f"it is at the first step of {model}, rank {first} of {hellos[first][0]}"
                raise _refusal(Failure(rank, reason), request)
        with _failing_together(request, group, *PLAN):
            if here == first:  # within the budget of the rank that has least
                plan = plan_here(replace(request, budget_gb=min(budget_gb for _, budget_gb in hellos.values())))
                text = json.dumps(data_of(plan.record))
        text = _heard(request, group, text, *PLAN)[first]
        with _failing_together(request, group, *TAKE_OVER):
            if here != first:
                sent = plan_of(json.loads(text), f"rank {first}", kind=type(request.options))
                plan = _taken_over(sent, request, plan_here, mine)
        _heard(request, group, None, *TAKE_OVER)
    assert plan is not None
    return plan


def _heard(request: Request, group: Any, message: Any, *exchange: Any) -> dict[int, Any]:
    """The messages of all ranks, as of `gather`; raises RankError where one has failed."""
    messages = gather(group, message, *exchange)
    for failure in messages.values():
        if isinstance(failure, Failure):
            raise _refusal(failure, request)
    return messages


@contextmanager
def _failing_together(request: Request, group: Any, *exchange: Any) -> Iterator[None]:
    """Where this rank fails, tell the others, which wait in `gather`."""
    try:
        yield
    except BaseException as e:  # an interruption, too
        reason = str(e) if isinstance(e, RankError) else f"{type(e).__name__}: {e}"
        failure = Failure(dist.get_rank(), reason, isinstance(e, (BatchError, CaptureError)))
        with suppress(RankError):
            gather(group, failure, *exchange)
        if isinstance(e, RankError):
            raise _refusal(failure, request) from None
        raise


def _refusal(failure: Failure, request: Request) -> RankError:
    kind = RankCaptureError if failure.capture and request.maxima is not None else RankError
    return kind(f"no rank trains {type(request.model).__name__}, as rank {failure.rank} cannot: {failure.reason}")


def _taken_over(filed: Filed, request: Request, own: Callable[[Request], Planned], ready: Planned | None) -> Planned:
    """A plan of the first rank as that of this one, without a solver; RankError where the step is another."""
    record, source = filed.record, filed.source
    if differs := difference(identity(request.model), record.identity):
        raise RankError(f"its model is not that of {source}: {differs}")
    if (record.step.batch, record.step.maxima) != (request.batch_kinds, request.maxima):
        return _alone(filed, request, own)
    mine = ready and fitting(ready, replace(request, budget_gb=record.budget_bytes / GB))
    if mine and mine.record.recipe == record.recipe and FOUND not in record.account:
        return mine
    account = {**request.options.account_gb}
    if FOUND in record.account:
        account[FOUND] = record.account[FOUND] / GB
    options = replace(request.options, account_gb=account, mode=record.options.mode)
    request = replace(request, budget_gb=record.budget_bytes / GB, options=options)
    quiet = replace(request, options=replace(options, progress=False))
    try:
        planned = make_plan(quiet, known=filed, must_match=True)
    except RankError as e:
        raise RankError(f"its step is not that of {source}: {e}") from None
    # in what a rank does with its part of a tensor, the number of the rank may be a constant of its graphs
    same = planned.record.recipe == record.recipe or sharded(request.model)
    if _ops(planned.record) != _ops(record) or not same:
        raise RankError(f"its step is not that of {source}: its graphs differ")
    return replace(planned, record=replace(planned.record, options=options), request=request)


def _ops(record: PlanRecord) -> list[str]:
    return [moment.op for moment in record.baseline_timeline]


def _alone(filed: Filed, request: Request, own: Callable[[Request], Planned]) -> Planned:
    """A plan for a batch of another shape than that of the first rank, which is for this rank alone."""
    here, there = (
        ", ".join(f"{t.name} {t}" for t in kinds or ()) for kinds in (request.batch_kinds, filed.record.step.batch)
    )
    planned = own(request)
    told = f"this rank's batch is {here}, that of {filed.source} {there}"
    for modules in planned.graphs():
        for node in (*modules.forward.graph.nodes, *modules.backward.graph.nodes):
            if is_collective(node.target):
                raise RankError(
                    f"{told}, and {node.target} in its step waits for other ranks: give all the same shapes"
                )
    note = f"{planned.record.note} Planned for this rank alone: {told}.".strip()
    return replace(planned, record=replace(planned.record, note=note))
