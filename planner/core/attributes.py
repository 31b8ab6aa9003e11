"""Tensors that modules keep as plain attributes: tables, caches of keys and values, a teacher in a list."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from planner.core.call import PLAIN, storages

_OF_TORCH = vars(nn.Module()).keys()
_DEEPEST = 4  # containers in containers
_MOST = 4096  # objects of an attribute, which may hold a whole data set


def _kept(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if type(value) not in PLAIN and name not in _OF_TORCH:
                for at, t in enumerate(_tensors(value, _DEEPEST, [_MOST])):
                    yield f"{path}.{name}.{at}", t


def results_aside(model: nn.Module, output: Sequence[Any], made: Sequence[torch.Tensor] = ()) -> list[torch.Tensor]:
    """The results that modules keep so and that gradients go through: an encoder's means, of which a loss is made.

    Each once, and none that shares its storage with one of these leaves of the model's output; then those of other
    tensors that share theirs with none of all these.
    """
    kept, returned = {id(t): t for _, t in _kept(model) if t.grad_fn is not None}, storages(list(output)).keys()
    found = [t for t in kept.values() if not storages([t]).keys() & returned]
    known = returned | storages(found).keys()
    return [*found, *(t for t in made if not storages([t]).keys() & known)]


def kept_as_attributes(model: nn.Module) -> dict[str, torch.Tensor]:
    """The tensors that the modules of a model keep, themselves, in lists, tuples and dicts, or as attributes of other
    objects, by name, one of each storage; and those of modules in containers.

    Its parameters and buffers are none, nor are results that gradients go through. O(attributes).
    """
    found = {name: t for name, t in _kept(model) if t.grad_fn is None}
    known = {*storages([*model.parameters(), *model.buffers()])} if found else set[int]()
    new: dict[str, torch.Tensor] = {}
    for name, t in found.items():
        if not (keys := storages([t]).keys()) <= known:
            known |= keys
            new[name] = t
    return new


def state_of(model: nn.Module) -> list[torch.Tensor]:
    """A model's parameters, buffers, and the tensors that its modules keep as attributes."""
    return [*model.parameters(), *model.buffers(), *kept_as_attributes(model).values()]


def shaped_as(parameters: Iterable[torch.Tensor]) -> Callable[[torch.Tensor], bool]:
    """Whether a tensor may be what a loop keeps for these, as a mask: it has as many elements as one, or as all.

    It is no part of what has another size, as a batch of a data set is.
    """
    sizes = [p.numel() for p in parameters]
    known = {*sizes, sum(sizes)}
    return lambda t: t.numel() in known and t.untyped_storage().nbytes() in {n * t.itemsize for n in known}


def attributes_staying(model: nn.Module, before: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """The bytes of those that were there before the model was called and are there after it, where the model is: others
    are results, whose time the graphs tell.
    """
    now, where = kept_as_attributes(model), next(model.parameters()).device.type
    stay = {name: t for name, t in before.items() if now.get(name) is t and where in ("cpu", "meta", t.device.type)}
    return {name: sum(storages([t]).values()) for name, t in stay.items()}


def _tensors(value: Any, deepest: int, left: list[int]) -> Iterator[torch.Tensor]:
    left[0] -= 1
    if left[0] < 0 or not deepest or type(value) in PLAIN:
        return
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, nn.Module):
        yield from (*value.parameters(), *value.buffers())
    elif isinstance(value, (list, tuple, dict)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _tensors(each, deepest - 1, left)
    elif isinstance(own := getattr(value, "__dict__", None), dict):  # no deeper: a trainer has optimizers and batches
        yield from (t for t in own.values() if isinstance(t, torch.Tensor))
