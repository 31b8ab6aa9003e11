"""A model of the survey, and what the families share: batches from a fixed seed, losses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class Case:
    """A model in training mode, its batch as `plan()` takes it, and its loss; None: the output holds it."""

    model: nn.Module
    batch: Any
    loss_fn: Callable[[Any], torch.Tensor] | None = None

    def call(self, model: nn.Module, batch: Any) -> Any:
        """The model's output."""
        if isinstance(batch, torch.Tensor):
            return model(batch)
        return model(**batch) if isinstance(batch, Mapping) else model(*batch)

    def loss(self, output: Any) -> torch.Tensor:
        """The scalar to differentiate."""
        if self.loss_fn is not None:
            return self.loss_fn(output)
        if isinstance(output, torch.Tensor):
            return output
        found: torch.Tensor = output["loss"] if isinstance(output, Mapping) else output.loss
        return found


def seeded(seed: int = 0) -> torch.Generator:
    """A generator of its own, so that a batch does not depend on how many parameters were drawn before."""
    return torch.Generator().manual_seed(seed)


def noise(*shape: int) -> torch.Tensor:
    """Normally distributed numbers."""
    return torch.randn(*shape, generator=seeded())


def integers(high: int, *shape: int, low: int = 0) -> torch.Tensor:
    """Whole numbers from `low` to below `high`."""
    return torch.randint(low, high, shape, generator=seeded())


def tokens(batch: int = 8, length: int = 128, vocabulary: int = 256) -> torch.Tensor:
    """Token ids, none of them special."""
    return integers(vocabulary, batch, length, low=5)


def text(batch: int = 8, length: int = 128) -> dict[str, torch.Tensor]:
    """Token ids that are their own labels."""
    ids = tokens(batch, length)
    return {"input_ids": ids, "labels": ids.clone()}


def images(batch: int = 4, size: int = 64, channels: int = 3) -> torch.Tensor:
    """Pixels."""
    return noise(batch, channels, size, size)


def labelled(batch: int = 4, size: int = 64) -> dict[str, torch.Tensor]:
    """Images and their classes."""
    return {"pixel_values": images(batch, size), "labels": torch.arange(batch)}


def square(output: Any) -> torch.Tensor:
    """Mean square of all that an output holds in floating point."""
    if hasattr(output, "to_tuple"):
        output = output.to_tuple()
    leaves = [output] if isinstance(output, torch.Tensor) else [t for t in output if isinstance(t, torch.Tensor)]
    return torch.stack([t.float().square().mean() for t in leaves if t.requires_grad]).sum()


def uneven(output: Any) -> torch.Tensor:
    """A loss of all that an output holds in floating point, whose gradient normalised outputs do not make vanish."""
    leaves = [t for t in pytree.tree_leaves(output) if isinstance(t, torch.Tensor) and t.requires_grad]
    return torch.stack([t.float().sigmoid().square().mean() for t in leaves]).sum()


def sample(output: Any) -> torch.Tensor:
    """Mean square of what a diffusion model predicts."""
    found: torch.Tensor = output.sample.float().square().mean()
    return found
