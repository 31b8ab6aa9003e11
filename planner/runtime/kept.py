"""What a loop keeps of a model beside its plan: outputs of earlier calls."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from planner.compat.modules import each_parameter
from planner.compat.tensors import key_of
from planner.core.attributes import state_of
from planner.core.call import bytes_of_elements, inside, storages, tensors_in
from planner.core.loop import Loop, LossSeen
from planner.core.objects import dense_tensors, leaves
from planner.core.plan import PlanRecord
from planner.errors import gb, warn

GROWS = 3  # rounds in a row in which more was held than ever before
SMALL = 512  # bytes: such outputs are not looked at


@dataclass(slots=True, eq=False)
class _Output:
    nbytes: int
    call: int
    old: bool = False
    alive: weakref.ref[Any] | None = None  # of its storage, which tells when that is gone


class KeptOutputs:
    """The outputs of earlier calls that are alive; it keeps none alive.

    Attributes:
        old: bytes of those that are not of the call that runs nor of the one before.
    """

    def __init__(self) -> None:
        self.old = self._call = 0
        self._there: dict[int, _Output] = {}
        self._young: deque[tuple[int, int, _Output]] = deque()
        self._number = self._most = self._grew = 0
        self._loop: Loop | None = None
        self._base = 0
        self._warned = False

    def call_begins(self) -> None:
        """Another step's call begins: the outputs of the one before the last are old now. O(1) for each output."""
        self._call += 1
        while self._young and self._young[0][0] < self._call - 1:
            call, key, output = self._young.popleft()
            if self._there.get(key) is output and output.call == call:
                output.old = True
                self.old += output.nbytes
                self._number += 1

    def returned(self, outputs: Sequence[Any], batch: Any, model: nn.Module) -> None:
        """A call has returned these; an input that it hands back is not its own, nor what is on another device."""
        if self._warned:
            return
        given: dict[int, int] | None = None
        for t in (part for each in tensors_in(outputs) if each.grad_fn is not None for part in inside(each)):
            storage = t.untyped_storage()
            key, nbytes = key_of(storage), storage.nbytes()
            if nbytes < SMALL:
                continue
            if given is None:
                given, device = storages(dense_tensors(batch)), next(each_parameter(model)).device
            if key in given or t.device != device:
                continue
            output = self._there.get(key)
            if output is None:
                output = self._there[key] = _Output(nbytes, self._call)
                output.alive = weakref.ref(storage, partial(self._gone, key, output))
            else:
                self._no_more(output)
                output.call, output.old = self._call, False
            self._young.append((self._call, key, output))

    def keys(self) -> Collection[int]:
        """The storages of the outputs that are alive, by identity."""
        return set(self._there)

    def _gone(self, key: int, output: _Output, _: object) -> None:
        if self._there.get(key) is output:
            del self._there[key]
            self._no_more(output)

    def _no_more(self, output: _Output) -> None:
        if output.old:
            self.old -= output.nbytes
            self._number -= 1

    def look(self, plan: PlanRecord, model: nn.Module, result: Any, *, round_begins: bool) -> None:
        """Warn, once, where old outputs take more than the plan of the present call counts and leaves free.

        A plan counts those that were there when its loop was seen; they are taken to become ever more where their
        number has grown from round to round, which other sizes of the batch do not tell from growth.
        """
        if self._warned:
            return
        loop, free = plan.step.loop, max(0, plan.budget_bytes - plan.peak_bytes)
        if loop != self._loop:
            self._loop, self._base = loop, self.old
        if round_begins:
            self._grew = self._grew + 1 if self._number > self._most else 0
            self._most = max(self._most, self._number)
        counted = _counted(loop, loop.loss)
        if self._grew >= GROWS:
            counted = min(counted, self._base)
        elif loop.loss is not None and self.old - counted > free:
            counted = _counted(loop, loop.loss.of(bytes_of_elements(leaves(result))))
        if self.old - counted <= free:
            return
        own = storages(state_of(model))
        old = sum(output.nbytes for key, output in list(self._there.items()) if output.old and key not in own)
        if old - counted > free:
            self._warned = True
            warn(
                f"the loop still holds {gb(old)} of outputs of earlier calls of the model, {gb(old - counted)} more "
                f"than this plan counts: the step takes up to {gb(plan.peak_bytes + old - counted)} of "
                f"{gb(plan.budget_bytes)}. Keep a number or a copy on the host instead (loss.item(), "
                "output.detach().cpu()), or let go of them; a view or detach() holds the whole output"
            )


def _counted(loop: Loop, loss: LossSeen | None) -> int:
    """Bytes that a plan counts for what the loop holds of earlier calls."""
    return loop.others + (0 if loss is None else loss.stays + loss.waiting + loss.made)
