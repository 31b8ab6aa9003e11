"""Which calls of a model one plan serves: those with the same signature."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from planner.compat import pytree
from planner.compat.modules import modules_in, tables_of
from planner.compat.tensors import is_traceable_wrapper_subclass
from planner.core.maxima import Maxima, layout
from planner.core.objects import tensors_at
from planner.parallel.sharded import parameters_among

Signature = tuple[Any, ...]
Role = tuple[object, ...]
NUMBERS = (int, float)
DIRECT = 2  # parts of the path of an argument itself
TENSOR = 7  # parts of what a signature says of a tensor
_LEAVES = (torch.Tensor, int, float, str, bool, type(None))  # of a batch, which is mostly these alone

_mode = attrgetter("training")
_trained = attrgetter("requires_grad")
_kind = attrgetter("shape", "requires_grad", "device", "dtype")


class Modes(tuple[bool, ...]):
    """The modes of a model's modules; hashed once, as it is looked up many times in a call."""

    def __hash__(self) -> int:
        if (known := self.__dict__.get("known")) is None:
            known = self.__dict__["known"] = super().__hash__()
        return known

    __eq__ = tuple.__eq__


class ModelState:
    """The part of a signature that is the model's: classes and modes of its modules, kinds of its parameters.

    Two states are equal where all of that is. The hash is computed once, and equal states that `model_state` gives are
    the same: a model may have thousands of parameters.

    Attributes:
        described: for each module its class and its mode; for each parameter its shape, whether it is trained, its
            device and its dtype.
        classes: the classes of the modules, each once.
        device_types: those of the parameters, "meta" left out.
    """

    def __init__(self, described: tuple[tuple[Any, ...], ...]) -> None:
        classes, _, parameters = self.described = described
        self.classes: list[type[nn.Module]] = list(dict.fromkeys(classes))
        self.device_types = sorted({device.type for _, _, device, _ in parameters} - {"meta"})
        self._hash = hash(described)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ModelState) and self.described == other.described

    def __hash__(self) -> int:
        return self._hash


_states: weakref.WeakValueDictionary[object, ModelState] = weakref.WeakValueDictionary()


def model_state(
    modules: Sequence[nn.Module], parameters: Sequence[nn.Parameter], last: ModelState | None = None
) -> ModelState:
    """The state of a model with these modules and parameters: the last one itself, where nothing has changed since.

    Modules and parameters have no version that would tell: this reads each of them once.
    """
    described = tuple(map(type, modules)), Modes(map(_mode, modules)), tuple(map(_kind, parameters))
    if last is not None and last.described == described:
        return last
    if (known := _states.get(described)) is None:
        known = _states[described] = ModelState(described)
    return known


@dataclass(frozen=True)
class Walk:
    """What a look at all modules of a model has found. It holds none of them.

    Attributes:
        state: of the model.
        modules: in the order of `modules_in`.
        classes, modes: of these.
        tables, members: the identities of the modules' tables and of all that is in them.
        own: which of the members are the parameters, each once.
        held: of each of these, where its memory is, and whether it is trained; empty where that does not tell.
    """

    state: ModelState
    modules: tuple[weakref.ref[nn.Module], ...]
    classes: list[type[nn.Module]]
    modes: list[bool]
    tables: list[int]
    members: list[int]
    own: tuple[int, ...]
    held: list[int]


def walk(model: nn.Module, last: Walk | None) -> tuple[Walk, list[nn.Module], list[nn.Parameter]]:
    """The modules and the parameters of a model, and its state: the last walk again, where all is as it was then.

    That takes a fourth of the time of going through the modules anew. Parameters are asked for their memory alone: one
    that has another shape in the same memory is seen by torch.compile's guards.
    """
    if last is not None and (found := _again(last)) is not None:
        return last, *found
    modules = modules_in(model)
    parameters = parameters_among(modules)
    state = model_state(modules, parameters, None if last is None else last.state)
    tables = tables_of(modules)
    members = list(chain.from_iterable(map(dict.values, tables)))
    places = {id(p): at for at, p in reversed(list(enumerate(members))) if isinstance(p, nn.Parameter)}
    plain = all(type(p) is nn.Parameter for p in parameters) and not any(isinstance(m, FSDPModule) for m in modules)
    made = Walk(
        state,
        tuple(map(weakref.ref, modules)),
        list(map(type, modules)),
        list(map(_mode, modules)),
        list(map(id, tables)),
        list(map(id, members)),
        tuple(sorted(places.values())),
        _held(parameters) if plain else [],  # FSDP has other parameters while it has gathered them
    )
    return made, modules, parameters


def _again(last: Walk) -> tuple[list[nn.Module], list[nn.Parameter]] | None:
    """The modules and parameters of a walk; None where anything is not as it was."""
    modules = [module for ref in last.modules if (module := ref()) is not None]
    if not last.held or len(modules) < len(last.modules):
        return None
    tables = tables_of(modules)
    if list(map(id, tables)) != last.tables:
        return None
    members = list(chain.from_iterable(map(dict.values, tables)))
    if list(map(id, members)) != last.members:
        return None
    parameters = [members[at] for at in last.own]
    if list(map(type, modules)) != last.classes or list(map(_mode, modules)) != last.modes:
        return None
    return (modules, parameters) if _held(parameters) == last.held else None


def _held(parameters: Sequence[torch.Tensor]) -> list[int]:
    return [*map(torch.Tensor.data_ptr, parameters), *map(_trained, parameters)]


def call_signature(
    model: nn.Module, args: Any, kwargs: Any, maxima: Maxima | None = None, state: ModelState | None = None
) -> Signature:
    """Equal for calls that one plan serves: same shapes, dtypes, devices, other arguments, modes, frozen parts.

    Where sizes may be smaller than maxima, these do not count, and neither do strings in containers, as names of files.
    A tensor that is passed twice is one input of a graph. The model is not read where its present state is given.
    """

    def describe(path: str, x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            if x.is_nested:  # no plan serves it, and it has no strides
                return ("nested", x.dtype)
            free = maxima.of(path) if maxima else {}
            shape = tuple(None if d in free else n for d, n in enumerate(x.shape))
            same = first.setdefault(id(x), len(first))
            kind = (
                str(x.__tensor_flatten__()[1]) if is_traceable_wrapper_subclass(x) else ""
            )  # how a DTensor is sharded
            dense = x.stride() if x.layout is torch.strided else x.layout
            strides = layout(x) if free else dense
            return (shape, strides, x.dtype, x.device, x.requires_grad, same, kind)
        if isinstance(x, (int, float, str, bool, type(None))):
            return x
        inner = tensors_at(path, x)  # of a batch that is an object
        return (type(x), *(describe(at, t) for at, t in inner)) if inner else type(x)

    first: dict[int, int] = {}
    if state is None:
        modules = modules_in(model)
        state = model_state(modules, parameters_among(modules))
    flat: list[Any] = [*args, *kwargs.values()]
    plain = all(isinstance(x, _LEAVES) for x in flat)
    if plain and not maxima:
        described = tuple(describe("", x) for x in flat)
        structure: object = (len(args), *kwargs)
    else:
        found, spec = pytree.tree_flatten_with_path((tuple(args), dict(kwargs)))
        described = tuple(
            str if type(x) is str and len(path) > DIRECT else describe(pytree.keystr(path) if maxima else "", x)
            for path, x in found
        )
        structure = (len(args), *kwargs) if plain else str(spec)
    return (
        described,
        structure,
        state,
        tuple((torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in state.device_types),
    )


def has_strings(signature: Signature) -> bool:
    """Whether such calls are given strings in containers, of which a model may have other graphs."""
    return str in signature[0]


def without_numbers(signature: Signature) -> Signature:
    """The same for calls that are given other numbers."""
    described, *others = signature
    return (tuple(type(each) if type(each) in NUMBERS else each for each in described), *others)


def without_strides(signature: Signature, positions: Collection[int]) -> Signature:
    """The same for calls whose arguments at these positions, of all leaves, are laid out otherwise."""
    described, *others = signature

    def without(each: Any) -> Any:
        return (each[0], None, *each[2:]) if isinstance(each, tuple) and len(each) == TENSOR else each

    return (tuple(without(each) if at in positions else each for at, each in enumerate(described)), *others)


def role_of(signature: Signature) -> Role:
    """What tells calls apart that a loop makes for different ends: the modes of the modules, and whether inputs get
    gradients. Shapes do not: batches of other sizes are trained alike.
    """
    described, _, state, *_ = signature
    given = any(len(each) == TENSOR and each[4] is True for each in described if isinstance(each, tuple))
    return given, state.described[1]


def evaluates(role: Role) -> bool:
    """Whether the model as a whole is in evaluation mode."""
    modes = role[1] if len(role) > 1 else ()
    return isinstance(modes, tuple) and modes[:1] == (False,)
