"""Storages that come and go: their bytes, by identity, and none of them kept alive; and the ops that make them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import CodeType
from typing import Any

import torch
from torch import nn

from planner.compat.ops import OpOverload
from planner.compat.pytree import tree_leaves
from planner.core.call import Call, describe_call, storages

_STORAGES = (torch.UntypedStorage, torch.TypedStorage)
Made = tuple[int, int]  # a storage that was made: a number that no other one has, and its bytes
Place = tuple[CodeType, int]  # an instruction: of this code, at this byte of it


def takes_memory(t: torch.Tensor, device: torch.device) -> bool:
    """Whether a tensor takes memory of a device: one of a FakeTensorMode takes none."""
    return t.device == device and t.untyped_storage().device == device


def weak(value: Any) -> Callable[[], torch.Tensor | None]:
    """What gives a tensor as long as it is alive; None for anything else."""
    return weakref.ref(value) if isinstance(value, torch.Tensor) else _none


def _none() -> None:
    return None


def call_of(func: Any, args: Any, kwargs: Any, result: Any) -> Call | None:
    """The data of an op that ran; None where it is none of torch's, or is given a storage, which describes itself by
    all that is in it, or a sparse tensor, which has none.
    """
    if not isinstance(func, OpOverload) or any(map(_undescribed, tree_leaves((args, kwargs, result)))):
        return None
    return describe_call(func, args, kwargs, result)


def _undescribed(x: Any) -> bool:
    return isinstance(x, _STORAGES) or (isinstance(x, torch.Tensor) and x.layout != torch.strided)


@dataclass
class MadeStorages:
    """The storages that were entered, and are alive, by identity."""

    live: int = 0
    made: dict[int, Made] = field(default_factory=dict)
    number: int = 0

    def add(self, storage: torch.UntypedStorage, key: int) -> None:
        """Enter a storage, if it is not there."""
        if key not in self.made:
            self.number += 1
            self.made[key] = self.number, storage.nbytes()
            self.live += storage.nbytes()
            weakref.finalize(storage, self.drop, key).atexit = False

    def drop(self, key: int) -> None:
        """Count a storage no more."""
        if key in self.made:
            self.live -= self.made.pop(key)[1]


@dataclass(slots=True)
class Used:
    """A storage that an op outside the planned graphs has used, and that existed before."""

    nbytes: int
    trained: weakref.ref[nn.Parameter] | None = None  # used where its gradient may be asked for
    stays: bool = False  # it is a parameter, or was written into, or has `GoneInto` one between the steps
    shaped: bool = False  # as a parameter
    in_step: bool = False  # used before the first backward pass ended
    since: int | None = None  # how many ops ran before; None where something else counts it


UsedStorages = dict[int, Used]  # by identity, as long as they are alive


class GoneInto:
    """Marks what goes, by however many ops, into a model's parameters or gradients between the steps: it stays.

    Args:
        used: what existed before, of which only that which is shaped as a parameter is looked at.
        made: what ops have made.
        own: the storages of the model's parameters and gradients.

    Attributes:
        written: the storages that were written into between the steps.
    """

    def __init__(self, used: UsedStorages, made: MadeStorages, own: Sequence[Container[int]]) -> None:
        self._used, self._made, self._own = used, made, own
        self._sources: dict[int, set[int]] = {}  # what was made or written into -> what of the used has gone into it
        self.written = set[int]()

    def note(self, read: Iterable[int], fresh: Iterable[int], into: Collection[int], *, between: bool) -> None:
        """An op has read storages, made fresh ones, and written into some. O(storages)."""
        sources = {key for key in read if key in self._used and self._used[key].shaped}
        sources.update(*(self._sources.get(key, ()) for key in read))
        self._sources |= dict.fromkeys(fresh, sources)
        self._sources |= {key: self._sources.get(key, set()) | sources for key in into}
        if between:
            self.written.update(into)
            self.bound(key for key in into if any(key in each for each in self._own))

    def bound(self, keys: Iterable[int]) -> None:
        """The model's parameters or gradients have these storages, as a loop may bind others (`p.data = t`)."""
        for key in {source for each in keys for source in self._sources.get(each, ())} & self._used.keys():
            self._used[key].stays = True

    def replaced(self, parameters: Iterable[nn.Parameter]) -> set[int]:
        """The parameters, by identity, that were written into or have a storage that ops have made."""
        keys = ((id(p), key) for p in parameters for key in storages(p))
        return {at for at, key in keys if key in self.written or key in self._made.made}


@dataclass(frozen=True, slots=True)
class Event:
    """An op outside the planned graphs.

    Attributes:
        live: bytes of the recorded tensors once it has run, and of outputs of the step before that are still there.
        call: its key among the recorder's calls; "" for a call of another planned model, or of an op on storages.
        backward: whether it ran in a backward pass.
        places: the instruction of the loop's code in which it ran, and those that have called it; none in a backward
            pass, and for no op.
        made: the numbers of the storages that it made.
        others: of `live`, the bytes that other planned models take beside what is recorded.
        later: of these, what the backward pass of the model that is called takes.
        model: the identity of that model.
    """

    live: int
    call: str
    backward: bool
    places: tuple[Place, ...] = ()
    made: tuple[int, ...] = ()
    others: int = 0
    later: int = 0
    model: int = 0


@dataclass(frozen=True)
class LossEvents:
    """What was recorded between a forward pass and its backward pass; sizes in bytes, storages by identity.

    Attributes:
        let_go: how many of the events ran before the loop had let go of the last output that it did let go of.
        held: positions of the outputs that it still held.
        left: the tensors that were made and still alive.
        parts: of these, made by the backward pass of the loss.
        read: others that existed before and were read.
        between: how many of the events ran before the last of the calls that come before the backward pass.
        waits: what other planned models have saved for their own backward passes, which come later, by identity.
    """

    events: tuple[Event, ...]
    let_go: int
    held: tuple[int, ...]
    left: Mapping[int, Made]
    parts: frozenset[int]
    read: Mapping[int, int]
    between: int = 0
    waits: Mapping[int, int] = field(default_factory=dict)

    def with_waiting(self) -> LossEvents:
        """The same without the backward passes that come later, and with what waits for them once these models ran."""
        if not self.waits:
            return self
        events, waits = [], 0
        for event in self.events:
            later = event.later if event.model in self.waits else 0
            events.append(replace(event, live=event.live + waits - later, others=event.others - later))
            if event.model:
                waits = sum(self.waits.values())
        return replace(self, events=tuple(events))
