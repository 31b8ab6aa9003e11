"""What is held beside the values of the step: parameters, buffers, the batch, the optimizer's state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..capture.call import storages
from ..errors import OptionError

# Elements of optimizer state per element of a trained parameter, by the optimizer's class name.
STATE_PER_PARAMETER = {"sgd": 0, "momentum": 1, "rmsprop": 1, "adagrad": 1, "adam": 2, "adamw": 2}


def storage_bytes(things: Iterable[Any]) -> int:
    """Bytes of the tensors among the things, each storage counted once."""
    return sum(storages(list(things)).values())


def account(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    optimizer: torch.optim.Optimizer | str | None,
) -> dict[str, int]:
    """The lines of the budget that are held all the time: name -> bytes.

    Raises:
        OptionError: an optimizer name that is not known.
    """
    return {
        "parameters": storage_bytes(model.parameters()),
        "buffers": storage_bytes(model.buffers()),
        "batch": storage_bytes([args, dict(kwargs)]),
        "optimizer state": optimizer_bytes(model, optimizer),
    }


def optimizer_bytes(model: nn.Module, optimizer: torch.optim.Optimizer | str | None) -> int:
    """Bytes of an optimizer's state once it has stepped; 0 for None.

    Args:
        model: whose trained parameters it holds state for, when a name is given.
        optimizer: the optimizer, or one of `STATE_PER_PARAMETER`.
    """
    if optimizer is None:
        return 0
    if isinstance(optimizer, str):
        if optimizer.lower() not in STATE_PER_PARAMETER:
            known = ", ".join(STATE_PER_PARAMETER)
            raise OptionError(f"optimizer={optimizer!r} is not known; give one of {known}, or an optimizer object")
        factor = STATE_PER_PARAMETER[optimizer.lower()]
        return factor * sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise OptionError(f"optimizer={optimizer!r} is neither a name nor a torch.optim.Optimizer")
    total = 0
    for group in optimizer.param_groups:
        name = type(optimizer).__name__.lower()
        if name == "sgd":
            factor = 1 if group.get("momentum") else 0
        elif name in STATE_PER_PARAMETER:
            factor = STATE_PER_PARAMETER[name] + bool(group.get("amsgrad"))
        else:
            held = storage_bytes(optimizer.state.values())
            if not held:
                raise OptionError(
                    f"optimizer {type(optimizer).__name__} has no state yet and is not known by name: "
                    "give a name, or plan after its first step"
                )
            return held
        total += factor * sum(p.numel() * p.element_size() for p in group["params"] if p.requires_grad)
    return total
