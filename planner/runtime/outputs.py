"""The outputs of a planned graph as autograd's nodes of their own, as they have without a plan.

A compiled graph is one node: hooks of an output that no gradient reaches would run, and those of an output that another
one is computed from would see the gradient from outside alone. Here each output has a node, with an edge to the outputs
that it is computed from. Where somebody asks for the whole gradient of such an output (a hook, `retain_grad()`,
`torch.autograd.grad`), it is computed when autograd comes to its node, and the graph's backward pass goes on from it.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from planner.capture.trace.arrival import WHOLE, Arrivals
from planner.compat.autograd import (
    compiled_node,
    hooks_of,
    running_pass,
    runs_in_this_pass,
    saved_in_order,
    when_backward_ends,
)
from planner.compat.tensors import viewed

_LEAF = torch.empty((), device="meta", requires_grad=True)  # no `torch.autograd.grad` asks for it
_END = get_gradient_edge(_LEAF).node


@dataclass(frozen=True, eq=False)
class Unasking:
    """A hook of an output that has no use for the gradient."""

    hook: Callable[[Any], Any]

    def __call__(self, gradient: torch.Tensor | None) -> Any:
        return self.hook(gradient)


def with_nodes(results: Sequence[Any], arrivals: Arrivals) -> Sequence[Any]:
    """The results of a compiled graph, each that needs a gradient with a node of its own, where there are several.

    Views of each other stay as they are.
    """
    bases = Counter(id(base) for t in results if isinstance(t, torch.Tensor) and (base := viewed(t)) is not None)
    nodes = {at: node for at, t in enumerate(results) if (node := compiled_node(t)) is not None and not bases[id(t)]}
    own = [at for at in nodes if not bases or bases[id(viewed(results[at]))] < 2]
    if len(own) < 2:
        return results
    call, feeds = _Call(arrivals, nodes[own[0]]), arrivals.feeds
    done: dict[int, torch.Tensor] = {}
    fed: list[int] = []  # of those that are done, those that others are computed from: they come first
    for at in sorted(own, key=lambda at: len(feeds.get(at, ())), reverse=True):
        into = [i for i in fed if at in feeds[i]]
        done[at] = output = _Output.apply(  # type: ignore[no-untyped-call]
            call, (at, *into), results[at], _LEAF, *(done[i] for i in into)
        )
        if at in feeds:
            fed.append(at)
            call.watch(at, output)
    return tuple(done.get(at, t) for at, t in enumerate(results))


class _Call:
    """One call of a compiled graph, until its backward passes are over.

    Attributes:
        arrived: the gradients of outputs, by position, as far as whole gradients are computed from them.
        whole: positions of the outputs whose whole gradients were computed.
    """

    def __init__(self, arrivals: Arrivals, node: Any) -> None:
        self.arrivals, self.node = arrivals, weakref.ref(node)
        self.hooks: dict[int, Mapping[int, Any]] = {}
        self.outputs: dict[int, weakref.ref[torch.Tensor]] = {}
        self.kinds: dict[int, tuple[torch.Size, torch.dtype, torch.device]] = {}
        self.at = -1  # the backward pass of which the following are
        self.arrived: dict[int, torch.Tensor] = {}
        self.whole: set[int] = set()
        setattr(node, WHOLE, self.whole)

    def watch(self, at: int, output: torch.Tensor) -> None:
        # the hook is among those that this object looks at: a strong reference would be a cycle
        output.register_hook(Unasking(partial(_complete, weakref.ref(self), at)))  # type: ignore[no-untyped-call]
        self.hooks[at] = hooks_of(output)
        self.kinds[at] = output.shape, output.dtype, output.device
        self.outputs[at] = weakref.ref(output)

    def arrives(self, at: int, gradient: torch.Tensor | None, into: Sequence[int]) -> list[torch.Tensor | None]:
        """The gradient of an output is known, after its hooks. Returns the gradients of those that it is computed from.

        Where a hook asks, these are zeros, as a hook must not make a gradient out of None: the whole gradient, with its
        terms added up in autograd's order, takes their place there. `torch.autograd.grad` returns what no hook saw.
        """
        self._begin()
        node = self.node()
        if gradient is None or node is None or not into:
            return [None] * len(into)
        if not runs_in_this_pass(_END):
            self.whole.update(into)
            saved, others = saved_in_order(node), self.arrivals.feeds.keys()
            return [self.arrivals.whole(saved, {at: gradient}, others - {i}, i) for i in into]
        asked = [self._asked(i) for i in into]
        if any(asked):
            if not self.arrived:
                when_backward_ends(self.arrived.clear)
            self.arrived[at] = gradient
        return [self._zeros(i) if asks else None for i, asks in zip(into, asked, strict=True)]

    def _zeros(self, at: int) -> torch.Tensor:
        shape, dtype, device = self.kinds[at]
        return torch.zeros((), dtype=dtype, device=device).expand(shape)

    def complete(self, at: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """The whole gradient of an output, from that which comes from outside; None where nobody asks."""
        self._begin()
        node = self.node()
        if node is None or gradient is None or not runs_in_this_pass(_END) or not self._asked(at):
            return None
        whole = self.arrivals.whole(saved_in_order(node), {**self.arrived, at: gradient}, self.whole, at)
        self.whole.add(at)
        return whole

    def _begin(self) -> None:
        if self.at != running_pass():
            self.at = running_pass()
            self.arrived.clear()
            self.whole.clear()

    def _asked(self, at: int) -> bool:
        """Whether a hook or `retain_grad()` asks for the gradient of an output."""
        output = self.outputs[at]()
        asks = any(map(_has_use, self.hooks[at].values()))
        return asks or (output is not None and output.retains_grad)


def _complete(call: weakref.ref[_Call], at: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
    found = call()
    return None if found is None else found.complete(at, gradient)


def _has_use(hook: Any) -> bool:
    """Whether a hook may read or change the gradient: FSDP's only say that the backward pass begins."""
    module = str(getattr(getattr(hook, "func", hook), "__module__", ""))
    return not isinstance(hook, Unasking) and not module.startswith("torch.distributed.")


class _Output(torch.autograd.Function):
    """The node of an output."""

    @staticmethod
    def forward(ctx: Any, call: _Call, at: Sequence[int], output: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        ctx.call, (ctx.at, *ctx.into) = call, at
        ctx.set_materialize_grads(False)
        return output.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        return (None, None, gradient, None, *ctx.call.arrives(ctx.at, gradient, ctx.into))
