"""The gradients that planned graphs make, entered once the engine has added to each of them all that it adds."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from planner.compat.autograd import in_backward, leaves_of, running_node, when_backward_ends
from planner.compat.tensors import dense_parts, is_batched, storage_key
from planner.core.call import gradient_of, tensors_in
from planner.runtime.made import MadeStorages


@dataclass
class PlannedGradients(MadeStorages):
    """The storages of gradients that planned graphs have made, as far as they are alive.

    Whoever asks for a gradient's storage while it waits for others of the same leaf has the engine add these out of
    place, as to one that is used elsewhere (`can_accumulate_inplace` of torch's `input_buffer.cpp`).
    """

    _waiting: dict[int, weakref.ref[torch.Tensor]] = field(default_factory=dict)  # in this backward pass, by address
    _leaves: list[torch.Tensor] = field(default_factory=list)  # for which these are

    def come(self, results: Any, device: torch.device) -> None:
        """A planned graph has returned these."""
        leaves = leaves_of(running_node()) if in_backward() else []
        if leaves and not self._leaves:
            when_backward_ends(self._all_are_whole)
        self._leaves += leaves
        shapes = {leaf.shape for leaf in leaves}
        for outer in tensors_in(results):
            for t in dense_parts(outer):
                if t.device != device or is_batched(t):
                    continue
                if outer.shape in shapes:
                    self._waiting[t.data_ptr()] = weakref.ref(t)
                else:  # another graph is given it
                    self.add(t.untyped_storage(), storage_key(t))

    def enter_whole(self) -> None:
        """Enter those that are in `.grad` by now."""
        self._enter(map(gradient_of, self._leaves))

    def end(self) -> None:
        """Hold no leaf any more."""
        self._waiting.clear()
        self._leaves.clear()

    def _all_are_whole(self) -> None:
        self._enter([*map(gradient_of, self._leaves), *(ref() for ref in self._waiting.values())])
        self.end()

    def _enter(self, gradients: Iterable[torch.Tensor | None]) -> None:
        for t in (part for outer in tensors_in([*gradients]) for part in dense_parts(outer)):
            if t.data_ptr() in self._waiting:
                self.add(t.untyped_storage(), storage_key(t))
