"""Parameters that no gradient has come to: an optimizer has stepped others, and has no state for these."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from torch import nn, optim


def without_state(model: nn.Module | None, optimizers: Iterable[optim.Optimizer]) -> tuple[str, ...]:
    """The names of a model's parameters that lack a state which others of the same optimizer have. O(parameters)."""
    found: set[int] = set()
    for optimizer in optimizers:
        own = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        lacking = [p for p in own if not _state(optimizer).get(p)]
        if len(lacking) < len(own):
            found.update(map(id, lacking))
    return tuple(name for name, p in model.named_parameters() if id(p) in found) if found and model else ()


def still_without(model: nn.Module, optimizers: Iterable[optim.Optimizer], names: Collection[str]) -> tuple[str, ...]:
    """Those of these parameters that no optimizer has a state for yet. O(their number)."""
    states = [_state(optimizer) for optimizer in optimizers]
    return tuple(name for name in names if not any(state.get(model.get_parameter(name)) for state in states))


def _state(optimizer: optim.Optimizer) -> Mapping[Any, Any]:
    return optimizer.state if isinstance(optimizer.state, Mapping) else {}
