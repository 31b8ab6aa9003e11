"""What the user asked for, checked before anything is done."""

from __future__ import annotations

import math
import numbers
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from solvers import SOLVERS

from .errors import BatchError, BudgetError, ModelError, OptionError

GB = 2**30


@dataclass(frozen=True, eq=False)
class Request:
    """The arguments of `plan()`, checked; the model is held weakly."""

    model_ref: weakref.ref[nn.Module]
    args: tuple[Any, ...] | None
    kwargs: Mapping[str, Any]
    budget_gb: float
    solver: str
    optimizer: torch.optim.Optimizer | str | None
    loss_fn: Callable[[Any], torch.Tensor] | None
    device: str | torch.device | None
    time_limit: float | None
    progress: bool | None

    @property
    def budget_bytes(self) -> int:
        """The budget in bytes; 1 GB is 2**30 bytes."""
        return round(self.budget_gb * GB)

    @property
    def model(self) -> nn.Module:
        """The model; raises ModelError when it is gone."""
        model = self.model_ref()
        if model is None:
            raise ModelError("the model that this plan was made for no longer exists")
        return model


def check(
    model: Any,
    batch: Any,
    kwargs: Any,
    budget_gb: Any,
    solver: Any,
    optimizer: Any,
    loss_fn: Any,
    device: Any,
    time_limit: Any,
    progress: Any,
) -> Request:
    """The request, or the first thing that is wrong with it: ModelError, BudgetError, BatchError or OptionError."""
    if not isinstance(model, nn.Module):
        raise ModelError(f"plan() needs a torch.nn.Module; it was given {model!r} of type {type(model).__name__}")
    if not any(p.requires_grad for p in model.parameters()):
        raise ModelError(f"{type(model).__name__}: no parameter needs a gradient, so there is no training step to plan")
    if any(nn.parameter.is_lazy(p) for p in model.parameters()):
        raise ModelError(
            f"{type(model).__name__} has lazy parameters without a shape; run it once on a batch, then plan"
        )
    number = isinstance(budget_gb, numbers.Real) and not isinstance(budget_gb, bool)
    if not number or not math.isfinite(float(budget_gb)) or float(budget_gb) <= 0:
        raise BudgetError(f"budget_gb={budget_gb!r} must be a positive, finite number of GB (1 GB = 2**30 bytes)")
    if solver not in SOLVERS:
        raise OptionError(f"solver={solver!r} is not known; give one of {', '.join(SOLVERS)}")
    limited = time_limit is None or (
        isinstance(time_limit, (int, float)) and math.isfinite(time_limit) and time_limit > 0
    )
    if not limited:
        raise OptionError(f"time_limit={time_limit!r} must be a positive number of seconds, or None")
    if loss_fn is not None and not callable(loss_fn):
        raise OptionError(f"loss_fn={loss_fn!r} must be callable: the model's output -> the scalar loss")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise BatchError(f"kwargs={kwargs!r} must be a mapping of keyword arguments, or None")
    args, extra = arguments(model, batch, kwargs)
    return Request(
        weakref.ref(model), args, extra, float(budget_gb), solver, optimizer, loss_fn, device, time_limit, progress
    )


def arguments(
    model: nn.Module, batch: Any, kwargs: Mapping[str, Any] | None
) -> tuple[tuple[Any, ...] | None, dict[str, Any]]:
    """How the model is called on a batch: positional arguments (None: no batch is known) and keyword arguments.

    Raises:
        BatchError: the batch is neither a tensor, a tuple, a list nor a mapping.
    """
    extra = dict(kwargs or {})
    if batch is None and not extra:
        for convention in ("dummy_inputs", "example_input_array"):
            batch = getattr(model, convention, None)
            if batch is not None:
                break
        else:
            return None, extra
    if batch is None:
        return (), extra
    if isinstance(batch, torch.Tensor):
        return (batch,), extra
    if isinstance(batch, Mapping):
        if any(not isinstance(k, str) for k in batch):
            raise BatchError(
                f"a mapping batch is called as model(**batch), so its keys must be strings; got {list(batch)!r}"
            )
        return (), {**batch, **extra}
    if isinstance(batch, (tuple, list)):
        return tuple(batch), extra
    raise BatchError(
        f"batch of type {type(batch).__name__} is not understood; give a tensor (model(batch)), a tuple or list "
        "(model(*batch)) or a mapping (model(**batch))"
    )
