"""Calls of a planned model that run as they are, without torch.compile: which of them wait for their backward pass."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from planner.compat.autograd import adds_to_gradient, graph_is_kept, in_backward, when_backward_ends
from planner.core.account import BATCH
from planner.core.call import storages
from planner.core.objects import leaves
from planner.core.plan import PlanRecord
from planner.core.recipe import Choice
from planner.eager.checkpointing import checkpointed
from planner.errors import warn
from planner.runtime.outputs import Unasking

SURELY = 0.95  # of the budget, for an estimate
GROWN = 1.01  # from where on calls are larger than planned
_KEY = "call of a planned model"
_GRAPH = (
    "gradients of a planned model are computed with create_graph=True (a gradient penalty, a Hessian): no plan counts "
    "what the graph of its backward pass saves, and the step may take more than the budget. Leave room, or take the "
    "penalty of a smaller batch"
)
_RETURNED = (
    "gradients that torch.autograd.grad(..., retain_graph=True) returns are not seen where a planned model runs "
    "without compiled graphs, as with mode='eager': no plan counts what the loop keeps of them, and the step may take "
    "that much more. Leave room, or plan with mode='aten', which counts them"
)


def may_fit(record: PlanRecord, batch: Any) -> bool:
    """Whether a smaller batch than that of a plan may fit its budget in eager mode, if its step takes less in the same
    proportion.
    """
    now, then, most = sum(storages(batch).values()), record.account.get(BATCH, 0), record.eager_peak_bytes
    if not then or most is None:
        return False
    return record.resident_bytes + (most - record.resident_bytes) * now / then <= SURELY * record.budget_bytes


class _Call:
    """Lives as long as the autograd nodes of a call's results."""

    __slots__ = ("__weakref__", "begun", "ended", "model", "unseen", "used")

    def __init__(self, model: nn.Module, unseen: Callable[[str], None]) -> None:
        self.begun = self.ended = False  # its backward pass
        self.model, self.unseen = weakref.ref(model), unseen  # told of what that makes and no plan counts
        self.used: Callable[[], object] = bool  # told where it begins

    def begins(self, _: object) -> None:
        if not self.begun:
            self.begun = True
            self.used()
            when_backward_ends(self.ends)
            if torch.is_grad_enabled():
                self.unseen(_GRAPH)
            elif graph_is_kept() and not any(map(adds_to_gradient, getattr(self.model(), "parameters", list)())):
                self.unseen(_RETURNED)

    def ends(self) -> None:
        self.ended = True

    def waits(self) -> bool:
        """Whether its backward pass is to come, or has failed, which leaves what it saved there."""
        return not (self.ended or (self.begun and in_backward()))


class Uncompiled:
    """The latest calls that ran as they are.

    Args:
        seen: whether others of the model have run by compiled graphs, in which returned gradients are seen.
    """

    def __init__(self, seen: Callable[[], bool] = lambda: False) -> None:
        self._seen = seen
        self._grew, self._said = False, set[str]()
        self._calls: dict[int, weakref.ref[_Call]] = {}

    def add(self, model: nn.Module, number: int, result: Any) -> None:
        """A call of a model has run: its number, and what it gave."""
        call = _Call(model, self._unseen)
        begins = Unasking(call.begins)
        for t in leaves(result):
            if isinstance(t, torch.Tensor) and (node := t.grad_fn) is not None:
                metadata: Any = node.metadata
                metadata[_KEY] = call
                t.register_hook(begins)  # type: ignore[no-untyped-call]
        self._calls[number] = weakref.ref(call)

    def run(self, model: nn.Module, choice: Choice, number: int, call: Callable[[], Any]) -> Any:
        """Run a call of the model, which has a number, with the chosen modules checkpointed; what it gives."""
        with checkpointed(model, choice) as given:
            result = call()
        self.add(model, number, result)
        if choice.elements and given.elements > GROWN * choice.elements and not self._grew:
            self._grew = True
            more = given.elements / choice.elements - 1
            warn(
                f"the modules of this {type(model).__name__} that run again are given {more:.0%} more than in the call "
                "that was planned for, as sizes depend on values there: such a step may take more than the budget. "
                "Plan for the batch for which they are the largest, or leave room"
            )
        return result

    def _unseen(self, what: str) -> None:
        """Warn once of what a backward pass makes and no plan counts."""
        if what not in self._said and not (what is _RETURNED and self._seen()):
            self._said.add(what)
            warn(what)

    def when_used(self, number: int, then: Callable[[], object]) -> None:
        """Call a function when the backward pass of a call that waits for it begins."""
        if (call := self._calls[number]() if number in self._calls else None) is not None:
            call.used = then

    def waiting(self) -> frozenset[int]:
        """The numbers of those that wait for their backward pass."""
        self._calls = {n: ref for n, ref in self._calls.items() if (call := ref()) is not None and call.waits()}
        return frozenset(self._calls)
