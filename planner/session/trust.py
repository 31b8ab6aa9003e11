"""Whether the graphs that Inductor compiled give the right gradients: a real step says so before one counts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version

import torch

from planner.compat.inductor import code_generation
from planner.core.plan import PlanRecord
from planner.core.recipe import Recipe
from planner.costs.cache import digest, gradients_agreed, keep_agreement, surroundings
from planner.errors import InfeasibleBudgetError, PlannerError, warn
from planner.planning.inductor import gradients_of_written, in_aten, planned_in_vain
from planner.planning.pipeline import capture_step, make_plan
from planner.planning.unreached import cut_outputs
from planner.requests.planned import Planned
from planner.runtime.aside import recording_aside
from planner.session.gradients import compare
from planner.session.verify import gradients_of

Earlier = dict[tuple[str, ...], PlanRecord]

_NOT_ALL = (
    "a backward pass of the loop gives no gradient to some outputs of the model that nothing else is computed from, "
    "and mode='inductor' compiles one for all (loss_fn= says which outputs get one): the model trains with mode='aten'"
)

_WRITTEN = (
    "the model writes into a tensor that gets a gradient (its input, a table with max_norm=), for whose gradient "
    "mode='inductor' compiles a place in the backward pass, whether one comes or not: the model trains with mode='aten'"
)


def trusting() -> Callable[[Planned], Planned]:
    """`trusted()` for the plans of one model, which remembers those that it has compared."""
    return partial(trusted, earlier={}, given_up=[])


def trusted(planned: Planned, earlier: Earlier, given_up: list[str]) -> Planned:
    """A plan whose gradients on its own batch are those of mode "aten", or a plan of that mode with a note of why.

    A step that draws random numbers draws others there: it is compared with Inductor's own, with everything kept. That
    may take more than the budget, and so may the leanest of mode "aten": in the first step they do, and later plans of
    the same graphs are compared with the one before. What takes more than the budget then, with the states of the
    optimizers moved aside, is not run: those plans are of a model whose gradients were right. What agreed once on this
    machine is not compared again, in another process either. Where gradients were planned that do not come, the plan is
    one of mode "aten": the backward pass would run op by op, and take what nobody counts.

    Args:
        planned: the plan.
        earlier: the latest plans that were compared, by the fingerprints of their graphs; it is added.
        given_up: why the model trains with mode "aten"; it is added, for the plans that come after it.

    Raises:
        InfeasibleBudgetError: the gradients are wrong, or not all of them come, and mode "aten" needs more than the
            budget.
    """
    recipe, request = planned.record.recipe, planned.request
    regions = recipe.fused
    if not regions or request.args is None:
        return _noted(planned, " ".join(given_up)) if given_up else planned
    if (graph := planned.captured) is not None:
        why = _NOT_ALL if planned_in_vain(request, graph) else _WRITTEN if gradients_of_written(graph) else ""
        if why:
            return _in_aten(planned, why, given_up)
    draws, graphs = any(r.draws for r in regions), tuple(r.fingerprint for r in regions)
    if draws and all(r.own for r in regions):
        earlier[graphs] = earlier[_calls(planned)] = planned.record
        return planned
    known_by = _digest(planned)
    if gradients_agreed(known_by):
        earlier[graphs] = earlier[_calls(planned)] = planned.record
        return _noted(planned, "Its gradients were compared on this machine before, and are right.")
    error = None
    for other, with_what in _references(planned, earlier, graphs, draws=draws):
        unlike = other.record in earlier.values() and other.record is not earlier.get(graphs)
        try:
            with recording_aside(request.model):
                error, agree, within = _beside(planned, other, unlike=unlike)
        except torch.OutOfMemoryError:
            why = f"Its gradients could not be compared with those of {with_what}, for lack of memory."
            return _noted(planned, why)
        except PlannerError:  # the plan before is not for these calls
            if unlike:
                continue
            raise
        if agree:
            earlier[graphs] = earlier[_calls(planned)] = planned.record
            keep_agreement(known_by)
            return _noted(planned, f"On the first batch its gradients are those of {with_what} ({within}).")
    if error is None:
        return _noted(planned, "Its gradients were not compared, for lack of room; those of an earlier plan were.")
    return _in_aten(
        planned,
        f"the gradients of the graphs that Inductor compiled differ from those of {with_what} (by {error:.1e} of the "
        "largest in a parameter): the model trains with mode='aten'",
        given_up,
    )


def _references(
    planned: Planned, earlier: Earlier, graphs: tuple[str, ...], *, draws: bool
) -> list[tuple[Planned, str]]:
    """The plans to compare one with, the best first, and what each is in words."""
    before, alike = earlier.get(graphs), earlier.get(_calls(planned))
    if not draws and (op_by_op := _op_by_op(planned, needed=not earlier)) is not None:
        others = [(op_by_op, "mode='aten'")]
    elif before is not None:
        others = [(replace(planned, record=before), "the plan before")]
    else:
        others = [] if alike is None else [(replace(planned, record=alike), "the plan before")]
        others += [(_own(planned), "Inductor with everything kept")] if draws else []
    if earlier:
        room, own = planned.record.budget_bytes, _peak(planned, planned)
        return [(other, words) for other, words in others if max(own, _peak(planned, other)) <= room]
    return others


def _beside(planned: Planned, other: Planned, *, unlike: bool) -> tuple[float, bool, str]:
    """The error of a plan's gradients by those of another one, whether they may be called equal, and how near they are.

    Args:
        planned: the plan.
        other: the one that it is compared with.
        unlike: whether one of them may have no place for gradients of outputs that the other has: these are zeros.
    """
    request, dtype, here, there = planned.request, _least_precise(planned), frozenset[int](), frozenset[int]()
    if unlike:
        own, others = _left_out(planned, planned.record), _left_out(planned, other.record)
        here, there = others - own, own - others
        request = replace(request, loop=replace(request.loop, unreached=(*request.loop.unreached, *here)))
    ours = gradients_of(planned, request, zeros=here, kept=True)
    theirs = gradients_of(other, request, zeros=there)
    error, agree = compare(ours, theirs, dtype)
    within = f"within {error:.1e}"
    if not agree and ours.keys() == theirs.keys():
        agree = compare(ours, theirs, dtype, gradients_of(other, request, nudged=True, zeros=there))[1]
        within = "but for rounding errors of terms that cancel"
    return error, agree, within


def _peak(planned: Planned, other: Planned) -> int:
    """The most that a step by this plan or another one takes where the loop holds what this one counts, but for the
    states of optimizers.

    Outputs of the last step are there to the end, and so is what modules keep as attributes, which the step itself
    replaces; a plan from before the loop was known counts neither these outputs nor gradients of zeros.
    """
    record, its, graph, seen = planned.record, other.record, planned.captured, planned.record.step.loop.loss
    more = 0 if graph is None else sum(graph.attributes.values())
    if seen is not None:
        now = 0 if graph is None else graph.output_bytes
        older, unseen = max(seen.output_bytes, now), its.step.loop.loss is None
        more += 2 * older if unseen else max(seen.stays + seen.given, older - now)
    if its.step.loop.in_flight < record.step.loop.in_flight:  # the calls before this one wait
        more += record.kept_bytes
    return its.peak_bytes - its.resident_bytes + record.resident_bytes - record.step.optimizer_state + more


def _left_out(planned: Planned, record: PlanRecord) -> frozenset[int]:
    """Positions of the outputs that get no gradient by a record of the same calls."""
    assert isinstance(record.recipe, Recipe)
    return frozenset() if planned.captured is None else cut_outputs(planned.captured, record.recipe.detached)


def _calls(planned: Planned) -> tuple[str, ...]:
    """What plans have in common whose graphs differ in the outputs that get a gradient alone: their forward passes."""
    recipe = planned.record.recipe
    assert isinstance(recipe, Recipe)
    trained = (name for name, p in planned.request.model.named_parameters() if p.requires_grad)
    return (*sorted(recipe.calls), *trained)


def _in_aten(planned: Planned, why: str, given_up: list[str]) -> Planned:
    found = make_plan(in_aten(planned.request))
    warn(why)
    given_up.append(f"{why[:1].upper()}{why[1:]}.")
    return _noted(found, given_up[-1])


def _digest(planned: Planned) -> str:
    """Of the graphs that Inductor compiles, and of all that its code depends on."""
    recipe = planned.record.recipe
    assert isinstance(recipe, Recipe)
    graphs: tuple[object, ...] = sorted(recipe.calls.items()), sorted(recipe.detached.items())
    with suppress(PackageNotFoundError):  # it runs from its sources
        graphs = *graphs, version("checkpoint-planner")
    return digest(f"{surroundings(planned.request.model_device)} {code_generation()}", repr(graphs))


def _least_precise(planned: Planned) -> torch.dtype | None:
    """Of the dtypes that the captured step computes in, the least precise; None where it is not known."""
    regions = () if planned.captured is None else planned.captured.regions
    values = (node.meta.get("val") for region in regions for node in region.joint.graph.nodes)
    found = {t.dtype for t in values if isinstance(t, torch.Tensor) and t.is_floating_point()}
    return max(found, key=lambda dtype: torch.finfo(dtype).eps, default=None)


def _noted(planned: Planned, note: str) -> Planned:
    return replace(planned, record=replace(planned.record, note=f"{planned.record.note} {note}".strip()))


def _op_by_op(planned: Planned, *, needed: bool) -> Planned | None:
    """A plan in mode "aten", within the same budget if one is found at once; any schedule will do.

    If none is, the least that is feasible if one is needed, else None.
    """
    asked = in_aten(planned.request)
    quick = replace(asked, options=replace(asked.options, solver="chen"))
    captured = capture_step(quick)
    try:
        return make_plan(quick, captured=captured)
    except InfeasibleBudgetError as e:
        return make_plan(replace(quick, budget_gb=e.minimum_gb), captured=captured) if needed else None


def _own(planned: Planned) -> Planned:
    """The same step by Inductor's own partition, as torch.compile runs it."""
    recipe = planned.record.recipe
    assert isinstance(recipe, Recipe)
    calls = {key: tuple(r and replace(r, own=True) for r in order) for key, order in recipe.calls.items()}
    record = planned.record
    record = replace(record, recipe=replace(recipe, calls=calls), peak_bytes=record.baseline_peak_bytes)
    return replace(planned, record=record)
