"""Calls of a planned model that run as they are, without torch.compile: which of them wait for their backward pass."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from planner.compat.autograd import in_backward, when_backward_ends
from planner.core.objects import leaves
from planner.runtime.outputs import Unasking

_KEY = "call of a planned model"


class _Call:
    """Lives as long as the autograd nodes of a call's results."""

    __slots__ = ("__weakref__", "begun", "ended")

    def __init__(self) -> None:
        self.begun = self.ended = False  # its backward pass

    def begins(self, _: object) -> None:
        if not self.begun:
            self.begun = True
            when_backward_ends(self.ends)

    def ends(self) -> None:
        self.ended = True

    def waits(self) -> bool:
        """Whether its backward pass is to come, or has failed, which leaves what it saved there."""
        return not (self.ended or (self.begun and in_backward()))


class Uncompiled:
    """The latest calls that ran as they are."""

    def __init__(self) -> None:
        self._calls: dict[int, weakref.ref[_Call]] = {}

    def add(self, number: int, result: Any) -> None:
        """A call has run: its number, and what it gave."""
        call = _Call()
        begins = Unasking(call.begins)
        for t in leaves(result):
            if isinstance(t, torch.Tensor) and (node := t.grad_fn) is not None:
                metadata: Any = node.metadata
                metadata[_KEY] = call
                t.register_hook(begins)  # type: ignore[no-untyped-call]
        self._calls[number] = weakref.ref(call)

    def waiting(self) -> frozenset[int]:
        """The numbers of those that wait for their backward pass."""
        self._calls = {n: ref for n, ref in self._calls.items() if (call := ref()) is not None and call.waits()}
        return frozenset(self._calls)
