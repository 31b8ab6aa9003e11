"""Tensors in what a model is given and returns: in containers, and in the attributes of objects of any class."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from itertools import islice
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

from planner.compat import pytree
from planner.compat.tensors import dense_parts
from planner.core.call import PLAIN

DEEPEST = 8  # containers in containers
MOST_LEAVES = 4096  # a batch may refer to a whole data set
FUNCTIONS = (FunctionType, BuiltinFunctionType, MethodType, ModuleType)


def leaves(output: Any) -> list[Any]:
    """The first leaves of a model's output; dataclasses and other objects are read through their attributes."""
    if isinstance(output, torch.Tensor):
        return [output]
    found: list[Any] = []
    _collect(output, (), found)
    return found


def dense_tensors(batch: Any) -> list[torch.Tensor]:
    """The tensors of a batch, those of objects and the parts of sparse ones too."""
    return [part for t in leaves(batch) if isinstance(t, torch.Tensor) for part in dense_parts(t)]


def _collect(output: Any, within: tuple[int, ...], into: list[Any]) -> None:
    if isinstance(output, torch.Tensor) or type(output) in PLAIN or (inner := _inside(output, within)) is None:
        into.append(output)
        return
    for value in inner.values() if isinstance(inner, Mapping) else inner:
        if len(into) > MOST_LEAVES:
            return
        _collect(value, (*within, id(output)), into)


def _inside(output: Any, within: tuple[int, ...]) -> Mapping[Any, Any] | Sequence[Any] | None:
    """What a container in a model's output has: attributes as a mapping; None for a leaf."""
    if len(within) > DEEPEST or id(output) in within or isinstance(output, (torch.Tensor, torch.nn.Module, type)):
        return None
    if isinstance(output, (Mapping, tuple, list)):
        return output
    return None if isinstance(output, FUNCTIONS) else _attributes(output)


def _attributes(x: Any) -> Mapping[str, Any] | None:
    """Those of an object, also in slots, by their names; None for one that has none."""
    own = getattr(x, "__dict__", None)
    slots = [name for kind in type(x).__mro__ for name in _slots(kind) if hasattr(x, name)]
    if not slots:
        return own if isinstance(own, dict) else None
    return {**(own or {}), **{name: getattr(x, name) for name in slots}}


def _slots(kind: type) -> Sequence[str]:
    """The names of the slots that a class in Python adds."""
    found = kind.__dict__.get("__slots__", ())
    return [name for name in ([found] if isinstance(found, str) else found) if not name.startswith("__")]


def named_leaves(output: Any, path: str = "", within: tuple[int, ...] = ()) -> Iterator[tuple[str, Any]]:
    """The leaves of a model's output, each with its path, as in ".loss"; `within` are the containers around it."""
    inner = _inside(output, within)
    if inner is None:
        yield path, output
        return
    if isinstance(inner, Mapping):
        named: Iterable[tuple[Any, Any]] = inner.items()
        attributes = inner is not output or hasattr(output, "to_tuple")  # transformers' and diffusers' outputs
    else:
        fields = getattr(output, "_fields", ())
        named, attributes = zip(fields or range(len(inner)), inner, strict=True), bool(fields)
    for name, value in named:
        yield from named_leaves(value, path + (f".{name}" if attributes else f"[{name!r}]"), (*within, id(output)))


def tensors_of(args: Any, kwargs: Any) -> list[tuple[str, torch.Tensor]]:
    """The tensors of a call, those of objects too, each with its path in `(args, kwargs)`; none that is nested."""
    found: list[tuple[str, torch.Tensor]] = []
    for path, x in pytree.tree_flatten_with_path((tuple(args), dict(kwargs)))[0]:
        if type(x) not in PLAIN:
            found += [(at, t) for at, t in tensors_at(pytree.keystr(path), x) if not t.is_nested]
    return found


def tensors_at(path: str, leaf: Any) -> list[tuple[str, torch.Tensor]]:
    """The tensors of a leaf of a call: itself, or those of an object."""
    return [(at, t) for at, t in islice(named_leaves(leaf, path), MOST_LEAVES) if isinstance(t, torch.Tensor)]


def with_tensors(args: Any, kwargs: Any, new: Callable[[str, torch.Tensor], Any]) -> Any:
    """A call with other tensors, by their paths; an object that has some is copied, and stays as it is.

    Sparse tensors of objects stay the same.
    """

    def leaf(path: Any, x: Any) -> Any:
        if type(x) in PLAIN:
            return x
        found = [(at, t) for at, t in tensors_at(pytree.keystr(path), x) if t is x or t.layout is torch.strided]
        known = {id(t): new(at, t) for at, t in found}
        return _with(x, known, {})

    return pytree.tree_map_with_path(leaf, (tuple(args), dict(kwargs)))


def _with(x: Any, known: Mapping[int, Any], made: dict[int, Any], within: tuple[int, ...] = ()) -> Any:
    """The same with these in the place of tensors, by their identities; itself where it has none of them."""
    if isinstance(x, torch.Tensor):
        return known.get(id(x), x)
    if id(x) in made:
        return made[id(x)]
    if type(x) in PLAIN or not known or len(made) > MOST_LEAVES or (inner := _inside(x, within)) is None:
        return x
    made[id(x)] = x
    names = list(inner) if isinstance(inner, Mapping) else range(len(inner))
    changed = {n: _with(inner[n], known, made, (*within, id(x))) for n in names}
    if any(changed[n] is not inner[n] for n in names):
        made[id(x)] = _copied(x, inner, changed)
    return made[id(x)]


def _copied(x: Any, inner: Any, changed: Mapping[Any, Any]) -> Any:
    """A copy of a container or an object with other contents."""
    if isinstance(x, tuple):
        return type(x)(*changed.values()) if hasattr(x, "_fields") else type(x)(changed.values())
    new = copy.copy(x)
    if inner is not x:
        own = getattr(new, "__dict__", {})
        own.update((name, value) for name, value in changed.items() if name in own)
        for name in changed.keys() - own.keys():
            object.__setattr__(new, name, changed[name])  # a slot, of frozen ones, too
    elif isinstance(new, MutableMapping):
        new.update(changed)
    else:
        new[:] = changed.values()
    return new
