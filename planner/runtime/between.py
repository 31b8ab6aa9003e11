"""What a loop holds at once between its steps, op by op."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch

from planner.compat.tensors import storage_key
from planner.runtime.made import MadeStorages, UsedStorages


class Between:
    """The bytes of what was recorded, as each op has run; and of what existed before and was gone after some of them.

    Attributes:
        began: how many ops ran before those that count.
        highest: the most bytes of what was recorded, by the op that ran.
        trains: whether some op has used parameters, not the model's, of which gradients may be asked for.
    """

    def __init__(self) -> None:
        self.began, self.highest, self.trains = 0, defaultdict[str, int](int), False
        self._levels: list[tuple[str, int]] = []
        self._gone: list[tuple[int, int, int]] = []  # was there from that op on, and up to this one; bytes

    @property
    def ops(self) -> int:
        """How many ops have run."""
        return self.began + len(self._levels)

    def note(self, name: str, entered: Sequence[MadeStorages], older: Sequence[MadeStorages], budget: int) -> None:
        """An op has run.

        Args:
            name: of the op.
            entered: what was recorded.
            older: the same of earlier steps, as far as it is none of these; it counts where half of the budget is not
                enough.
            budget: in bytes.
        """
        nbytes = sum(each.live for each in entered)
        if nbytes + sum(each.live for each in older) > max(self.highest[name], budget // 2):
            counted = {key for each in entered for key in each.made.copy()}
            alive = {key: nbytes for each in older for key, (_, nbytes) in each.made.copy().items()}
            nbytes += sum(nbytes for key, nbytes in alive.items() if key not in counted)
        self._levels.append((name, nbytes))
        self.highest[name] = max(self.highest[name], nbytes)

    def begin(self) -> None:
        """Only what comes from now on counts."""
        self.began, self.trains = self.ops, False
        self.highest.clear()
        self._levels.clear()
        self._gone.clear()

    def follow(self, tensors: Iterable[torch.Tensor]) -> list[weakref.finalize[Any, Any]]:
        """These count as long as they are there: a loop may put others in the place of the model's own. Detach what is
        returned in the end.
        """
        storages = {storage_key(t): t.untyped_storage() for t in tensors}.values()
        return [weakref.finalize(each, self.gone, each.nbytes()) for each in storages]

    def ends(self, used: UsedStorages, key: int) -> None:
        """A storage is gone that existed before the recording, and that some op has used."""
        if (storage := used.pop(key, None)) is not None and storage.since is not None:
            self.gone(storage.nbytes, storage.since)

    def gone(self, nbytes: int, since: int = 0) -> None:
        """Something is gone that was there, or counts, since so many ops had run."""
        if since < self.ops:
            self._gone.append((max(0, since - self.began), len(self._levels), nbytes))

    def most(self) -> Mapping[str, int]:
        """The most bytes that were there at once, by the op that ran. O(ops)."""
        changes = [0] * (len(self._levels) + 1)
        for begin, end, nbytes in self._gone:
            changes[begin] += nbytes
            changes[end] -= nbytes
        found: dict[str, int] = {}
        for (name, nbytes), more in zip(self._levels, accumulate(changes), strict=False):
            found[name] = max(found.get(name, 0), nbytes + more)
        return found
