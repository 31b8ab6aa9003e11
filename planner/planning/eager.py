"""From a checked request to a plan that runs without torch.compile."""

from __future__ import annotations

import time
from collections.abc import Sequence

from planner.eager.pipeline import choose
from planner.errors import InfeasibleBudgetError
from planner.planning.decisions import peak_account
from planner.planning.record import Unplanned, record_of
from planner.planning.refused import refused_in_words
from planner.requests.planned import Known, Planned
from planner.requests.request import Request
from solvers import Solution
from solvers.progress import bar, clock


def make_eager_plan(
    request: Request, others: Sequence[Planned] = (), *, known: Known | None = None, must_match: bool = False
) -> Planned:
    """Plan a checked request that has a batch, to run without torch.compile; raises as `plan()` does.

    Args:
        request: what to plan.
        others: plans of the same model, of which the latest one's choice is taken where it fits.
        known: as for `make_plan()`.
        must_match: as for `make_plan()`.
    """
    began, records = time.perf_counter(), [p.record for p in others]
    like = next((r for r in reversed(records) if r.overhead), records[-1] if records else None)
    with (
        bar("planning", request.options.progress, bar_format="{desc}: {n} steps traced, {elapsed}") as shown,
        clock(shown),
        refused_in_words(request.model, "traced", "Plan a submodule of it"),
    ):
        found = choose(request, like, known, must_match, lambda: shown.update())
    trial = found.trial
    if trial.peak > request.budget_bytes:
        takes = {**trial.step.account, **peak_account(trial.step, trial.replay)}
        raise InfeasibleBudgetError(request.budget_gb, trial.peak, takes, note=request.instead)
    seconds, bound = time.perf_counter() - began, found.step.problem.total_cost
    note = f"{found.note} {request.instead}".strip()
    solution = Solution(trial.replay.schedule, trial.replay.timeline, "eager", seconds, bound, note)
    unplanned = Unplanned(found.step, found.runs)
    return Planned(record_of(request, trial.step, trial.replay, solution, trial.choice, unplanned), request)
