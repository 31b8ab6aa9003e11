"""The parameters that a loop trains where it calls a model with others, which it computes from these each time."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from torch import nn

from planner.compat.modules import modules_in
from planner.parallel.sharded import parameters_among


class OwnParameters:
    """A model's parameters as they are outside `torch.func.functional_call`; it keeps none of them alive.

    Args:
        model: whose parameters.
    """

    def __init__(self, model: nn.Module) -> None:
        self._refs = [weakref.ref(p) for p in parameters_among(modules_in(model))]

    def beneath(self, parameters: Sequence[nn.Parameter]) -> Sequence[nn.Parameter]:
        """What gets `.grad` in a call with these parameters: in the place of computed ones, the model's own."""
        if all(p.is_leaf for p in parameters):
            return parameters
        own = [ref() for ref in self._refs]
        if len(own) != len(parameters):  # the model has others now
            return [p for p in parameters if p.is_leaf]
        pairs = zip(parameters, own, strict=True)
        return [leaf for p, instead in pairs if (leaf := p if p.is_leaf else instead) is not None]
