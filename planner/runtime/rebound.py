"""Tensors of the step before that a loop lets go of while it computes its loss, as it binds their variables anew.

`similarity = z @ z.T` holds the matrix of the step before until its own has been computed: from the next op on there is
one of them. The first step, which has none before it, shows neither; its bytecode does.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cache
from types import CodeType, FrameType

import torch

from planner.compat.autograd import references
from planner.compat.tensors import storage_key
from planner.core.frames import variables_of
from planner.errors import users_frame
from planner.runtime.made import Event, LossEvents, Made, Place

_STORES = ("STORE_FAST", "STORE_NAME", "STORE_GLOBAL", "STORE_DEREF")
_OWN = 4  # references to the object of a variable: its own, two of variables here, and the argument that asks


def place_of(frame: FrameType | None) -> Place | None:
    """The instruction of the user's code that runs."""
    own = users_frame(frame)
    return None if own is None else (own.f_code, own.f_lasti)


def rebound(losses: Sequence[LossEvents], kept: Collection[int], frame: FrameType | None) -> list[dict[int, int]]:
    """For each recorded loss, the storages that others take the place of in the next step, as soon as these are made.

    Each with the number of the first event that runs without the older one.

    Args:
        losses: of the first step, in which nothing was there before.
        kept: the storages that were made for the losses and that the next step begins with.
        frame: that runs, called by the loop.
    """

    def of(loss: LossEvents) -> dict[int, int]:
        ends = {key: _gone_from(loss.events, loss.left[key]) for key in loss.left if key in kept}
        return {k: at for k, at in ends.items() if at is not None and bound_alone(loss.events[at - 1].place, k, frame)}

    return [of(loss) for loss in losses]


def rebinding(loss: LossEvents, gone: Mapping[int, int], kept: Mapping[int, int]) -> LossEvents:
    """A recorded loss in which tensors take the place of the last step's.

    Args:
        loss: of the first step, in which nothing was there before.
        gone: their storages, each with the number of the first event that runs without the older one.
        kept: their bytes.
    """
    sizes = [sum(kept[key] for key, start in gone.items() if start <= at) for at in range(len(loss.events))]
    events = (replace(e, live=e.live - nbytes) for e, nbytes in zip(loss.events, sizes, strict=True))
    return replace(loss, events=tuple(events)) if gone else loss


def _gone_from(events: Sequence[Event], made: Made) -> int | None:
    """The first event after the instruction that made a tensor; None where that is not known."""
    start = next((at for at, e in enumerate(events) if made[0] in e.made), None)
    if start is None or (place := events[start].place) is None:
        return None
    return next((at for at in range(start + 1, len(events)) if events[at].place != place), None)


def bound_alone(place: Place | None, key: int, frame: FrameType | None) -> bool:
    """Whether what an instruction computes goes into a variable that holds a storage which nothing else holds."""
    while frame is not None and (place is None or frame.f_code is not place[0]):
        frame = frame.f_back
    if place is None or frame is None or (name := _variable(*place)) is None:
        return False
    variables = variables_of(frame)
    t = variables.get(name)
    if not isinstance(t, torch.Tensor) or t.layout is not torch.strided or storage_key(t) != key:
        return False
    return sys.getrefcount(t) <= _OWN and references(t) == references(torch.empty(1))


@cache
def _variable(code: CodeType, at: int) -> str | None:
    """The variable that takes the result of an instruction right away; None for another use of it."""
    following = next((each for each in dis.get_instructions(code) if each.offset > at), None)
    if following is None or not following.opname.startswith(_STORES):
        return None
    name = following.argval
    return str(name[0] if isinstance(name, tuple) else name)
