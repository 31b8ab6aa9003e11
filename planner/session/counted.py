"""Plans that were made before it was known what other processes ask for: buckets, and a smaller budget."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from planner.core.plan import Plan
from planner.errors import gb
from planner.lowering.build import COPIED
from planner.parallel.buckets import LINE
from planner.planning.pipeline import make_plan
from planner.requests.request import Request


def counted(made: Plan, request: Request) -> Plan:
    """A plan as that of a request with the same step: its figures put right where it fits; else planned anew.

    Args:
        made: for the same step, maybe with other buckets, or none, and for another budget.
        request: of the call that is to run by it.
    """
    found = fitting(made, request)
    if found is not None:
        return found
    anew = make_plan(request, [made])
    buckets = request.buckets.nbytes if request.buckets else 0
    told = f"Planned anew within {gb(request.budget_bytes)}, with {gb(buckets)} of {LINE} counted."
    return replace(anew, note=f"{anew.note} {told}".strip())


def fitting(made: Plan, request: Request) -> Plan | None:
    """The same without planning anew; None where it does not fit."""
    more = (request.buckets.nbytes if request.buckets else 0) - made.account.get(LINE, 0)
    alike = request.accumulate or _copies(made) == request.gradients_copied
    if not more and alike and made.budget_bytes == request.budget_bytes:
        return made
    return _moved(made, request, more) if alike and made.peak_bytes + more <= request.budget_bytes else None


def _copies(made: Plan) -> bool:
    """Whether gradients are freed as they are added to others."""
    if made.problem is None:
        return made.request.gradients_copied
    return any(op.name == COPIED for op in made.problem.ops)


def _moved(made: Plan, request: Request, more: int) -> Plan:
    """The same plan beside more (or less) that is held all the time."""
    resident, budget = made.resident_bytes + more, request.budget_bytes
    account = {**made.account, LINE: made.account.get(LINE, 0) + more}
    problem = made.problem
    return replace(
        made,
        budget_bytes=budget,
        peak_bytes=made.peak_bytes + more,
        baseline_peak_bytes=made.baseline_peak_bytes + more,
        resident_bytes=resident,
        timeline=tuple(replace(m, held=m.held._replace(other=m.held.other + more)) for m in made.timeline),
        baseline_timeline=tuple(replace(m, held_bytes=m.held_bytes + more) for m in made.baseline_timeline),
        account=MappingProxyType({name: size for name, size in account.items() if size or name != LINE}),
        problem=problem and replace(problem, resident=problem.resident + more, budget=budget),
        request=request,
    )
