"""Calls of a planned model without gradients, such as an evaluation: no plan is for them, so what they take is said."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from planner.compat.dispatch import LastingMode
from planner.compat.tensors import is_traceable_wrapper_subclass, storage_key
from planner.core.account import BATCH
from planner.core.call import storages, tensors_in
from planner.core.plan import PlanRecord
from planner.costs.static_memory import storage_bytes
from planner.errors import gb, warn

log = logging.getLogger("planner")


class Allocated(LastingMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of the tensors that are made on a device while it is on.

    Attributes:
        live: of those that are there.
        peak: the most at once.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.live = self.peak = 0
        self._made: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(map(is_traceable_wrapper_subclass, tensors_in((args, kwargs)))):
            return NotImplemented  # the wrapper's own ops on the tensors inside it come here
        result = func(*args, **kwargs)
        if not self.over:
            try:
                self._note(args, kwargs, result)
            except Exception as e:  # whatever an op returns, the call goes on
                log.debug("what a call without gradients takes was not measured: %s: %s", type(e).__name__, e)
                self.over = True
        return result

    def _note(self, args: Any, kwargs: Any, result: Any) -> None:
        given = storages((args, kwargs))
        for t in tensors_in(result):
            key = storage_key(t)
            if t.device == self.device and key not in given and key not in self._made:
                storage = t.untyped_storage()
                self._made[key] = storage.nbytes()
                self.live += storage.nbytes()
                weakref.finalize(storage, self._freed, key).atexit = False
        self.peak = max(self.peak, self.live)

    def _freed(self, key: int) -> None:
        self.live -= self._made.pop(key, 0)


def measured_call(run: Callable[[], Any], model: nn.Module, plan: PlanRecord, batch: int, beside: int) -> Any:
    """The result of a call without gradients, with a warning where it takes more than the plan's budget.

    Args:
        run: makes the call.
        model: that is called.
        plan: for its training steps.
        batch: bytes that it is given.
        beside: bytes that the loop holds, with that batch, more than when a training step begins.
    """
    mode = Allocated(next(model.parameters()).device)
    with mode:
        result = run()
    gradients = storage_bytes([p.grad for p in model.parameters() if p.grad is not None])
    held = plan.resident_bytes - plan.account.get(BATCH, 0) + gradients + beside
    if mode.over or held + mode.peak <= plan.budget_bytes:
        return result
    room = max(0, plan.budget_bytes - held + batch) / (mode.peak + batch)
    smaller = f"give it batches of about {room:.0%} of that size, or " if room > 0.01 else ""
    warn(
        f"a call of this {type(model).__name__} without gradients takes {gb(held + mode.peak)} of a budget of "
        f"{gb(plan.budget_bytes)}: {gb(mode.peak)} for a batch of {gb(batch)}, beside what the training loop holds "
        f"({gb(gradients)} of gradients). No plan is for such calls: {smaller}call it with fewer tensors there, as "
        "after zero_grad(set_to_none=True)"
    )
    return result
