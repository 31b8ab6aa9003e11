"""What the calls of a step returned: which of it is alive, and which gradients came to it."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence, Sized
from typing import Any

import torch

from planner.compat.tensors import storage_key, viewed
from planner.core.call import bytes_of_elements
from planner.core.layout import Order
from planner.core.loop import LaidOut


class Results:
    """The leaves of what the first of the calls returned.

    Args:
        outputs: these leaves.
        events: what comes into it is counted until an output is gone.
        aside: other results that the loop may have; their positions are those after the leaves.

    Attributes:
        nbytes: of the elements of those that are tensors.
        tensors: those, or what they are views of, held weakly, by position.
        storages: theirs, by position.
        let_go: position of an output -> how many events came before its end.
        at_once: positions of those that were gone before the first of them, as the first backward pass begins.
        last: the same leaves of the last of several calls, whose backward pass comes first, held weakly.
        late: positions of those that were gone as the backward pass of their own call began, as were those of the last
            call, which no variable holds then; None before that.
        reached_by: for each backward pass, positions of the outputs that got a gradient.
        awaiting: of the outputs that may get one.
    """

    def __init__(self, outputs: Sequence[Any], events: Sized, aside: Sequence[torch.Tensor] = ()) -> None:
        self.nbytes = bytes_of_elements(list(outputs))
        self.tensors: dict[int, weakref.ref[torch.Tensor]] = {}
        self.storages, self._sizes = dict[int, int](), dict[int, int]()
        self.let_go, self.at_once = dict[int, int](), tuple[int, ...]()
        self.last, self._last_held = list[Callable[[], Any]](), set[int]()
        self.late: tuple[int, ...] | None = None
        self.reached_by, self.awaiting = list[set[int]](), set[int]()
        self._orders = defaultdict[int, set[Order | None]](set)  # of gradients of outputs; None: as was expected
        self._aside = {at: storage_key(t) for at, t in enumerate(aside, len(outputs))}
        self._read = set[int]()  # the storages of results that ops of the loop read
        for at, t in enumerate(outputs):
            if isinstance(t, torch.Tensor):
                self._watch(at, t, events)

    def _watch(self, at: int, output: torch.Tensor, events: Sized) -> None:
        let_go, of = self.let_go, viewed(output)
        memory = output if of is None else of  # which other views hold as well, as `model(x).flatten(0, 1)`
        self.tensors[at] = weakref.ref(memory, lambda _: let_go.setdefault(at, len(events)))
        self._sizes[at], self.storages[at] = bytes_of_elements([output]), storage_key(output)

    def held(self, named: Collection[int]) -> tuple[int, ...]:
        """The positions of those that are alive as a backward pass begins, or whose storage is one of these."""
        if not self.reached_by:
            self.at_once = tuple(sorted(at for at, n in self.let_go.items() if n == 0))
            self._last_held = {at for at, ref in enumerate(self.last) if ref() is not None}
        return tuple(at for at, ref in self.tensors.items() if ref() is not None or self.storages[at] in named)

    def own_pass_begins(self) -> None:
        """The backward pass of the call that returned them begins, if it has not begun."""
        if self.late is None:
            gone = {at for at, ref in self.tensors.items() if ref() is None}
            self.late = tuple(sorted(gone - self._last_held))

    def leaves_out(self) -> Collection[int]:
        """Leave out those that were gone before any op of the loop's ran: their positions. In a step of several calls
        they are none of its own, but were held by a variable until the last call had returned.
        """
        self.nbytes -= sum(self._sizes.pop(at, 0) for at in self.at_once)
        return self.at_once

    def reads(self, func: Any, tensors: Sequence[torch.Tensor]) -> None:
        """An op of the loop reads these, and may give them gradients, as other graphs of the model may."""
        if self._aside and torch.is_grad_enabled() and func is not torch.ops.aten.detach.default:
            self._read.update(storage_key(t) for t in tensors if t.requires_grad)

    @property
    def aside(self) -> tuple[int, ...]:
        """Positions of the results aside that the loop computed something from."""
        return tuple(at for at, key in self._aside.items() if key in self._read)

    def arrives(self, at: int, order: Order | None, expected: Order) -> None:
        """A gradient of an output comes in this order."""
        self._orders[at].add(None if order == expected else order)

    @property
    def reached(self) -> set[int]:
        """Positions of the outputs that got a gradient."""
        return set[int]().union(*self.reached_by)

    @property
    def unreached(self) -> tuple[int, ...]:
        """Positions of the outputs that may get a gradient and got none."""
        return tuple(sorted(self.awaiting - self.reached))

    @property
    def left_out(self) -> tuple[int, ...]:
        """Positions of the outputs that got no gradient, where others got one."""
        return self.unreached if self.reached else ()

    @property
    def by_turns(self) -> tuple[int, ...]:
        """Positions of the outputs that some backward pass gave a gradient, and another one did not."""
        reached = self.reached
        return tuple(sorted(reached - reached.intersection(*self.reached_by)))

    @property
    def laid_out(self) -> LaidOut:
        """Of the outputs whose gradients came in one order that was not expected, their positions and that order."""
        one = ((at, order) for at, (order, *others) in sorted(self._orders.items()) if not others)
        return tuple((at, order) for at, order in one if order is not None)
