"""What a model and a batch are, as data: for which of them a plan was made, and in what others differ."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from planner.compat.modules import buffers_of, unsaved_buffers
from planner.core.maxima import Maxima
from planner.core.objects import tensors_of


@dataclass(frozen=True, slots=True)
class TensorKind:
    """A parameter, a buffer, or a tensor of a batch (by its path in the call)."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool

    def __str__(self) -> str:
        return f"{self.shape} {self.dtype}"


@dataclass(frozen=True, slots=True)
class ModuleKind:
    """A module: its path, its class, its mode."""

    name: str
    kind: str
    training: bool

    def __str__(self) -> str:
        return f"{self.kind} in {'training' if self.training else 'evaluation'} mode"


@dataclass(frozen=True)
class Identity:
    """A model; of its buffers those that a `state_dict` has, as others may be caches."""

    name: str
    modules: tuple[ModuleKind, ...]
    parameters: tuple[TensorKind, ...]
    buffers: tuple[TensorKind, ...]

    def __str__(self) -> str:
        return f"{self.name} with {len(self.parameters)} parameters"


def identity(model: nn.Module) -> Identity:
    """What another model must be, for one plan to serve both."""
    caches = {b for m in model.modules() for n, b in buffers_of(m).items() if n in unsaved_buffers(m)}
    return Identity(
        type(model).__name__,
        tuple(ModuleKind(name, type(m).__qualname__, m.training) for name, m in model.named_modules()),
        tuple(_kind(name, p) for name, p in model.named_parameters()),
        tuple(_kind(name, b) for name, b in model.named_buffers() if b not in caches),
    )


def batch_kinds(args: Any, kwargs: Mapping[str, Any], maxima: Maxima | None) -> tuple[TensorKind, ...]:
    """The tensors of a batch, at the largest sizes where smaller ones are planned for too."""
    found = []
    for path, t in tensors_of(args, kwargs):
        largest = maxima.of(path) if maxima else {}
        shape = tuple(largest.get(d, n) for d, n in enumerate(t.shape))
        found.append(TensorKind(f"batch{path[3:]}", shape, _name(t.dtype), t.requires_grad))
    return tuple(found)


def difference(here: Identity, there: Identity) -> str:
    """In what one model differs from the one that was planned; empty where in nothing that matters."""
    return (
        _first(here.parameters, there.parameters)
        or _first(here.modules, there.modules)
        or _first(here.buffers, there.buffers)
    )


def _first(here: Iterable[TensorKind | ModuleKind], there: Iterable[TensorKind | ModuleKind]) -> str:
    ours, theirs = {x.name: x for x in here}, {x.name: x for x in there}
    # what both have says more than what one lacks
    for name in (*(n for n in theirs if n in ours), *(n for n in theirs if n not in ours), *ours):
        one, other = ours.get(name), theirs.get(name)
        if one != other:
            words = [str(x) if x else "nothing" for x in (one, other)]
            if words[0] == words[1]:
                words = ["trained" if getattr(x, "requires_grad", False) else "frozen" for x in (one, other)]
            return f"{name or 'the model'} is {words[0]} here, {words[1]} there"
    return ""


def _kind(name: str, t: torch.Tensor) -> TensorKind:
    return TensorKind(name, tuple(t.shape), _name(t.dtype), t.requires_grad)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
