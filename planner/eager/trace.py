"""What one training step did, op by op: what ran, what it made and freed, and which module asked for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Literal

from planner.compat.ops import OpOverload

Phase = Literal["forward", "loss", "backward"]


@dataclass(frozen=True, slots=True, eq=False)
class DistinctOp:
    """An op on tensors of some shapes: `TensorSpec` in the place of every tensor.

    Attributes:
        key: equal for ops that cost the same.
        target: the op.
        args, kwargs, result: what it takes and returns.
    """

    key: tuple[Any, ...]
    target: OpOverload
    args: Any
    kwargs: Any
    result: Any


@dataclass(frozen=True, slots=True)
class TracedOp:
    """One op that ran.

    Attributes:
        distinct: what it is; None for a view.
        target: its name.
        module: path of the innermost module around it.
        phase: of the step.
        again: whether it runs again what has run before.
        view: whether its schema says that it returns a view. Autograd runs the views of a fake tensor again where
            something was written into one, and does not on real tensors: how many there are tells nothing.
        reads: storages of its arguments.
        writes: storages that it makes.
        mutates: storages of arguments that it writes into.
        source: the user's line, where it was asked for.
    """

    distinct: DistinctOp | None
    target: str
    module: str
    phase: Phase
    again: bool
    view: bool
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    mutates: tuple[int, ...]
    source: str


@dataclass(slots=True)
class ModuleCall:
    """One call of a module's `forward`; ops by their number, `end` the first one after it.

    Attributes:
        path: of the module, as in `named_modules()`.
        phase: when.
        begin, end: ops of the call.
        inner: the calls made in it are those from the next one on up to this number.
        inputs: storages of its arguments.
        differentiable: whether a result needs a gradient.
        changed: attributes of the module itself that the call set.
    """

    path: str
    phase: Phase
    begin: int
    end: int
    inner: int
    inputs: frozenset[int]
    differentiable: bool = False
    changed: tuple[str, ...] = ()


@dataclass(slots=True)
class Saved:
    """A storage that autograd saved.

    Attributes:
        storage: its number.
        within: number of the innermost module call; -1 for none.
        packed: the number of ops begun when it was saved.
        unpacked: the same for each time it was asked for.
    """

    storage: int
    within: int
    packed: int
    unpacked: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Trace:
    """What one step did.

    Attributes:
        ops: in order.
        sizes: bytes of each storage; 0 for those that were there before.
        born: the op that made each; -1 for those that were there before.
        died: the number of ops begun when each was freed; more than there are where it outlived the step.
        calls: of modules.
        saved: what autograd saved outside of checkpoints; only where asked for.
        given: number of each storage that was there before, by its identity.
        output_bytes: of the elements of the model's outputs.
        attributes: the bytes of tensors that modules keep as plain attributes, by name, beside what the step makes.
        left: bytes that the graphs of outputs and losses still hold after the backward pass, which has not run through
            them, or does not free what their hooks and functions keep by themselves.
        elements: of the tensors that checkpointed modules were given in one call of the model.
    """

    ops: tuple[TracedOp, ...]
    sizes: tuple[int, ...]
    born: tuple[int, ...]
    died: tuple[int, ...]
    calls: tuple[ModuleCall, ...]
    saved: tuple[Saved, ...]
    given: Mapping[int, int]
    output_bytes: int
    attributes: Mapping[str, int] = field(default_factory=dict)
    left: int = 0
    elements: int = 0

    def most(self) -> int:
        """Bytes of the storages that are there at once, at most. O(ops + storages)."""
        change = [0] * (len(self.ops) + 2)
        for size, born, died in zip(self.sizes, self.born, self.died, strict=True):
            change[max(0, born)] += size
            change[died] -= size
        return max(accumulate(change))
