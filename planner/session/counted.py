"""Plans that were made before it was known what other processes ask for: buckets, and a smaller budget."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from planner.core.plan import PlanRecord
from planner.errors import gb
from planner.lowering.build import COPIED
from planner.parallel.buckets import LINE, Buckets
from planner.planning.pipeline import make_plan
from planner.requests.planned import Planned
from planner.requests.request import Request


def with_buckets(request: Request, buckets: Buckets | None) -> Request:
    """The request for a model that has these buckets beside it."""
    if buckets is None:
        return replace(request, beside={}, gradients_viewed=False)
    return replace(request, beside={LINE: buckets.nbytes}, gradients_viewed=buckets.views)


def counted(planned: Planned, request: Request) -> Planned:
    """A plan as that of a request with the same step: its figures put right where it fits; else planned anew.

    Args:
        planned: for the same step, maybe with other buckets, or none, and for another budget.
        request: of the call that is to run by it.
    """
    fits = fitting(planned, request)
    if fits is not None:
        return fits
    anew = make_plan(request, [planned])
    buckets = request.beside.get(LINE, 0)
    told = f"Planned anew within {gb(request.budget_bytes)}, with {gb(buckets)} of {LINE} counted."
    return replace(anew, record=replace(anew.record, note=f"{anew.record.note} {told}".strip()))


def fitting(planned: Planned, request: Request) -> Planned | None:
    """The same without planning anew; None where it does not fit."""
    record = planned.record
    more = request.beside.get(LINE, 0) - record.account.get(LINE, 0)
    alike = request.options.accumulate or _copies(record) == request.gradients_copied
    if not more and alike and record.budget_bytes == request.budget_bytes:
        return planned
    if not alike or record.peak_bytes + more > request.budget_bytes:
        return None
    return replace(planned, record=_moved(record, request, more), request=request)


def _copies(record: PlanRecord) -> bool:
    """Whether gradients are freed as they are added to others."""
    if record.problem is None:
        return record.step.gradients_copied
    return any(op.name == COPIED for op in record.problem.ops)


def _moved(record: PlanRecord, request: Request, more: int) -> PlanRecord:
    """The same plan beside more (or fewer) bytes that stay allocated during the whole step."""
    resident, budget = record.resident_bytes + more, request.budget_bytes
    account = {**record.account, LINE: record.account.get(LINE, 0) + more}
    problem = record.problem
    return replace(
        record,
        budget_bytes=budget,
        peak_bytes=record.peak_bytes + more,
        baseline_peak_bytes=record.baseline_peak_bytes + more,
        eager_peak_bytes=record.eager_peak_bytes and record.eager_peak_bytes + more,
        resident_bytes=resident,
        timeline=tuple(replace(m, held=m.held._replace(other=m.held.other + more)) for m in record.timeline),
        baseline_timeline=tuple(replace(m, held_bytes=m.held_bytes + more) for m in record.baseline_timeline),
        account=MappingProxyType({name: size for name, size in account.items() if size or name != LINE}),
        problem=problem and replace(problem, resident=problem.resident + more, budget=budget),
        step=replace(record.step, gradients_copied=request.gradients_copied),
    )
