"""A budget in GB, from what a user gives: a number, bytes with a unit, a share of the device's memory, or nothing."""

from __future__ import annotations

import re
import reprlib
from typing import Any

import torch

from planner.compat.pytree import tree_leaves
from planner.core.call import storages
from planner.core.options import GB, is_positive
from planner.devices.accelerator import present
from planner.errors import BudgetError, gb, warn
from planner.requests.request import Request

RESERVE = 128 * 2**20  # bytes of a device, for kernels that are loaded later
MOST = 2**20  # GB; more is no memory of a device, but probably a number of bytes
UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}  # MB and MiB alike, as CUDA's own tools print them
_AMOUNT = re.compile(r"\s*((?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)\s*(?:([kmgt])i?b?|b|bytes?)\s*", re.IGNORECASE)
_SHARE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*%\s*")


def budget_of(request: Request) -> float:
    """The budget of a request in GB of 2**30 bytes; None in its options is what is free, or all of a card.

    Raises:
        BudgetError: it is no budget, or so large that it was probably meant in another unit.
    """
    given, device = request.options.budget_gb, request.device
    if given is None and present(request.model_device) is not None:
        return _free(request)
    if given is None and device.type != "cpu":
        return device.memory / GB
    budget = read(given, device.memory)
    if budget > MOST:
        meant = (
            f". As bytes it would be {gb(budget)}: give budget_gb={budget / GB:.4g}, or budget_gb='{budget:.0f} B'"
            if not isinstance(given, str)
            else ""
        )
        raise BudgetError(f"budget_gb={given!r} is {budget:.3g} GB, more than any device has{meant}")
    if budget * GB > device.memory:
        as_megabytes = not isinstance(given, str) and budget >= 1000
        meant = f"; for {gb(budget * 2**20)}, give '{budget:g} MB'" if as_megabytes else ""
        most = device.memory / GB
        warn(
            f"budget_gb={given!r} is more than the {gb(device.memory)} of {device.name}; the plan may not fit "
            f"there: give at most budget_gb={most:.4g}, or None for what is free{meant}"
        )
    return budget


def read(given: Any, memory: float) -> float:
    """GB of a number, an amount or a share of `memory` bytes; BudgetError for anything else."""
    if (found := _read(given, memory)) is None:
        shown = "no budget_gb was given: it" if given is None else f"budget_gb={reprlib.repr(given)}"
        raise BudgetError(
            f"{shown} must be a positive, finite number of GB (1 GB = 2**30 bytes), an amount with its unit as '12 GB' "
            "or '500 MiB' (MB and MiB are 2**20 bytes), a share of the device's memory as '80%', or, for a GPU, None "
            "for what is free"
        )
    return found


def _read(given: Any, memory: float) -> float | None:
    if not isinstance(given, str):
        return float(given) if is_positive(given) else None
    if share := _SHARE.fullmatch(given):
        return memory / GB * float(share[1]) / 100 if 0 < float(share[1]) <= 100 else None
    amount = _AMOUNT.fullmatch(given)
    if amount is None:
        return None
    nbytes = float(amount[1]) * UNITS[(amount[2] or "").upper()]
    return nbytes / GB if is_positive(nbytes) else None


def _free(request: Request) -> float:
    """What the accelerator has free, with what the plan's own tensors have there already, in GB; at most all of it.

    Kernels are loaded when they first run, outside the allocator: those of a step are loaded before what is free is
    asked for, and `RESERVE` is left for others.
    """
    where, model = request.model_device, request.model
    accelerator = present(where)
    assert accelerator is not None
    accelerator.prepare(where)
    gradients = [p.grad for p in model.parameters() if request.accumulates]
    state = [list(o.state.values()) for o in request.optimizers if isinstance(o, torch.optim.Optimizer)]
    own = [*model.parameters(), *model.buffers(), *gradients, request.args, request.kwargs, state]
    tensors = [t for t in tree_leaves(own) if isinstance(t, torch.Tensor) and t.device.type == where.type]
    held = sum(storages(tensors).values()) + request.device.context + request.device.blas
    return min(accelerator.available(where) + held, request.device.memory) / GB - (
        RESERVE / GB if request.device.caches else 0
    )
