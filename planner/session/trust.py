"""Whether the graphs that Inductor compiled give the right gradients: a real step says so before one counts."""

from __future__ import annotations

import warnings
from dataclasses import replace

import torch

from planner.core.options import GB
from planner.core.recipe import Recipe
from planner.errors import InfeasibleBudgetError, PlanWarning
from planner.inductor.realise import DRAWS
from planner.planning.inductor import in_aten
from planner.planning.pipeline import make_plan
from planner.requests.planned import Planned
from planner.requests.request import Request
from planner.session.verify import compare, gradients_of


def trusted(planned: Planned) -> Planned:
    """A plan whose gradients on its own batch are those of mode "aten", or a plan of that mode with a note of why.

    A step that draws random numbers draws others there: it is compared with Inductor's own, with everything kept.

    Raises:
        InfeasibleBudgetError: the gradients are wrong, and mode "aten" needs more than the budget.
    """
    recipe, request = planned.record.recipe, planned.request
    if not isinstance(recipe, Recipe) or planned.captured is None or not _fused(recipe) or request.args is None:
        return planned
    draws = any(op.keep_because == DRAWS for region in planned.captured.regions for op in region.ops)
    if draws and not planned.record.overhead:
        return planned
    other = _roomy(planned, request) if draws else _op_by_op(planned)
    with_what = "Inductor with everything kept" if draws else "mode='aten'"
    try:
        error, agree = compare(gradients_of(planned), gradients_of(other))
    except torch.OutOfMemoryError:
        return _noted(planned, f"Its gradients could not be compared with those of {with_what}, for lack of memory.")
    if agree:
        return _noted(planned, f"On the first batch its gradients are those of {with_what} (within {error:.1e}).")
    text = (
        f"the gradients of the graphs that Inductor compiled differ from those of {with_what} (by {error:.1e} of the "
        "largest in a parameter): the model trains with mode='aten'"
    )
    warnings.warn(text, PlanWarning, stacklevel=6)
    return _noted(make_plan(in_aten(request)), f"{text[:1].upper()}{text[1:]}.")


def _fused(recipe: Recipe) -> bool:
    return any(r is not None and r.realised is not None for calls in recipe.calls.values() for r in calls)


def _noted(planned: Planned, note: str) -> Planned:
    return replace(planned, record=replace(planned.record, note=f"{planned.record.note} {note}".strip()))


def _op_by_op(planned: Planned) -> Planned:
    """A plan in mode "aten", within the same budget if there is one."""
    asked = in_aten(planned.request)
    try:
        return make_plan(asked)
    except InfeasibleBudgetError as e:
        return make_plan(replace(asked, budget_gb=e.minimum_gb))


def _roomy(planned: Planned, request: Request) -> Planned:
    """The same step by Inductor, with everything kept."""
    return make_plan(replace(request, budget_gb=2 * planned.record.baseline_peak_bytes / GB))
