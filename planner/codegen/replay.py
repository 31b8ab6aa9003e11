"""What emitted graphs call to have an op draw again what it drew before: by the state of its device's generator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def run_and_save_state(device: str, op: Callable[..., Any], /, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, Any]:
    """The state of a kind of device's generator, as a tensor on the CPU, and what an op then returns."""
    return _generator(device).get_rng_state(), op(*args, **kwargs)


def run_with_state(state: torch.Tensor, device: str, op: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """What an op returns under an earlier state of the generator, which is then as it was."""
    generator = _generator(device)
    now = generator.get_rng_state()
    generator.set_rng_state(state)
    try:
        return op(*args, **kwargs)
    finally:
        generator.set_rng_state(now)


def _generator(device: str) -> Any:
    return torch if device == "cpu" else torch.get_device_module(device)
