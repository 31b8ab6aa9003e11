"""The batch of a request: how the model is called on it, and the largest sizes that `dynamic` means for it."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from planner.compat import pytree
from planner.core.identity import TensorKind, batch_kinds
from planner.core.maxima import Maxima, sizes_in
from planner.core.objects import tensors_at, tensors_of
from planner.core.options import Dynamic
from planner.errors import BatchError, OptionError

LATER: Any = object()  # for a batch: that of the first training step, whatever a model has for an example


class Batch:
    """What a model is called with; once it is released, its tensors live no longer than their owner wants them."""

    def __init__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._held: tuple[tuple[Any, ...], dict[str, Any]] | None = (args, dict(kwargs))
        self._leaves: list[Any] = []
        self._spec: Any = None
        self._kinds: tuple[TensorKind, ...] = ()

    def release(self) -> None:
        """Hold the tensors no more, after the first training step with them."""
        if self._held is None:
            return
        self._kinds = batch_kinds(*self._held, None)
        leaves, self._spec = pytree.tree_flatten(self._held)
        self._leaves = [_weakly(x) if tensors_at("", x) else x for x in leaves]
        self._held = None

    @property
    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Positional and keyword arguments; None where a tensor of them is gone."""
        if self._held is not None:
            return self._held
        leaves = [x() if isinstance(x, weakref.ref) else x for x in self._leaves]
        gone = any(isinstance(x, weakref.ref) and found is None for x, found in zip(self._leaves, leaves, strict=True))
        return None if gone else pytree.tree_unflatten(leaves, self._spec)

    def kinds(self, maxima: Maxima | None) -> tuple[TensorKind, ...]:
        """Its tensors, at the largest sizes."""
        found = self.arguments
        return self._kinds if found is None else batch_kinds(*found, maxima)


def _weakly(x: Any) -> weakref.ref[Any]:
    """A reference that does not hold a tensor, or an object that has some."""
    try:
        return weakref.ref(x)
    except TypeError:  # a class with slots: it counts as gone
        return weakref.ref(set())


def named_maxima(dynamic: Dynamic) -> Maxima:
    """The largest sizes that `dynamic` names, whatever the batch is."""
    named = {} if dynamic is None or isinstance(dynamic, bool) else dynamic
    return Maxima({path_of(name): {d: n for d, n in at.items() if n > 1} for name, at in named.items()})


def maxima_of(dynamic: Dynamic, args: Any, kwargs: Mapping[str, Any]) -> Maxima | None:
    """The largest sizes that `dynamic` means for a batch; None where all are those of the batch.

    Raises:
        OptionError: it names what the batch does not have, or a size below that of the batch.
    """
    if dynamic is None or isinstance(dynamic, bool):
        return sizes_in(args, kwargs) if dynamic else None
    shapes = {path: tuple(t.shape) for path, t in tensors_of(args, kwargs)}
    for name, at in dynamic.items():
        shape = shapes.get(path_of(name))
        if shape is None:
            known = ", ".join(repr(n) for n in (*range(len(args)), *kwargs) if path_of(n) in shapes)
            raise OptionError(f"dynamic names {name!r}, which is no tensor of the batch; these are: {known}")
        for d, n in at.items():
            if d >= len(shape) or n < shape[d]:
                raise OptionError(
                    f"dynamic={{{name!r}: {{{d}: {n}}}}} does not suit the batch, where {name!r} is of shape {shape}; "
                    "give the largest size of each of its dimensions that may be smaller"
                )
    return named_maxima(dynamic)


def path_of(name: str | int) -> str:
    """The path of an argument in `(args, kwargs)`, as `capture.shapes` has it."""
    return f"[0][{name}]" if isinstance(name, int) else f"[1][{name!r}]"


def arguments(
    model: nn.Module, batch: Any, kwargs: Mapping[str, Any] | None
) -> tuple[tuple[Any, ...] | None, dict[str, Any]]:
    """How the model is called on a batch: positional arguments (None: no batch is known) and keyword arguments.

    Raises:
        BatchError: the batch is neither a tensor, a tuple, a list nor a mapping, or the other arguments are no mapping.
    """
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise BatchError(f"kwargs={kwargs!r} must be a mapping of keyword arguments, or None")
    extra = dict(kwargs or {})
    if batch is LATER:
        return None, extra
    if batch is None and not extra:
        batch = getattr(model, "example_input_array", None)  # Lightning's
        if batch is None:
            return None, extra
    if batch is None:
        return (), extra
    if isinstance(batch, torch.Tensor):
        return (batch,), extra
    if isinstance(batch, Mapping):
        if any(not isinstance(k, str) for k in batch):
            raise BatchError(
                f"a mapping batch is called as model(**batch), so its keys must be strings; got {list(batch)!r}"
            )
        return (), {**batch, **extra}
    if isinstance(batch, (tuple, list)):
        return tuple(batch), extra
    raise BatchError(
        f"batch of type {type(batch).__name__} is not understood; give a tensor (model(batch)), a tuple or list "
        "(model(*batch)) or a mapping (model(**batch))"
    )
