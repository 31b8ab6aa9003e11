"""What a training loop holds when a step begins, beside what plans count by themselves: whether that has grown.

A list of outputs that grows, a copy of the weights that is made now and then: nothing in the first steps tells of them.
So the tensors that are there are counted now and then, and compared with an earlier step of the same kind.
"""

from __future__ import annotations

import gc
import inspect
from collections import Counter
from collections.abc import Hashable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn, optim

from planner.compat.fake import FakeTensor
from planner.compat.tensors import storage_key
from planner.core.call import inside, tensors_in
from planner.core.plan import PlanRecord
from planner.devices.accelerator import accelerator_of
from planner.errors import gb, warn

MOST_KINDS = 64  # of steps that are compared, each with its own
ASKED = 16  # after so many steps an allocator is asked, which takes it 0.1 ms
WORTH = 100  # parts of the budget: one that is held more between steps is worth a new plan

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Grown:
    """What is held more than in an earlier step.

    Attributes:
        nbytes: of all of it.
        what: that grew most, in words.
    """

    nbytes: int
    what: str

    def warn(self, plan: PlanRecord) -> None:
        """Say that steps by a plan have held more than that counts."""
        text = (
            f"the training loop holds {gb(self.nbytes)} more between its steps than this plan counts, {self.what}: "
            f"steps took up to {gb(plan.peak_bytes + self.nbytes)} of {gb(plan.budget_bytes)}. The plan is made anew "
            "for that. What grows with every step, such as a list of outputs, no plan can hold: keep numbers of it "
            "(.item()), or free it"
        )
        warn(text)


@dataclass(frozen=True, slots=True)
class Held:
    """The tensors of a device: bytes of all, and how many there are of each shape and size in bytes."""

    nbytes: int
    shapes: Counter[tuple[Shape, int]]


def held(device: torch.device, counted: Any = ()) -> Held:
    """The tensors of a device that Python knows, without those in the tree `counted`, gradients of parameters and the
    states of optimizers, for which plans have lines. O(objects of the process).
    """
    objects = gc.get_objects()
    states = [list(o.state.values()) for o in objects if issubclass(type(o), optim.Optimizer) and hasattr(o, "state")]
    # isinstance() asks objects for their class, and some raise
    tensors = [t for t in objects if issubclass(type(t), torch.Tensor) and not issubclass(type(t), FakeTensor)]
    del objects
    gradients = [t.grad for t in tensors if issubclass(type(t), nn.Parameter)]
    own = sizes([counted, states, gradients]).keys()
    found: dict[int, tuple[Shape, int]] = {}
    for t in tensors:
        for part in _parts(t):
            key = storage_key(part)
            if part.device == device and key not in own and key not in found:
                found[key] = tuple(part.shape), part.untyped_storage().nbytes()
    return Held(sum(nbytes for _, nbytes in found.values()), Counter(found.values()))


def sizes(tree: Any) -> dict[int, int]:
    """The storages of the tensors in a tree, of those that have some: identity -> bytes."""
    parts = [part for t in tensors_in(tree) for part in _parts(t)]
    return {storage_key(part): part.untyped_storage().nbytes() for part in parts}


def _parts(t: torch.Tensor) -> list[torch.Tensor]:
    with suppress(RuntimeError, NotImplementedError, AttributeError):  # without a storage
        parts = inside(t)
        return parts if all(part.untyped_storage() is not None for part in parts) else []
    return []


class Holdings:
    """What steps hold when they begin, by kind of step; each is looked at after 1, 2, 4, 8, ... steps of its kind, and
    where the device's allocator, asked every 16 steps, tells that more is there.
    """

    def __init__(self) -> None:
        self._steps: Counter[Hashable] = Counter()
        self._first: dict[Hashable, tuple[Held, int]] = {}  # and bytes of it that plans count
        self._allocated: dict[Hashable, int] = {}
        self._latest: tuple[Held, int] | None = None  # of the first

    def grown(self, kind: Hashable, device: torch.device, batch: Any, counts: int, least: int) -> Grown | None:
        """What a step holds more than the first of its kind, and no plan counts; None where it was not looked at, too.

        Args:
            kind: of the step, which begins.
            device: on which to look.
            batch: of the step.
            counts: bytes that plans count of what the loop holds.
            least: bytes that are worth a new plan.
        """
        self._latest = self._first.get(kind)
        if len(self._steps) == MOST_KINDS and kind not in self._steps:
            return None
        self._steps[kind] += 1
        steps = self._steps[kind]
        if steps & (steps - 1) and (steps % ASKED or not self._allocates(kind, device, least)):
            return None
        if _in_step():
            return None
        if kind not in self._first:  # what Python frees later would hide as much that is new
            gc.collect()
        now = held(device, batch)
        first, counted = self._latest = self._first.setdefault(kind, (now, counts))
        if self._more(now, first, counts - counted) <= least:
            return None
        gc.collect()
        now = held(device, batch)
        more = self._more(now, first, counts - counted)
        return Grown(more, _words(now, first)) if more > least else None

    def beside(self, device: torch.device, counts: int) -> int | None:
        """Bytes that are there now beside those with which steps like the latest begin, all batches among them; None
        where no such step was looked at. `counts` as above.
        """
        if self._latest is None:
            return None
        first, counted = self._latest
        return self._more(held(device), first, counts - counted)

    def _more(self, now: Held, first: Held, counted: int) -> int:
        return now.nbytes - first.nbytes - counted

    def _allocates(self, kind: Hashable, device: torch.device, least: int) -> bool:
        accelerator = accelerator_of(device)
        if accelerator is None:
            return False
        allocated = accelerator.allocated(device)
        before = self._allocated.get(kind, 0)
        self._allocated[kind] = max(before, allocated)
        return allocated > before + least


def warn_waiting(plan: PlanRecord, beyond: int) -> None:
    """Say that earlier calls, by another plan, held so many bytes more in a forward pass than the plan counts for them,
    where it leaves too little room.
    """
    most = max((m.held_bytes for m in plan.timeline if m.phase in ("forward", "loss")), default=0) + beyond
    if most > plan.budget_bytes:
        text = (
            f"an earlier call of the model still held what it saved for a backward pass, {gb(beyond)} more than this "
            f"plan counts: the forward pass took up to {gb(most)} of {gb(plan.budget_bytes)}. Where a step is left "
            "out, as one whose loss is not finite, let go of its loss before the next: loss = None"
        )
        warn(text)


def worth(plan: PlanRecord | None) -> int | None:
    """Bytes that are worth a new plan, in the place of this one."""
    return None if plan is None else plan.budget_bytes // WORTH


def _in_step() -> bool:
    """Whether an optimizer's closure runs: each of its calls finds other tensors of the step.

    Every `step` is called by a wrapper in torch's module of the base class.
    """
    frame, place = inspect.currentframe(), inspect.getfile(optim.Optimizer)
    while frame is not None and frame.f_code.co_filename != place:
        frame = frame.f_back
    return frame is not None


def _words(now: Held, first: Held) -> str:
    more = now.shapes - first.shapes
    (shape, nbytes), count = max(more.items(), key=lambda each: each[0][1] * each[1], default=(((), 0), 0))
    return f"{count} tensor{'s' if count > 1 else ''} of shape {shape} most of all" if nbytes else ""
