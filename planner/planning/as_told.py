"""A step as its loop was told: what is not known of it is guessed, and less is guessed where that does not fit."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from planner.capture.trace.step import TrainingGraph
from planner.errors import InfeasibleBudgetError, rounded_up
from planner.planning.outside import TAKEN_LEAST, with_least_loss
from planner.planning.unreached import guesses
from planner.requests.planned import Known, Planned
from planner.requests.request import Request


def as_told(
    request: Request,
    graph: TrainingGraph,
    known: Known | None,
    plan_one: Callable[[Request, TrainingGraph], Planned],
    capture: Callable[[Request], TrainingGraph],
) -> Planned:
    """The plan for a captured step; where it does not fit, for one in which less gets a gradient, if that may be, and
    whose loss takes less: the least budget that is named leaves room for a loss as it was told.

    Args:
        request: what to plan.
        graph: its step.
        known: a known plan, which was made of what the loop had shown.
        plan_one: plans such a step.
        capture: the step of another request.
    """

    def attempt(request: Request, words: str, of: TrainingGraph) -> Planned:
        planned = plan_one(request, of)
        return replace(planned, record=replace(planned.record, note=f"{planned.record.note} {words}".strip()))

    def step_of(guess: Request) -> TrainingGraph:
        return graph if guess.loop.unreached == request.loop.unreached else capture(guess)

    shown = known is not None or request.loop.loss is not None
    *earlier, (guess, words) = [(request, ""), *([] if shown else guesses(request, graph))]
    for each, its in earlier:
        with suppress(InfeasibleBudgetError):
            return attempt(each, its, step_of(each))
    of = step_of(guess)
    try:
        return attempt(guess, words, of)
    except InfeasibleBudgetError as e:
        if shown or (lighter := with_least_loss(of)) is None:
            raise
        try:
            return attempt(guess, TAKEN_LEAST, lighter)
        except InfeasibleBudgetError as least:
            e.add_note(
                f"Budgets from budget_gb={rounded_up(least.minimum_bytes / 2**30)!r} on are tried: a loss may take "
                "less than is left for it here, which the first steps show."
            )
        raise
