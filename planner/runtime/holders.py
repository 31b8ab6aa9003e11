"""Where a loop's variables hold tensors: which of them it binds anew before its next backward pass."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from types import CodeType, FrameType, ModuleType, NoneType
from typing import Any

import torch
from torch import nn

from planner.compat.frames import frame_of
from planner.compat.tensors import no_dispatch, storage_key
from planner.core.frames import variables_of
from planner.errors import users_frame
from planner.runtime.made import Made
from planner.runtime.rebound import names_of_result

_DEEPEST = 6  # objects in objects: those of an encoder and a decoder have keys and values of layers there
_MOST, _MOST_HELD = 512, 8192  # looked into for one variable, and looked at: it may hold a whole data set
_PLAIN = {int, float, bool, str, bytes, complex, NoneType, type, ModuleType, torch.dtype, torch.device}
_DENSE = {torch.Tensor, nn.Parameter}
_NEAR = 0.25  # of the square of the weights' length: that of the distance of a copy from them, at most
Path = tuple[Any, ...]  # an owner, a variable's name, and keys or attributes


@dataclass(frozen=True, slots=True)
class Held:
    """What the variables of the user's code hold at one moment, in all functions that run.

    Attributes:
        paths: storages, each with the paths that lead to it.
        sizes: the device and the bytes of each.
        tensors: one of those that have it.
        owners: what paths may begin with: the functions' frames, by identity; and None, for variables that functions
            share and those of modules.
        inner: the innermost function's frame, by identity, and its code.
    """

    paths: dict[int, set[Path]] = field(default_factory=dict)
    sizes: dict[int, tuple[torch.device, int]] = field(default_factory=dict)
    tensors: dict[int, weakref.ref[torch.Tensor]] = field(default_factory=dict)
    owners: set[int | None] = field(default_factory=lambda: {None})
    inner: tuple[int, CodeType] | None = None

    def by_callers(self, storages: Collection[int]) -> CodeType | None:
        """The code of the function that runs, where only those that have called it hold these storages: they do until
        it returns.
        """
        by = {path[0] for key in storages for path in self.paths.get(key, ())}
        return None if self.inner is None or not by or by & {None, self.inner[0]} else self.inner[1]


@dataclass(frozen=True, slots=True)
class Pass:
    """A backward pass, as it begins.

    Attributes:
        keeps: whether it keeps its graph.
        adds: whether it adds to the gradient of a parameter; not so where `torch.autograd.grad` returns them.
        left: the gradients that earlier passes of the step have left, by storage.
        paths: those that lead to each of them.
    """

    keeps: bool
    adds: bool
    left: Mapping[int, Made]
    paths: Mapping[int, set[Path]]

    def beside(self, now: Held, own: Collection[int], alive: Mapping[int, Made]) -> int:
        """Bytes of these gradients beside what the next step begins with.

        Those that are still there are among that, but for those to which other variables lead by now, too: a list
        (`gradients = [torch.autograd.grad(loss, parameters) for loss in losses]`) is bound when all of it is there, and
        the one of the step before is there until then.

        Args:
            now: what variables hold as the next step begins.
            own: storages of which the account has lines of their own, and which count here.
            alive: the gradients that are still there.
        """

        def stays(key: int) -> bool:
            there = key not in own and alive.get(key) == self.left[key]
            return there and now.paths.get(key, set()) <= self.paths[key]

        return sum(nbytes for key, (_, nbytes) in self.left.items() if not stays(key))


def held_in(thread: int) -> Held:
    """What the variables of the code that runs in a thread hold."""
    frame = users_frame(frame_of(thread))
    held = Held(inner=None if frame is None else (id(frame), frame.f_code))
    led_to: dict[int, list[tuple[Path, torch.Tensor]]] = {}  # by an object: functions hand on theirs to each other
    while frame is not None:
        held.owners.add(id(frame))
        for name, value in _variables(frame).items():
            if type(value) in _PLAIN:
                continue
            if (found := led_to.get(id(value))) is None:
                found = led_to[id(value)] = list(tensors_within(value))
            for path, t in found:
                held.paths.setdefault(key := storage_key(t), set()).add((_owner(frame, name), name, *path))
                held.sizes[key] = t.device, t.untyped_storage().nbytes()
                held.tensors.setdefault(key, weakref.ref(t))
        frame = users_frame(frame.f_back)
    return held


def staying(now: Held, then: Held | None, storages: Collection[int]) -> set[int]:
    """Of these storages, those that may stay until the next backward pass ends. What led to a tensor as the backward
    pass began, too, does so in each step, and is bound anew by then.

    Args:
        now: as the next step begins.
        then: as the backward pass began; None where nothing is known of it.
        storages: those asked for; one that no variable leads to goes with the others: a loss keeps it, or a function
            has returned it.
    """
    before = set[Path]() if then is None else set[Path]().union(*then.paths.values())
    owners = {None} if then is None else then.owners
    known = {key: now.paths[key] for key in storages if key in now.paths}
    stay = {key for key, paths in known.items() if any(path[0] in owners and path not in before for path in paths)}
    return stay | {*storages}.difference(known) if stay or not known else stay


def paths_to(held: Held, storages: Collection[int]) -> set[Path]:
    """The paths that lead to these storages."""
    return {path for key in held.paths.keys() & storages for path in held.paths[key]}


def copies_of(held: Held, parameters: Mapping[str, nn.Parameter], device: torch.device) -> dict[int, int]:
    """The bytes of the storages on a device that are copies of a model's state.

    A container has tensors by the names of all parameters, as `copy.deepcopy(model.state_dict())` has; or is a list of
    as many and of their shapes, as `[p.clone() for p in model.parameters()]`, whose values are near theirs: those of a
    list of gradients are not. O(paths), and the elements of such lists.
    """
    found: dict[Path, dict[Any, int]] = defaultdict(dict)
    for key, paths in held.paths.items():
        for path in paths if held.sizes[key][0] == device else ():
            found[path[:-1]][path[-1]] = key
    first = [*parameters.values()][:_MOST]
    own = {storage_key(p) for p in first}

    def is_copy(inner: Mapping[Any, int]) -> bool:
        if len(inner.keys() & parameters.keys()) >= len(first):
            return True
        tensors = [held.tensors[inner[i]]() for i in range(len(inner)) if i in inner and inner[i] not in own]
        return len(inner) == len(tensors) == len(first) > 1 and _near(tensors, first)

    copies = [inner for inner in found.values() if is_copy(inner)]
    return {key: held.sizes[key][1] for inner in copies for key in inner.values()}


def _near(tensors: Sequence[torch.Tensor | None], parameters: Sequence[torch.Tensor]) -> bool:
    """Whether these tensors have the parameters' shapes and, as one vector all together, nearly their values."""
    apart = of_parameters = 0.0
    for t, p in zip(tensors, parameters, strict=True):
        dense = p.is_floating_point() and {type(t), type(p)} <= _DENSE
        if t is None or not dense or t.shape != p.shape:
            return False
        with no_dispatch(), torch.no_grad():
            apart += float((t - p).square_().sum(dtype=torch.float32))
            of_parameters += float(p.square().sum(dtype=torch.float32))
    return apart < _NEAR * of_parameters


def bound_anew(now: Held, bound: Collection[Path], storages: Collection[int]) -> set[int]:
    """Of these storages, those to which only such paths lead, or variables, as a step binds anew before its backward
    pass begins.
    """

    def anew(key: int) -> bool:
        return key in now.paths and all(path in bound or path[:2] in bound for path in now.paths[key])

    return {key for key in storages if anew(key)}


def bound_by_call(frame: FrameType | None) -> set[Path]:
    """The variables that are bound anew as the call returns that the user's code makes."""
    frame = users_frame(frame)
    return set() if frame is None else {(_owner(frame, name), name) for name in names_of_result(frame)}


def _variables(frame: FrameType) -> Mapping[str, Any]:
    variables, named = variables_of(frame), frame.f_code.co_names
    return {name: frame.f_globals[name] for name in named if name in frame.f_globals} | variables


def _owner(frame: FrameType, name: str) -> int | None:
    code = frame.f_code
    own = name in code.co_varnames and name not in code.co_cellvars
    return id(frame) if own else None


def tensors_within(value: Any) -> Iterator[tuple[Path, torch.Tensor]]:
    """The tensors that a variable's value leads to, nearer ones first, and the keys and attributes on the way."""
    if isinstance(value, torch.Tensor):
        yield from [((), value)] if value.layout is torch.strided else ()
        return
    coming, seen, held = list[tuple[Path, Any]]([((), value)]), set[int](), 0
    for at, each in coming:
        if id(each) in seen:
            continue
        if len(seen) == _MOST or held > _MOST_HELD:
            break
        seen.add(id(each))
        for key, inner in _inside(each, of_variable=not at):
            held, kind = held + 1, type(inner)
            if kind in _PLAIN:
                continue
            if issubclass(kind, torch.Tensor):
                if inner.layout is torch.strided:
                    yield (*at, key), inner
            elif len(at) < _DEEPEST - 1 and (kind.__dictoffset__ or issubclass(kind, (dict, list, tuple))):
                coming.append(((*at, key), inner))


def _inside(x: Any, *, of_variable: bool) -> Iterable[tuple[Any, Any]]:
    """Items and attributes; those of modules only where these are variables themselves."""
    if isinstance(x, ModuleType) or (isinstance(x, nn.Module) and not of_variable):
        return ()
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(x, dict):  # a path keeps no object alive
        first = islice(dict.items(x), _MOST)
        items = [(key if isinstance(key, (str, int)) else id(key), inner) for key, inner in first]
    elif isinstance(x, (list, tuple)):
        items = enumerate(x[:_MOST])
    attributes = getattr(x, "__dict__", None)
    return chain(items, list(attributes.items())) if isinstance(attributes, dict) else items
