"""Copies of tensors in the host's memory, which torch's allocator does not count."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
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
    return torch.from_numpy(found).view(t.dtype).view(t.shape) if len(found) else torch.empty(t.shape, dtype=t.dtype)


def aside(t: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor there."""
    return like(bytes_of(t), t) if t.layout is torch.strided else t.detach().cpu()


@contextmanager
def moved_aside(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """A while in which tensors that fill a storage of their own have no memory; they come back elsewhere in it."""
    moved: list[tuple[torch.UntypedStorage, Any]] = []
    try:
        for t in tensors:
            if (
                t.layout is torch.strided
                and (storage := t.untyped_storage()).resizable()
                and storage.nbytes() == t.nbytes
            ):
                moved.append((storage, bytes_of(_bytes(storage))))
                storage.resize_(0)
        yield
    finally:
        for storage, found in moved:
            storage.resize_(len(found))
            _bytes(storage).copy_(torch.from_numpy(found))


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
