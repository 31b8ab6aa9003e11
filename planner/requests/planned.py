"""A plan together with the request that it answers, and its graphs."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from planner.capture.trace.step import TrainingGraph
from planner.core.plan import GraphModules, PlanRecord
from planner.requests.request import Request

Graphs = Callable[[], tuple[GraphModules, ...]]


def no_graphs() -> tuple[GraphModules, ...]:
    """The graphs of a plan that has none: of eager mode, or of a file."""
    return ()


@dataclass(frozen=True, eq=False)
class Planned:
    """A plan for a model that is here.

    Attributes:
        record: what was decided.
        request: what it was decided for.
        graphs: emits the graphs of each region.
        known: the plan that was given as known, for other kinds of steps.
        captured: the step that was captured; None in eager mode, and for a plan from a file.
        repeats: for a call that comes several times in a step which is planned together, the plans of those after the
            first.
    """

    record: PlanRecord
    request: Request
    graphs: Graphs = no_graphs
    known: Planned | Filed | None = None
    captured: TrainingGraph | None = None
    repeats: tuple[PlanRecord, ...] = ()

    def without_batch(self) -> Planned:
        """The same without the tensors of the batch that it was made for."""
        request = replace(self.request, batch=None, kinds=self.request.batch_kinds)
        return replace(self, request=request)

    def of(self, model: nn.Module) -> Planned:
        """The same for another model, such as a copy."""
        return replace(self, request=replace(self.request, model_ref=weakref.ref(model)))


@dataclass(frozen=True, eq=False)
class Filed:
    """A plan that was read from a file, or that another process sent: there is no model yet.

    Attributes:
        record: what was decided.
        source: the file, or the rank that sent it.
        loss_fn: model output -> scalar loss, which is in no file.
    """

    record: PlanRecord
    source: str
    loss_fn: Callable[[Any], torch.Tensor] | None = None


Known = Planned | Filed


@dataclass(frozen=True, eq=False)
class Pending:
    """A plan that is made at the first training step.

    Attributes:
        request: what is asked for; it has no batch.
        known: as of `Planned`.
    """

    request: Request
    known: Planned | Filed | None = None


@dataclass(frozen=True, eq=False)
class Unplanned:
    """A model that could not be planned, and trains as it is, as its user asked for with `on_failure="warn"`.

    Attributes:
        request: what was asked for.
        why: the error, in words.
    """

    request: Request
    why: str


def source_of(known: Known) -> str:
    """Where a known plan is from, in words."""
    return known.source if isinstance(known, Filed) else "the known plan"
