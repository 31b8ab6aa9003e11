"""Copies of tensors in the host's memory, which torch's allocator does not count."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def bytes_of(t: torch.Tensor) -> Any:
    """The bytes of a dense tensor's elements, as a NumPy array."""
    found = np.empty(t.numel() * t.element_size(), np.uint8)
    like(found, t).copy_(t.detach())  # `t.numpy()` would leave a storage that cannot be resized
    return found


def like(found: Any, t: torch.Tensor) -> torch.Tensor:
    """Such bytes as a tensor of the shape and dtype of another one."""
    return torch.from_numpy(found).view(t.dtype).view(t.shape)


def aside(t: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor there."""
    return like(bytes_of(t), t) if t.layout is torch.strided else t.detach().cpu()
