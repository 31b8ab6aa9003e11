"""What surrounds a planned step and shapes its graphs: autocast, and the modes of the model's modules."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn

from planner.compat.modules import modules_in


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What was on when a step was planned.

    Attributes:
        autocast: for each kind of device of the parameters, whether autocast is on, and to which dtype.
        cached: whether autocast keeps casts of parameters.
        training: the mode of each module, in the order of `modules()`.
    """

    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    cached: bool
    training: tuple[bool, ...]


def surroundings_of(model: nn.Module) -> Surroundings:
    """What is on now."""
    kinds = sorted({p.device.type for p in model.parameters()} - {"meta"})
    return Surroundings(
        tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds),
        torch.is_autocast_cache_enabled(),
        tuple(module.training for module in modules_in(model)),
    )


def autocast_as_for(kind: str) -> AbstractContextManager[object]:
    """The autocast that is on for a kind of device, for the CPU, on which a step for that device is traced.

    Which ops are cast is the CPU's choice: it leaves layer norms and softmax in half precision.
    """
    if torch.is_autocast_enabled("cpu") or not torch.is_autocast_enabled(kind):
        return nullcontext()
    return torch.autocast("cpu", dtype=torch.get_autocast_dtype(kind))


@contextmanager
def under(surroundings: Surroundings | None, model: nn.Module) -> Iterator[None]:
    """A while in which these are on, for a model of as many modules; afterwards all is as before. None: as it is."""
    if surroundings is None:
        yield
        return
    modules = list(modules_in(model))
    before = [module.training for module in modules]
    with ExitStack() as stack:
        for kind, on, dtype in surroundings.autocast:
            cached = surroundings.cached
            stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=on, cache_enabled=cached))
        if len(modules) == len(surroundings.training):
            _set(modules, surroundings.training)
        try:
            yield
        finally:
            _set(modules, before)


def _set(modules: list[nn.Module], training: tuple[bool, ...] | list[bool]) -> None:
    for module, mode in zip(modules, training, strict=True):
        if module.training != mode:
            module.training = mode
