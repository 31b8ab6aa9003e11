"""The optimizers of a model, found without being named: those that are there, and those that were seen to step."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable

from torch import nn, optim

from planner.errors import OptionError

Found = tuple[weakref.ref[optim.Optimizer], ...]


def optimizers_of(model: nn.Module, stepped: Iterable[optim.Optimizer] = ()) -> list[optim.Optimizer]:
    """The optimizers that train a model's parameters.

    All that were seen to step come first, as their state is there, though the parameters may be frozen now; then others
    that exist, the latest first: an earlier one with the same parameters is taken for one that is no longer used.
    O(objects of the process).
    """
    parameters = {id(p): p for p in model.parameters()}
    own = {at for at, p in parameters.items() if p.requires_grad}
    # isinstance() asks objects for their class, and some raise
    there = [o for o in gc.get_objects() if issubclass(type(o), optim.Optimizer) and not wraps_another(o)]
    # other tensors, as `torch.func.functional_call` takes them, are in the place of those that these have stepped
    others = not all(isinstance(p, nn.Parameter) for p in parameters.values())
    found = [optimizer for optimizer in stepped if others or trained_by(optimizer) & parameters.keys()]
    taken = {p for optimizer in found for p in trained_by(optimizer)} & own
    for optimizer in reversed(there):
        trains = trained_by(optimizer) & own
        if trains and not trains & taken:
            taken |= trains
            found.append(optimizer)
    return found


def wraps_another(optimizer: optim.Optimizer) -> bool:
    """Whether an optimizer steps by another one, whose state counts as an optimizer's; its own is the loop's."""
    others = [value for value in vars(optimizer).values() if issubclass(type(value), optim.Optimizer)]
    return any(trained_by(other) & trained_by(optimizer) for other in others)


def trained_by(optimizer: optim.Optimizer) -> set[int]:
    """The parameters that an optimizer trains, by identity; none where it is not made yet."""
    groups = getattr(optimizer, "param_groups", ())
    return {id(p) for group in groups for p in group["params"]}


def weakly(optimizers: Iterable[optim.Optimizer]) -> Found:
    """Weak references: a plan keeps no optimizer alive."""
    return tuple(map(weakref.ref, optimizers))


def check_optimizer(optimizer: object, model: nn.Module) -> None:
    """Raise OptionError for an optimizer that trains no parameter of the model."""
    if not isinstance(optimizer, optim.Optimizer):
        return
    trains = trained_by(optimizer)
    if not any(id(p) in trains for p in model.parameters()):
        raise OptionError(
            f"optimizer={type(optimizer).__name__}(...) trains none of the {sum(1 for _ in model.parameters())} "
            f"parameters of this {type(model).__name__}: it was made for another model, or before the parameters were "
            "replaced. Make it from model.parameters(), or leave it out: the optimizer that steps them is found"
        )
