"""One plan for the processes that train a model together: the first of them plans, the others take what it says.

A plan goes as what its file has: it is data, and nothing in it is run. Each rank captures its own step, and sees there
whether the plan is for it.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

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
from planner.session.messages import Channel, connected

COMES = "to come to its first planned step"
GRACE = 5.0  # seconds in which ranks that have not come can hear that another has failed


class RankCaptureError(RankError, CaptureError):
    """The step of one of the ranks could not be captured for the largest sizes; all go on without them."""


@dataclass(frozen=True)
class Failure:
    """Why a rank cannot train by a plan of all; `capture` where its step could not be captured."""

    rank: int
    said: str
    capture: bool = False

    @classmethod
    def of(cls, rank: int, error: BaseException) -> Failure:
        said = str(error) if isinstance(error, RankError) else f"{type(error).__name__}: {error}"
        return cls(rank, said, isinstance(error, (BatchError, CaptureError)))

    def error(self, request: Request) -> RankError:
        """For the other ranks."""
        kind = RankCaptureError if self.capture and request.maxima is not None else RankError
        return kind(f"no rank trains {type(request.model).__name__}, as rank {self.rank} cannot: {self.said}")


def agreed(request: Request, own: Callable[[Request], Planned], ready: Planned | None = None) -> Planned:
    """The plan of a step, which all ranks that run it run by; all of them call this together.

    Args:
        request: of this rank, with the batch of its step.
        own: plans a request here.
        ready: the plan that was made for this step before, if one was.

    Raises:
        RankError: another rank cannot plan its step, or has another one, or is gone; on every rank.
        PlannerError: of this rank, where it is the one.
    """
    ranks, group = ranks_of(request.model)
    if not ranks:
        return own(request)
    with connected(ranks, group) as channel:
        if channel.here == channel.first:
            return _lead(channel, request, own)
        return _follow(channel, request, own, ready)


def _lead(channel: Channel, request: Request, own: Callable[[Request], Planned]) -> Planned:
    """Plan for all, with the budget of the rank that has least."""
    model, least = str(identity(request.model)), request.budget_gb
    came: list[int] = []
    failed: Failure | None = None
    while failed is None and (missing := [rank for rank in channel.others if rank not in came]):
        try:
            told = json.loads(channel.receive(missing[0], COMES))
        except RankError as e:
            failed = Failure(missing[0], str(e))
            break
        came.append(missing[0])
        least = min(least, told["budget"])
        if told["model"] != model:
            failed = Failure(came[-1], f"it is at the first step of {told['model']}, rank {channel.here} of {model}")
    if failed is not None:
        _stop(channel, came, failed)
        raise failed.error(request)
    try:
        made = own(replace(request, budget_gb=least))
    except BaseException as e:  # an interruption, too: the others wait
        _tell(channel, channel.others, failed=Failure.of(channel.here, e))
        raise
    _tell(channel, channel.others, plan=data_of(made.record))
    listening = []
    for rank in channel.others:
        try:
            told = json.loads(channel.receive(rank, "to take over the plan"))
        except RankError as e:
            told = asdict(Failure(rank, str(e)))
        if told is None:
            listening.append(rank)
        else:
            failed = failed or Failure(**told)
    _tell(channel, listening, failed=failed)
    if failed is not None:
        raise failed.error(request)
    return made


def _tell(channel: Channel, ranks: Sequence[int], *, plan: Any = None, failed: Failure | None = None) -> None:
    """Tell ranks the plan, or why there is none, or that all have it; who is gone is found when it is to answer."""
    text = json.dumps({"plan": plan, "failed": failed and asdict(failed)})
    for rank in ranks:
        with suppress(RankError):
            channel.send(rank, text, "to listen")


def _stop(channel: Channel, came: Sequence[int], failed: Failure) -> None:
    """Tell those that came why nothing is planned, and those that come in time."""

    def last() -> None:
        for rank in channel.others:
            if rank not in (*came, failed.rank):
                with suppress(RankError):
                    channel.receive(rank, COMES)
                    _tell(channel, [rank], failed=failed)

    _tell(channel, came, failed=failed)
    thread = threading.Thread(target=last, daemon=True)
    thread.start()
    thread.join(GRACE)


def _follow(channel: Channel, request: Request, own: Callable[[Request], Planned], ready: Planned | None) -> Planned:
    """Take over what the first rank has planned, or plan alone for a batch of another shape."""

    def hear(what: str) -> Any:
        told = json.loads(channel.receive(channel.first, what))
        if told["failed"] is not None:
            raise Failure(**told["failed"]).error(request)
        return told["plan"]

    hello = {"model": str(identity(request.model)), "budget": request.budget_gb}
    channel.send(channel.first, json.dumps(hello), COMES)
    plan = hear("to plan")
    failed: Failure | None = None
    try:
        made = _taken_over(plan_of(plan, f"rank {channel.first}"), request, own, ready)
    except BaseException as e:
        failed = Failure.of(channel.here, e)
        if isinstance(e, RankError):
            raise failed.error(request) from None
        raise
    finally:
        channel.send(channel.first, json.dumps(failed and asdict(failed)), "to listen")
    hear("to hear from all ranks")
    return made


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
    options = replace(request.options, account_gb=account)
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
