"""Plans again with what a real step showed, where that took more than the budget."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from planner.core.options import GB, is_whole
from planner.core.verification import FOUND
from planner.errors import OptionError, VerificationError, gb, warn
from planner.planning.pipeline import make_plan
from planner.requests.batch import arguments, maxima_of
from planner.requests.check import with_batch
from planner.requests.planned import Pending, Planned
from planner.session.verify import verify

# share of the budget taken off where a step ran out of memory and so could not say by how much
OUT_OF_MEMORY = 0.05


def repaired(
    planned: Planned | Pending, batch: Any = None, kwargs: Mapping[str, Any] | None = None, *, attempts: int = 3
) -> Planned:
    """Measure a real step, and plan again with the bytes that the prediction lacked; see `Plan.repair`."""
    if not is_whole(attempts):
        raise OptionError(f"attempts={attempts!r} must be a whole number from 0 on")
    request = planned.request
    if batch is not None or kwargs is not None:
        args, extra = arguments(request.model, batch, kwargs)
        maxima = maxima_of(request.options.dynamic, args or (), extra)
        request = with_batch(request, request.model, args or (), extra, maxima)
        planned = make_plan(request)
    lacking = 0
    learnt: list[str] = []
    while True:
        try:
            seen = verify(planned)
        except torch.OutOfMemoryError:
            missing = round(OUT_OF_MEMORY * request.budget_bytes)
            learnt.append(f"A real step ran out of memory: planned again with {gb(missing)} taken off.")
        else:
            if seen.gradients_agree is False:
                warn(f"gradients differ from those without a plan: {seen}")
            if seen.within_budget is None:
                raise VerificationError(
                    f"{request.model_device} keeps no peak of its allocator, so that a real step cannot show whether "
                    "the plan holds: leave out repair() and verify=True, or give a budget with room to spare"
                )
            if seen.within_budget and isinstance(planned, Planned):
                note = " ".join([planned.record.note, *learnt]).strip()
                return replace(planned, record=replace(planned.record, note=note, verification=seen))
            missing = seen.missing_bytes
            learnt.append(f"A real step took {gb(missing)} more than predicted: planned again with that taken off.")
        if len(learnt) > attempts:
            raise VerificationError(
                f"after {attempts} repairs a real step still takes more than budget_gb={request.budget_gb!r}. "
                f"{' '.join(learnt)} Give a larger budget, or a smaller batch"
            )
        lacking += missing
        lines = {**request.options.account_gb, FOUND: lacking / GB}
        request = replace(request, options=replace(request.options, account_gb=lines))
        planned = make_plan(request, captured=planned.captured if isinstance(planned, Planned) else None)
