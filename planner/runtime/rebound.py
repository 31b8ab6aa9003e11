"""Tensors of the step before that a loop lets go of while it computes its loss, as it binds their variables anew.

`similarity = z @ z.T` holds the matrix of the step before until its own has been computed: from the next op on there is
one of them. The first step, which has none before it, shows neither; its bytecode does.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from types import CodeType, FrameType
from typing import Any

import torch

from planner.compat.autograd import references
from planner.compat.tensors import storage_key, viewed
from planner.core.frames import variables_of
from planner.errors import users_frame
from planner.runtime.made import Event, LossEvents, Made, Place

_STORES = ("STORE_FAST", "STORE_NAME", "STORE_GLOBAL", "STORE_DEREF")
_TWO = "STORE_FAST_STORE_FAST"  # of Python 3.13; STORE_FAST_LOAD_FAST binds the first of two
_MOVES = ("SWAP", "CACHE", "NOP", "EXTENDED_ARG", "BUILD_TUPLE", "UNPACK_SEQUENCE")
_ENDS = ("POP_", "RETURN_", "YIELD_", "JUMP_", "FOR_ITER", "STORE_ATTR", "STORE_SUBSCR", "RAISE_")
_OWN = 4  # references to the object of a variable: its own, two of variables here, and the argument that asks
_CALLERS = 6  # functions that are called by each other, of which the instructions are known


def places_of(frame: FrameType | None) -> tuple[Place, ...]:
    """The instruction of the user's code that runs, and those that have called it, inner ones first."""
    places: list[Place] = []
    while len(places) < _CALLERS and (frame := users_frame(frame)) is not None:
        places.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return tuple(places)


def rebound(losses: Sequence[LossEvents], kept: Collection[int], frame: FrameType | None) -> list[dict[int, int]]:
    """For each recorded loss, the storages that others take the place of in the next step, as soon as these are made.

    Each with the number of the first event that runs without the older one.

    Args:
        losses: of the first step, in which nothing was there before.
        kept: the storages that were made for the losses and that the next step begins with.
        frame: that runs, called by the loop.
    """

    def of(loss: LossEvents) -> dict[int, int]:
        ends = {key: _gone_from(loss.events, loss.left[key], key, frame) for key in loss.left if key in kept}
        return {key: at for key, at in ends.items() if at is not None}

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


def with_older(loss: LossEvents, nbytes: int, inside: int, code: CodeType | None) -> LossEvents:
    """A loss with so many bytes of the step before, and so many where ops run in a function's code."""

    def of(event: Event) -> int:
        return inside if code is not None and event.places and event.places[0][0] is code else nbytes

    return replace(loss, events=tuple(replace(e, live=e.live + of(e)) for e in loss.events))


def _gone_from(events: Sequence[Event], made: Made, key: int, frame: FrameType | None) -> int | None:
    """The first event after the statement that made a tensor and bound its variable; None where that is not known."""
    start = next((at for at, e in enumerate(events) if made[0] in e.made), None)
    places = () if start is None else events[start].places
    place = next((place for place in places if bound_alone(place, key, frame)), None)
    if start is None or place is None:
        return None
    code, first = place
    stores = _stores(code, first)
    latest = first
    for at in range(start + 1, len(events)):
        now = next((where for of, where in events[at].places if of is code), None)
        if now is None and place != places[0]:  # the call of a planned model may come of the same statement
            continue
        if now is None or not first <= now <= stores.end:
            return at if now is not None or latest >= stores.last_computed else None
        latest = max(latest, now)
    return None


def bound_alone(place: Place, key: int, frame: FrameType | None) -> bool:
    """Whether what an instruction computes goes into a variable that holds a storage which nothing else holds."""
    while frame is not None and frame.f_code is not place[0]:
        frame = frame.f_back
    if frame is None:
        return False
    variables = variables_of(frame)
    return any(_holds_alone(variables, name, key) for name in _stores(*place).names)


def _holds_alone(variables: Mapping[str, Any], name: str, key: int) -> bool:
    value = variables.get(name)
    if not isinstance(value, (list, tuple)):
        return _is_alone(value, key) and sys.getrefcount(value) <= _OWN
    found = [at for at, t in enumerate(value) if _is_alone(t, key)]
    inner = sys.getrefcount(value[found[0]]) if len(found) == 1 else _OWN  # that of a list, and the argument
    return inner < _OWN - 1 and sys.getrefcount(value) <= _OWN


def _is_alone(t: Any, key: int) -> bool:
    if not isinstance(t, torch.Tensor) or t.layout is not torch.strided or storage_key(t) != key:
        return False
    alone = torch.empty(1) if viewed(t) is None else torch.empty(1).view(1)
    return _references(t) == _references(alone)


def _references(t: torch.Tensor) -> tuple[int, ...]:
    """To a tensor, and to what it is a view of: an op may return a view of what it has made, as `torch.cdist` does."""
    base = viewed(t)
    return references(t) if base is None else (*references(t), *references(base), sys.getrefcount(base))


def names_of_result(frame: FrameType) -> tuple[str, ...]:
    """The variables to which the statement of the call that a function makes now binds the result, if nothing else."""
    stores = _stores(frame.f_code, frame.f_lasti)
    return stores.names if stores.last_computed == frame.f_lasti else ()


@dataclass(frozen=True, slots=True)
class _Stores:
    """What a statement binds.

    Attributes:
        names: of variables.
        last_computed: the instruction that computes the last of what they are bound to.
        end: the one that binds the last of them.
    """

    names: tuple[str, ...]
    last_computed: int
    end: int


@cache
def _stores(code: CodeType, at: int) -> _Stores:
    """The variables that the statement of an instruction binds; none for other uses.

    The instruction's own result may be bound to any of them, or to none: what the variables hold tells.
    """
    names: list[str] = []
    last = end = at
    for each in dis.get_instructions(code):
        if each.offset <= at:
            continue
        if each.opname.startswith(_STORES):
            names += each.argval if each.opname == _TWO else [_first(each.argval)]
            end = each.offset
        elif names or each.opname.startswith(_ENDS):
            break
        elif not each.opname.startswith(_MOVES):
            last = each.offset
    return _Stores(tuple(names), last, end)


def _first(argument: Any) -> Any:
    return argument[0] if isinstance(argument, tuple) else argument
