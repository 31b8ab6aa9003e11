"""What a planned model takes, as the plans of others that train in the same loop count it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import torch
from torch import nn, optim

from planner.compat.tensors import storage_key
from planner.core.attributes import state_of
from planner.core.call import storages
from planner.core.objects import dense_tensors
from planner.core.plan import PlanRecord
from planner.planning.raised import with_between
from planner.requests.planned import Planned
from planner.runtime.evaluations import gradient_bytes, planned_bytes, tensors_of
from planner.runtime.signature import Signature
from planner.runtime.watch import Watch


class Holder:
    """A planned model, as `PlannedModel` has it.

    Args:
        model: the planned one.

    Attributes:
        plans: for each kind of call, by signature, its plan; that of the latest, where several come in a step.
        newest: the plan made last, with the request and the batch that it was made for.
        watch: what it sees of the loop, plans are made for; None once several processes have agreed on one.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.plans: dict[Signature, PlanRecord] = {}
        self.newest: Planned | None = None
        self.watch: Watch | None = None

    def waiting_calls(self) -> frozenset[int]:
        """The numbers of earlier calls that still wait for their backward pass, as far as that is known."""
        return frozenset()

    def when_used(self, number: int, then: Callable[[], object]) -> None:
        """Call a function when the backward pass of a call that waits for it begins, as far as that is known."""

    def count_between(self, signature: Signature, nbytes: int) -> None:
        """The loop takes so many bytes between its steps, which needs no other plan for a kind of call."""
        before = self.plans[signature]
        if (raised := with_between(before, nbytes)) is before:
            return
        self.plans[signature] = raised
        if self.newest is not None and self.newest.record is before:
            self.newest = replace(self.newest, record=raised)
        if self.watch is not None:
            self.watch.together.replace(signature, before, raised)

    def optimizers(self) -> list[optim.Optimizer]:
        """Those that stepped the model's parameters, and still exist, as far as they are known."""
        return [] if self.watch is None else self.watch.optimizers()

    def tensors(self) -> Any:
        """The model's parameters, buffers, gradients, and the state of its optimizers."""
        return tensors_of(self.model, self.optimizers())

    def states(self) -> list[torch.Tensor]:
        """The state of its optimizers, as far as it is in no memory of the model's own."""
        states = dense_tensors([list(optimizer.state.values()) for optimizer in self.optimizers()])
        own = storages(state_of(self.model))
        return [t for t in states if storage_key(t) not in own]

    def trained(self) -> list[nn.Parameter]:
        """The model's parameters."""
        return list(self.model.parameters())

    def outputs(self) -> Collection[int]:
        """The storages of what its calls returned, as far as they are alive and known, by identity."""
        return () if self.watch is None else self.watch.kept.keys()

    def stays(self, counted: Collection[optim.Optimizer]) -> int:
        """Bytes of all of these, as the newest plan counts them, without the state of optimizers that others count.

        That plan also counts what others take while activations of its model wait for their backward pass.
        """
        if self.newest is None:
            return 0
        return planned_bytes(self.model, self.newest.record, self.optimizers(), counted)

    def was_trained(self) -> bool:
        """Whether a backward pass has come of some call, as far as that is known."""
        return self.watch is None or self.watch.was_trained()

    def waiting(self) -> int:
        """How many of them wait."""
        return len(self.waiting_calls())

    def waiting_bytes(self) -> int:
        """Bytes of what calls have saved that wait for their backward pass."""
        record = None if self.newest is None else self.newest.record
        return 0 if record is None else self.waiting() * record.kept_bytes // record.step.loop.in_flight

    def takes(self, record: PlanRecord) -> tuple[int, int]:
        """Bytes that a call takes by a plan, with earlier ones that wait for their backward pass, but for what `stays`
        counts; and those that its forward pass takes.

        What other planned models take while it waits is none of it: the calls of two may take turns.
        """
        earlier = 0 if record.step.loop.in_flight > 1 else self.waiting() * record.kept_bytes
        graded = gradient_bytes(self.model)
        return record.taken_bytes(graded) + earlier, record.taken_bytes(graded, ("forward",)) + earlier
