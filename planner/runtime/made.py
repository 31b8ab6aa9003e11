"""Storages that come and go: their bytes, by identity, and none of them kept alive."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

import torch

Made = tuple[int, int]  # a storage that was made: a number that no other one has, and its bytes


def takes_memory(t: torch.Tensor, device: torch.device) -> bool:
    """Whether a tensor takes memory of a device: one of a FakeTensorMode takes none."""
    return t.device == device and t.untyped_storage().device == device


@dataclass
class MadeStorages:
    """The storages that were entered, and are alive, by identity."""

    live: int = 0
    made: dict[int, Made] = field(default_factory=dict)
    number: int = 0

    def add(self, storage: torch.UntypedStorage, key: int) -> None:
        """Enter a storage, if it is not there."""
        if key not in self.made:
            self.number += 1
            self.made[key] = self.number, storage.nbytes()
            self.live += storage.nbytes()
            weakref.finalize(storage, self.drop, key, self.number).atexit = False

    def drop(self, key: int, number: int | None = None) -> None:
        """Count a storage no more; with a number, only if it is still that one."""
        if key in self.made and number in (None, self.made[key][0]):
            self.live -= self.made.pop(key)[1]
