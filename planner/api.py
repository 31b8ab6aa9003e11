"""`plan()`: capture, estimate, solve, rewrite, on one screen."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from solvers import InfeasibleError, Solution, every_op_once, simulate, solve

from .capture.step import TrainingGraph, capture
from .decide import decisions, moments, peak_account
from .errors import ApplyError, BatchError, CaptureError, InfeasibleBudgetError
from .estimate.device import find_device
from .estimate.ops import estimate
from .estimate.resident import account
from .estimate.workspace import measure
from .lowering import Lowered, lower, raise_schedule
from .plan import GraphModules, PendingPlan, Plan
from .request import Request, check
from .rewrite.emit import emit, keep_everything
from .runtime.run import Recipe, Runtime, attach, attached, call_signature, detach


def plan(
    model: nn.Module,
    batch: Any = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    budget_gb: float,
    solver: str = "auto",
    optimizer: torch.optim.Optimizer | str | None = None,
    loss_fn: Callable[[Any], torch.Tensor] | None = None,
    device: str | torch.device | None = None,
    time_limit: float | None = None,
    progress: bool | None = None,
) -> Plan:
    """Decide, for every activation of a training step, whether to keep or recompute it, within a memory budget.

    Args:
        model: the module to train, in the mode (`train()` or `eval()`) in which it will run. It is not changed.
        batch: a tensor (`model(batch)`), a tuple or list (`model(*batch)`) or a mapping (`model(**batch)`). Without
            one, the model's `dummy_inputs` or `example_input_array`; without those, or where they do not suit the
            model, the plan is made at the first training step after `apply()`.
        kwargs: further keyword arguments for the model.
        budget_gb: memory that parameters, buffers, batch, optimizer state and everything the step allocates may take
            together, in GB of 2**30 bytes.
        solver: "auto" (the default), "chen" (sqrt(L) segments) or "ilp" (exact on small graphs).
        optimizer: an optimizer or its name, to count its state; None counts none.
        loss_fn: model output -> scalar loss, where the loss is not among the model's outputs.
        device: a device to estimate times for ("h100", ...); None for where the model is.
        time_limit: seconds for the solver; None for its default, which for "auto" is a count of steps and no clock.
        progress: show progress bars; None for only where a terminal is watching.

    Returns:
        The plan; `apply()` puts it on the model.

    Raises:
        ModelError, BudgetError, BatchError, OptionError: an argument that cannot be used, named with its value.
        InfeasibleBudgetError: nothing fits; it carries the smallest budget that does.
        CaptureError: the model cannot be captured.

    Examples:
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
        >>> p = plan(model, torch.zeros(32, 64), budget_gb=1, loss_fn=torch.Tensor.mean)
        >>> p.overhead, p.peak_bytes <= p.budget_bytes
        (0.0, True)
    """
    request = check(model, batch, kwargs, budget_gb, solver, optimizer, loss_fn, device, time_limit, progress)
    if request.args is not None:
        try:
            return _plan(request)
        except (BatchError, CaptureError):
            # transformers gives every model, of vision too, token ids for its dummy inputs
            if batch is not None or kwargs:
                raise
    pending = replace(request, args=None, kwargs={})
    return PendingPlan(pending, lambda: _newest(pending))


def _plan(request: Request) -> Plan:
    graph = capture(request.model, request.args or (), request.kwargs, keep_everything, request.loss_fn)
    lowered, lines = problem_of(request, graph)
    solution = _solve(request, lowered, lines)
    return write(request, graph, lowered, solution, lines)


def problem_of(request: Request, graph: TrainingGraph) -> tuple[Lowered, dict[str, int]]:
    model = request.model
    where = next(model.parameters()).device
    device = find_device(request.device, where)
    lines = account(model, request.args or (), request.kwargs, request.optimizer)
    measurable = where if where.type == device.type and where.type in ("cpu", "cuda") else None
    outside = measure(graph.loss.calls, measurable, progress=False) if measurable is not None else {}
    lowered = lower(
        graph.regions,
        estimate(graph.regions, device, measure_on=measurable, progress=request.progress),
        links=graph.links,
        resident=sum(lines.values()),
        loss_workspace=graph.loss.workspace,
        loss_bytes=graph.loss.held + sum(a.excess for a in outside.values()),
        # loss.backward() holds the loss's own gradient; before torch 2.13, autograd holds any that enter a region
        tangents_pinned=graph.loss.source == "model" or not hasattr(torch.autograd.Function, "boxed_grads_call"),
        granularity=512 if where.type == "cuda" else 1,
        budget=request.budget_bytes,
    )
    return lowered, lines


def _solve(request: Request, lowered: Lowered, lines: dict[str, int]) -> Solution:
    try:
        return solve(lowered.problem, request.solver, time_limit=request.time_limit, progress=request.progress)
    except InfeasibleError as e:
        leanest = peak_account(lowered.problem, e.schedule)
        takes = dict(sorted({**lines, **leanest}.items(), key=lambda line: -line[1]))
        raise InfeasibleBudgetError(request.budget_gb, e.minimum, takes) from None


def write(request: Request, graph: TrainingGraph, lowered: Lowered, solution: Solution, lines: dict[str, int]) -> Plan:
    problem, timeline = lowered.problem, solution.timeline
    passes = raise_schedule(lowered, solution.schedule)
    modules = tuple(GraphModules(*emit(region, *each)) for region, each in zip(graph.regions, passes, strict=True))
    recipe = Recipe({r.fingerprint: each for r, each in zip(graph.regions, passes, strict=True)}, graph.detached)
    return Plan(
        budget_bytes=request.budget_bytes,
        peak_bytes=timeline.peak,
        baseline_peak_bytes=simulate(problem, every_op_once(problem)).peak,
        resident_bytes=problem.resident,
        overhead=timeline.cost / problem.total_cost - 1,
        bound=solution.bound,
        gap=solution.gap,
        solver=solution.solver,
        solve_seconds=solution.seconds,
        timeline=moments(lowered, solution),
        decisions=decisions(graph.regions, lowered, solution, {name for name, _ in request.model.named_modules()}),
        graph_modules=modules,
        step_seconds=timeline.cost,
        account=MappingProxyType({**lines, **peak_account(problem, solution.schedule)}),
        note=solution.note,
        device=find_device(request.device, next(request.model.parameters()).device).name,
        recipe=recipe,
        request=request,
    )


def apply(plan: Plan, model: nn.Module | None = None) -> nn.Module:
    """Put a plan on its model, or on another one of the same kind; see `Plan.apply`."""
    request = plan.request
    target = request.model if model is None else model
    if not isinstance(target, nn.Module):
        raise ApplyError(f"apply() needs a torch.nn.Module; it was given {target!r} of type {type(target).__name__}")
    if target is not request.model and _describe(target) != _describe(request.model):
        raise ApplyError(
            f"this plan was made for {type(request.model).__name__} with other modules or parameters than the "
            f"{type(target).__name__} it is applied to; plan that model instead"
        )

    def make(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Plan, Recipe]:
        made = _plan(_with_batch(request, target, args, kwargs))
        return made, made.recipe

    runtime = Runtime(target, make)
    if not isinstance(plan, PendingPlan):
        runtime.add(call_signature(target, request.args or (), request.kwargs), plan, plan.recipe)
    attach(target, runtime)
    return target


def remove(plan: Plan, model: nn.Module | None = None) -> nn.Module:
    """Take a plan off its model; see `Plan.remove`."""
    target = plan.request.model if model is None else model
    detach(target)
    return target


def _with_batch(request: Request, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Request:
    return replace(request, model_ref=weakref.ref(model), args=args, kwargs=dict(kwargs))


def _newest(request: Request) -> Plan | None:
    runtime = attached(request.model)
    newest = runtime.newest if runtime else None
    return newest if isinstance(newest, Plan) else None


def _describe(model: nn.Module) -> list[tuple[str, str, tuple[int, ...], bool]]:
    """What two models must share for one plan to serve both."""
    modules = [(name, type(m).__qualname__, (), m.training) for name, m in model.named_modules()]
    return modules + [(name, str(p.dtype), tuple(p.shape), p.requires_grad) for name, p in model.named_parameters()]


__all__ = ["apply", "plan", "remove"]
