"""`plan()`, and which plan a model runs under."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import nn

from planner.api.plan import Plan
from planner.capture.passes.checkpoints import Checkpoints
from planner.core.options import Costs, Dynamic, Mode, Offload, OnFailure, Options, Pieces
from planner.errors import UNPLANNABLE, BatchError, CaptureError, OptionError
from planner.planfile import files
from planner.planning.early import refuse_hopeless
from planner.planning.pipeline import make_plan
from planner.requests.batch import LATER
from planner.requests.check import check
from planner.requests.planned import Known, Pending, Planned, Unplanned
from planner.requests.request import Request
from planner.session.announce import announce, warn_unplanned
from planner.session.attach import all_applied, applied


def plan(
    model: nn.Module,
    batch: Any = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    budget_gb: float | str | None = None,
    solver: str = "auto",
    optimizer: torch.optim.Optimizer | str | None = None,
    loss_fn: Callable[[Any], torch.Tensor] | None = None,
    device: str | torch.device | None = None,
    accumulate: bool = False,
    shard: int = 1,
    checkpoints: Checkpoints = "replace",
    costs: Costs | None = None,
    account_gb: Mapping[str, float] | None = None,
    time_limit: float | None = None,
    progress: bool | None = None,
    dynamic: Dynamic = None,
    keep: Sequence[str] = (),
    mode: Mode | None = None,
    pieces: Pieces = False,
    in_flight: int = 1,
    offload: Offload | None = None,
    host_gb: float | None = None,
    offload_dir: str | os.PathLike[str] | None = None,
    step_in_backward: bool = False,
    on_failure: OnFailure = "raise",
    known: Plan | str | os.PathLike[str] | None = None,
) -> Plan:
    """Decide, for every activation of a training step, whether to keep or recompute it, within a memory budget.

    It waits for no other process. What several train together, under DistributedDataParallel or with parameters that
    are spread over them, has one plan: at the first training step after `apply()` that of the first rank, made then or
    before, goes to all, with DDP's gradient buckets counted. Plans for other shapes are made by each rank for itself.

    Args:
        model: the module to train, in the mode (`train()` or `eval()`) in which it will run. It is not changed.
        batch: a tensor (`model(batch)`), a tuple or list (`model(*batch)`) or a mapping (`model(**batch)`). Without
            one, the `example_input_array` of a Lightning model; without that, or where it does not suit the
            model, the plan is made at the first training step after `apply()`.
        kwargs: further keyword arguments for the model.
        budget_gb: memory that parameters, buffers, batch, optimizer state and everything the step allocates may take
            together, in GB of `2**30` bytes; or an amount with its unit as "12 GB" or "500 MiB" (MB and MiB are alike,
            `2**20` bytes), or a share of the device's memory as "80%"; None for what the GPU has free.
        solver: "auto" (the default), "chen" (sqrt(L) segments) or "ilp" (exact on small graphs).
        optimizer: an optimizer or its name, to count its state and the temporaries of its step; None: those that
            step the model's parameters, found as the plan is made or when they do so in the loop.
        loss_fn: model output -> scalar loss, where the loss is not among the model's outputs.
        device: a device to plan for, here or not ("h100", "rtx4090", ...); None for where the model is. The model may
            be on `meta` or on fake tensors.
        accumulate: whether gradients of earlier microbatches are there when the step begins (gradient accumulation, or
            `zero_grad(set_to_none=False)`): they are then held beside the new ones.
        shard: how many devices share parameters, gradients and optimizer state, as FSDP does.
        checkpoints: what becomes of calls that the model itself checkpoints (`torch.utils.checkpoint`): "replace"
            plans them like the rest; "keep" recomputes them as their author asked, and plans around them.
        costs: what times are taken from: "roofline" (the device's datasheet), "measured" (each distinct op run on the
            device, kept on disk), or None: measured on a GPU that is here.
        account_gb: lines of `Plan.account` to set by hand, in GB, as {"CUDA context": 0.6, "fragmentation margin": 0};
            a new name adds a line for what else is on the device.
        time_limit: seconds for the solver; None for its default, which for "auto" is a count of steps and no clock.
        progress: show progress bars; None for only where a terminal is watching.
        dynamic: True where any size in the batch may be smaller at another step; or the largest sizes, by argument and
            dimension, as in `{"input_ids": {0: 8, 1: 2048}}` (by position, as in `{0: {0: 8}}`, for a positional
            batch): these may then be more than those of the batch. The plan is made for the largest, and holds for all.
            None: the third shape that comes tells which sizes change; from then on, one plan and one compiled graph
            serve all of them. False: each shape is planned and compiled for itself.
        keep: what must not run twice, such as a custom op whose second run gives something else: names of ops
            ("aten.bmm", "mylib::op", "triton_kernel_wrapper_functional" for Triton kernels that torch.compile looks
            into), paths of modules ("blocks.3.attn", with all that is in it) and patterns of either ("blocks.*.attn").
        mode: "aten" (torch.compile's graphs, rewritten, run op by op), "inductor" (compiled by Inductor, fused), or
            "eager": whole modules checkpointed, with some of their results kept, for code that cannot or shall not be
            compiled. That has a search of its own: `solver` and `time_limit` do not count. None: "inductor" for a model
            that is compiled (`torch.compile(model)`, `model.compile()`), with the options that it is compiled with;
            "aten" for others, and "eager" for those that torch.compile does not serve.
        pieces: "auto" lets ops that are independent along rows of tokens, or along the batch, run piece by piece where
            the budget is too small for anything else, or where that takes clearly less time than recomputation: the
            loss of a language model from its hidden states, without whole logits in either pass, or an MLP. What the
            pieces add up (the gradients of weights, the loss) is summed in another order: it equals what there is
            without a plan within rounding, and not bit for bit. False runs all ops whole. Only with mode="aten",
            where sizes are fixed, and not beside `keep`.
        in_flight: how many forward passes wait for their backward pass at once, the one that runs counted: microbatches
            of a pipeline, or of a loop that calls the model several times before `backward()`. What each of them keeps
            is counted, and part of what is decided. Without `accumulate`, so many forward passes run, then as many
            backward passes; with it, gradients are there already while as many wait.
        offload: where activations may go between their uses, beside being kept or recomputed: "cpu" (host memory, for
            a GPU), "disk" (for a model on the CPU), or None for nowhere. What goes, and when it comes back, is decided
            together with the rest, by the rates of the link. For mode="aten", one process and fixed shapes so far.
        host_gb: the most that may lie there at once, in GB; None for what is free.
        offload_dir: the folder of offload="disk", in a file without a name that nothing leaves behind; None for that of
            temporary files.
        step_in_backward: whether `optimizer`, an object of `torch.optim`, steps each parameter in the backward pass, as
            soon as its gradient is whole; that is freed then, and no gradient waits for the others. `optimizer.step()`
            and `zero_grad()` stay in the loop and do nothing more. Whatever reads or adds up gradients (clipping,
            scaling, accumulation) is refused with an error that says so.
        on_failure: what becomes of a model that cannot be planned: "raise" ends in an error, before its first step;
            "warn" lets it train as it is, after one PlanWarning that says why. Arguments that cannot be used are errors
            either way.
        known: an earlier plan, or its file: where the step and the budget turn out to be those that it was made for,
            its schedule is taken and no solver runs; the note says which it was.

    Returns:
        The plan; `apply()` puts it on the model.

    Raises:
        ModelError, BudgetError, BatchError, OptionError: an argument that cannot be used, named with its value.
        InfeasibleBudgetError: nothing fits; it carries the smallest budget that does. Without a batch, raised here
            where parameters, gradients and optimizer state exceed the budget already, else at the first training step.
        CaptureError: the model cannot be captured.
        OffloadError: values cannot be moved where `offload=` and `offload_dir=` say.
        PlanFileError: the file of a known plan cannot be read.
        TorchError: this torch lacks a private part that is needed.
        RankError: at the first training step, on every rank, where one of them cannot train by the plan; it says why.

    Examples:
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
        >>> p = plan(model, torch.zeros(32, 64), budget_gb=1, loss_fn=torch.Tensor.mean)
        >>> p.overhead, p.peak_bytes <= p.budget_bytes
        (0.0, True)
    """
    given = {name: value for name, value in locals().items() if name in _OPTIONS}
    request = check(model, batch, kwargs, loss_fn=loss_fn, **given)
    earlier = known_plan(known)
    try:
        return Plan(_source(request, earlier, batch, kwargs), model)
    except UNPLANNABLE as e:
        if on_failure == "raise":
            raise
        warn_unplanned(model, e)
        return Plan(Unplanned(request, str(e)), model)


def _source(request: Request, known: Known | None, batch: Any, kwargs: Any) -> Planned | Pending:
    """The plan of a request; where there is no batch that serves, what is asked for at the first training step."""
    if request.args is not None:
        start = time.perf_counter()
        try:
            planned = make_plan(request, known=known)
        except (BatchError, CaptureError):
            # an example that a Lightning model has may be out of date
            if batch is not None or kwargs:
                raise
        else:
            announce(planned, time.perf_counter() - start)
            return replace(planned, known=known)
    request = replace(request, batch=None, maxima=None, surroundings=None)
    if batch is not LATER:
        refuse_hopeless(request)
    return Pending(request, known)


def known_plan(given: Any) -> Known | None:
    """The plan that `known` of `plan()` means; raises OptionError, or PlanFileError."""
    if given is None:
        return None
    if isinstance(given, (str, os.PathLike)):
        return files.load(given)
    if not isinstance(given, Plan):
        raise OptionError(f"known={given!r} must be a plan, or the path of a plan file")
    made = given.made()
    return replace(made.without_batch(), known=None) if isinstance(made, Planned) else made


def applied_plan(model: nn.Module) -> Plan | None:
    """The plan that a model runs under, the newest where it has several; None where there is none (yet).

    After `Trainer.train()` or Lightning's `fit()`, which take the plan off, the plan that the model was trained by.
    """
    planned = applied(model)
    return None if planned is None else Plan.of(planned)


def applied_plans(model: nn.Module) -> tuple[Plan, ...]:
    """All plans that a model runs under, or was trained by: one for each kind of call, the largest step first.

    Kinds of calls differ in shapes, dtypes or modes; one plan may serve several of them. Steps are compared by what
    they would take with everything kept.
    """
    return tuple(map(Plan.of, all_applied(model)))


_OPTIONS = frozenset(f.name for f in fields(Options))
