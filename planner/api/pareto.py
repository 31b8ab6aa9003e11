"""`pareto()`: every budget at once, from one capture of the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, Unpack, overload

from torch import nn

from planner.api.plan import Plan
from planner.core.options import GB, OptionArguments, Options
from planner.errors import BatchError, CaptureError, OptionError
from planner.lowering.margin import add_margin
from planner.planning.curve import curve_from
from planner.planning.pipeline import graph_of, lower, write
from planner.requests.check import check
from solvers import Problem, ProblemError, Solution
from solvers import pareto as solve
from solvers.progress import bar
from solvers.search.curve import check_points, curve

_OF_ONE_PLAN = ("mode", "solver", "on_failure")


@overload
def pareto(
    model_or_problem: nn.Module,
    batch: Any = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    points: int = 10,
    **options: Unpack[OptionArguments],
) -> tuple[Plan, ...]: ...
@overload
def pareto(
    model_or_problem: Problem, *, points: int = 10, time_limit: float | None = None, progress: bool | None = None
) -> tuple[Solution, ...]: ...


def pareto(
    model_or_problem: nn.Module | Problem,
    batch: Any = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    points: int = 10,
    **options: Unpack[OptionArguments],
) -> tuple[Plan, ...] | tuple[Solution, ...]:
    """What memory costs in time: plans from the lowest peak found to that of recomputing nothing, computed together.

    Budgets ascend, closer together the lower they are, where overhead changes most. A larger budget never costs more,
    a smaller one never peaks higher. The model is captured and its ops are estimated once; the search takes about
    `points` / 3 times as long as that of one plan (see `solvers.pareto`).

    On a GPU, every plan leaves the margin for fragmentation that keeping everything needs.

    Args:
        model_or_problem: as for `plan()`; or a `solvers.Problem`, for which only `points`, `time_limit` and `progress`
            count.
        batch: as for `plan()`. Without one, the model's own dummy inputs have to serve.
        kwargs: as for `plan()`.
        points: how many budgets, at least 2.
        options: as for `plan()`, but for those of a single plan (`mode`, `solver`, `on_failure`); `time_limit` is about
            that of the search of all points together.

    Returns:
        One plan a budget, ascending, each of which can be applied. For a problem, what `solvers.pareto` returns.

    Raises:
        ModelError, BatchError, OptionError, CaptureError: as `plan()`; BatchError also where no batch is known.
        solvers.ProblemError: for a problem, `points` or `time_limit` that cannot be used.

    Examples:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
        >>> plans = pareto(model, torch.zeros(32, 64), points=3, loss_fn=torch.Tensor.mean)
        >>> [p.peak_bytes <= p.budget_bytes for p in plans], plans[-1].overhead
        ([True, True, True], 0.0)
    """
    time_limit, progress = options.get("time_limit"), options.get("progress")
    if isinstance(model_or_problem, Problem):
        given = [name for name in options if name not in ("time_limit", "progress")]
        given += [name for name, x in (("batch", batch), ("kwargs", kwargs)) if x is not None]
        if given:
            raise OptionError(f"{', '.join(given)}: of a model, and a solvers.Problem was given: leave it out")
        return solve(model_or_problem, points, time_limit=time_limit, progress=progress)
    model = model_or_problem
    request = check(model, batch, kwargs, budget_gb="100%", mode="aten", **_of_curves(options))
    try:
        check_points(points)
    except ProblemError as e:
        raise OptionError(str(e)) from None
    if request.args is None:
        raise BatchError(_no_batch(model, "it has no dummy inputs of its own"))
    try:
        graph = graph_of(request)
        step = add_margin(lower(request, graph), request)
    except (BatchError, CaptureError) as e:
        if batch is None and not kwargs:
            raise BatchError(_no_batch(model, f"with its own dummy inputs: {e}")) from e
        raise
    found = curve(step.problem, points, time_limit=time_limit, progress=progress)
    known = curve_from(step.problem, found)
    plans = (
        write(
            replace(request, budget_gb=budget / GB, options=replace(request.options, budget_gb=budget / GB)),
            graph,
            replace(step, problem=step.problem.with_budget(budget)),
            solution,
        )
        for budget, solution in bar("writing plans", progress, iterable=found, unit=" plans")
    )
    return tuple(Plan(replace(p, record=replace(p.record, known_curve=known))) for p in plans)


def _of_curves(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that a curve takes; OptionError for others of `plan()`, unless they are as by default."""
    if "budget_gb" in options:
        raise OptionError("pareto() finds the budgets itself: leave budget_gb= out, or call plan()")
    others = [of for of in fields(Options) if of.name in _OF_ONE_PLAN]
    for of in others:
        if options.get(of.name) not in (None, of.default):
            raise OptionError(
                f"{of.name}={options[of.name]!r} is for one plan, and a curve is of mode='aten' and solver='auto': "
                "leave it out, or call plan() for each budget"
            )
    return {name: value for name, value in options.items() if name not in {of.name for of in others}}


def _no_batch(model: nn.Module, why: str) -> str:
    return (
        f"no batch was given for {type(model).__name__}, and a curve cannot wait for the first training step ({why}); "
        "give one, as in pareto(model, batch)"
    )
