"""A checked call of `plan()`: its options, and what they came to for this model on this machine."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from planner.core.identity import TensorKind
from planner.core.loop import Loop
from planner.core.maxima import Maxima
from planner.core.occupancy import Occupancy
from planner.core.options import GB, Costs, Options
from planner.core.recipe import Settings
from planner.core.surroundings import Surroundings
from planner.devices.specs import Device
from planner.errors import ModelError
from planner.requests.batch import Batch
from planner.requests.optimizers import Found


@dataclass(frozen=True, eq=False)
class Request:
    """What one plan is made for; the model is held weakly.

    Attributes:
        options: the options that were asked for, as data.
        model_ref: the model.
        batch: what the model is called with; None where it is not known.
        optimizer: the optimizer, or its name, or None.
        found: where none was named, the optimizers of the model that were found.
        loss_fn: model output -> scalar loss.
        budget_gb: the budget in GB, where `options` may have a share of the device or None.
        device: the device that is planned for.
        measure_on: the same as a torch device, where it is here; else None.
        costs: the source of times, chosen where `options` has None.
        model_device: the torch device where the model was.
        maxima: the sizes that are planned for where those of the batch may be smaller; None where all are as in `args`.
        occupancy: microbatches in flight, where they are not as `in_flight` says: a stage of a pipeline.
        assume_median_branch: where the model's code decides by a random number, whether to plan for the branch that it
            takes most often, or for that of this call.
        kinds: the tensors of the batch, where the batch itself is not kept.
        beside: lines of the account that are allocated beside the model, as DDP's buckets are: name -> bytes.
        gradients_viewed: whether gradients are views of these, so that a backward pass copies and frees each of them.
        loop: what the training loop was seen to do around the planned graphs.
        runs: whether the model runs with the plan now: it is traced as it runs, for whatever device that is.
        surroundings: what was on where the step was asked for; None where that is still to come.
        settings: those of Inductor that the model was compiled with by its user.
        uncompiled: whether the step may run without torch.compile, if that fits the budget.
        any_mode: whether no mode was asked for: the plan may be one of mode "eager" where torch.compile does not serve.
        instead: where no mode was asked for, why the plan is of another than it would be, in a sentence; else empty.
        brief: whether the plan is for a step or two, until the training loop is known, and is searched for briefly.
    """

    options: Options
    model_ref: weakref.ref[nn.Module]
    batch: Batch | None
    optimizer: torch.optim.Optimizer | str | None
    loss_fn: Callable[[Any], torch.Tensor] | None
    budget_gb: float
    device: Device
    measure_on: torch.device | None
    costs: Costs
    model_device: torch.device
    maxima: Maxima | None = None
    occupancy: Occupancy | None = None
    assume_median_branch: bool = True
    kinds: tuple[TensorKind, ...] | None = None
    beside: Mapping[str, int] = field(default_factory=dict)
    gradients_viewed: bool = False
    loop: Loop = Loop()
    surroundings: Surroundings | None = None
    found: Found = ()
    runs: bool = False
    settings: Settings = ()
    uncompiled: bool = False
    any_mode: bool = False
    instead: str = ""
    brief: bool = False

    @property
    def foreign(self) -> bool:
        """Whether the step is that of a device on which the model is not."""
        return not self.runs and self.device.type != self.model_device.type

    @property
    def args(self) -> tuple[Any, ...] | None:
        """The positional arguments of the batch; None where no batch is known, or its tensors are gone."""
        found = self.batch and self.batch.arguments
        return found[0] if found else None

    @property
    def kwargs(self) -> Mapping[str, Any]:
        """The keyword arguments of the batch."""
        found = self.batch and self.batch.arguments
        return found[1] if found else {}

    @property
    def gradients_copied(self) -> bool:
        """Whether gradients go where others are there already, and are freed."""
        return self.accumulates or self.gradients_viewed

    @property
    def accumulates(self) -> bool:
        """Whether gradients of earlier microbatches are there when the step begins."""
        return self.options.accumulate or self.loop.gradients == "accumulated"

    @property
    def in_flight(self) -> int:
        """How many forward passes wait for their backward pass at once, the one that runs counted."""
        return max(self.options.in_flight, self.loop.in_flight)

    @property
    def optimizers(self) -> list[torch.optim.Optimizer | str]:
        """The optimizer that was named, or those that were found and still exist."""
        if self.optimizer is not None:
            return [self.optimizer]
        return [optimizer for ref in self.found if (optimizer := ref()) is not None]

    @property
    def batch_kinds(self) -> tuple[TensorKind, ...] | None:
        """The tensors of the batch, at the largest sizes; None where no batch is known."""
        return self.kinds if self.batch is None else self.batch.kinds(self.maxima)

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
