"""What runs between the compiled graphs of a step, recorded under fake tensors and read as regions that cannot change.

torch.compile leaves out functions under `torch.compiler.disable`, modules with backward hooks, the frame around a loop
that breaks. Their ops run as before, forward and backward; here they become graphs, so that a plan counts them.
"""

from __future__ import annotations

import linecache
import operator
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from .call import storages
from .calls import RegionCall
from .private import FakeTensorMode, PlainAOTInput, PlainAOTOutput, TangentAOTInput, TracingContext
from .region import Region, analyse

REASON = "it runs outside every compiled graph"


@dataclass(frozen=True, slots=True)
class EagerCall:
    """One op that ran outside every compiled graph, the autograd node that called it, and the user's line that did."""

    target: torch._ops.OpOverload
    args: Any
    kwargs: Mapping[str, Any]
    result: Any
    node: int
    stack_trace: str


class RecordingFakeMode(FakeTensorMode):
    """Fake tensors that can say which ops were called on them.

    Attributes:
        calls: what was recorded.
        node: number of the autograd node that runs.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)  # type: ignore[no-untyped-call]
        self.calls: list[EagerCall] = []
        self.node = 0
        self._pauses = 1

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.pause()
        try:
            result = super().dispatch(func, types, args, kwargs or {})
        finally:
            self.resume()
        if not self._pauses and TracingContext.try_get() is None:
            self.calls.append(EagerCall(func, args, dict(kwargs or {}), result, self.node, _user_line(sys._getframe())))
        return result

    def pause(self) -> None:
        """Record nothing until `resume()`; pauses nest, and the mode begins with one."""
        self._pauses += 1

    def resume(self) -> None:
        """Undo one `pause()`."""
        self._pauses -= 1

    def taken(self) -> tuple[EagerCall, ...]:
        """What was recorded since this was last called."""
        taken = tuple(self.calls)
        self.calls.clear()
        return taken


def _user_line(frame: FrameType | None) -> str:
    while frame is not None:
        name = frame.f_code.co_filename
        if "/torch/" not in name and not name.startswith("<") and __package__.rpartition(".")[0] not in name:
            line = linecache.getline(name, frame.f_lineno).strip()
            return f'File "{name}", line {frame.f_lineno}, in {frame.f_code.co_name}\n    {line}'
        frame = frame.f_back
    return ""


@dataclass(frozen=True)
class EagerPart:
    """The ops between two calls of compiled graphs, those of their backward pass, and what autograd nodes saved."""

    forward: tuple[EagerCall, ...]
    backward: tuple[EagerCall, ...]
    saved: Mapping[int, tuple[torch.Tensor, ...]]


class WatchedBackward:
    """A backward pass under fake tensors, and what runs in it outside the regions.

    Attributes:
        parts: what ran between the regions, forward and backward.
        gradients: of tensors that cross between regions and parts, by the tensor's identity.
    """

    def __init__(
        self, mode: RecordingFakeMode, calls: Sequence[RegionCall], between: Sequence[tuple[EagerCall, ...]]
    ) -> None:
        self.mode = mode
        self.calls = calls
        self.between = between
        self.gradients: dict[int, torch.Tensor] = {}
        self.parts: tuple[EagerPart, ...] = ()
        self._saved: dict[int, tuple[torch.Tensor, ...]] = {}

    def run(
        self,
        roots: Sequence[torch.Tensor],
        arriving: Sequence[torch.Tensor] | None,
        results: Sequence[torch.Tensor],
        ends: Sequence[torch.Tensor],
    ) -> tuple[torch.Tensor | None, ...]:
        """`torch.autograd.grad` of `results`; what runs before the gradients of `ends`, the outputs, is the loss's."""
        backward: list[list[EagerCall]] = [[] for _ in self.between]
        at = len(self.calls)  # the part whose ops run now
        begun = False
        crossing = {id(t): t for calls in self.between for t in _reads(calls) if t.requires_grad}
        crossing |= {id(t): t for call in self.calls for t in (*call.inputs, *call.results) if _differentiable(t)}
        crossing |= {id(t): t for t in ends}
        own_leaves = [t for calls in self.between for t in _reads(calls) if t.requires_grad and t.is_leaf]

        def arrived(key: int, end: bool, gradient: torch.Tensor) -> None:
            nonlocal begun
            if end and not begun:
                self.mode.taken()
                begun = True
            self.gradients[key] = gradient

        def begins(_: Any, node: torch.autograd.graph.Node) -> None:
            self.mode.node += 1
            names = (name for name in dir(node) if name.startswith("_saved_") or name == "saved_tensors")
            self._saved[self.mode.node] = tuple(_tensors([getattr(node, name) for name in names]))

        def enters(_: Any) -> None:
            backward[at].extend(self.mode.taken())
            self.mode.pause()

        def leaves(_: Any, __: Any, r: int) -> None:
            nonlocal at
            self.mode.resume()
            at = r

        last = {id(t) for t in ends}
        inner = [(key, t) for key, t in crossing.items() if not t.is_leaf]
        hooks = [partial(arrived, key, key in last) for key, _ in inner]
        handles = [t.register_hook(hook) for (_, t), hook in zip(inner, hooks, strict=True)]  # type: ignore[no-untyped-call]
        handles += [node.register_prehook(partial(begins, node=node)) for node in _eager_nodes(roots)]
        for r, call in enumerate(self.calls):
            nodes = {t.grad_fn for t in call.results if _differentiable(t) and t.grad_fn is not None}
            for node in nodes:
                if "CompiledFunction" in node.name():
                    handles += [node.register_prehook(enters), node.register_hook(partial(leaves, r=r))]
        self.mode.resume()
        try:
            found = torch.autograd.grad(roots, [*results, *own_leaves], arriving, allow_unused=True)
        finally:
            self.mode.pause()
            for handle in handles:
                handle.remove()
        backward[at].extend(self.mode.taken())
        self.gradients |= {id(t): g for t, g in zip(own_leaves, found[len(results) :], strict=True) if g is not None}
        self.parts = tuple(
            EagerPart(forward, tuple(back), self._saved) for forward, back in zip(self.between, backward, strict=True)
        )
        return found[: len(results)]


def _eager_nodes(roots: Sequence[torch.Tensor]) -> set[torch.autograd.graph.Node]:
    """The nodes of autograd's graph that are torch's own."""
    seen = {t.grad_fn for t in roots if t.grad_fn is not None}
    stack = list(seen)
    while stack:
        following = {node for node, _ in stack.pop().next_functions if node is not None} - seen
        seen |= following
        stack.extend(following)
    return {node for node in seen if "CompiledFunction" not in node.name() and "AccumulateGrad" not in node.name()}


def _differentiable(t: Any) -> bool:
    return isinstance(t, torch.Tensor) and t.requires_grad


def as_region_calls(
    parts: Sequence[EagerPart],
    calls: Sequence[RegionCall],
    output: Sequence[Any],
    gradients: Mapping[int, torch.Tensor],
) -> tuple[RegionCall, ...]:
    """The calls of a step in order, with the parts between them as regions of their own.

    Args:
        parts: what ran before each call that has a gradient, and after the last.
        calls: of compiled graphs.
        output: the leaves of the model's output.
        gradients: of tensors that cross from one call or part to another, by the tensor's identity.
    """
    wanted = {id(t) for t in pytree.tree_leaves([[c.inputs for c in calls if c.region is not None], output])}
    wanted |= {id(t) for part in parts for t in _reads(part.forward)}
    merged: list[RegionCall] = []
    remaining = iter(parts)
    for call in calls:
        if call.region is not None:
            merged.extend(_region_call(next(remaining), wanted, gradients))
        merged.append(call)
    merged.extend(_region_call(next(remaining), wanted, gradients))
    return tuple(merged)


def _reads(calls: Sequence[EagerCall]) -> Iterator[torch.Tensor]:
    """The tensors that ops take from elsewhere, each once."""
    known: set[int] = set()
    for call in calls:
        for t in _tensors((call.args, call.kwargs)):
            if id(t) not in known:
                known.add(id(t))
                yield t
        known.update(id(t) for t in _tensors(call.result))


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [t for t in pytree.tree_leaves(tree) if isinstance(t, torch.Tensor)]


def _matters(call: EagerCall) -> bool:
    """Whether an op allocates or writes; others are views."""
    made = storages(call.result).keys() - storages((call.args, call.kwargs)).keys()
    return bool(made) or call.target._schema.is_mutable


def _needed(calls: Sequence[EagerCall], wanted: set[int]) -> tuple[EagerCall, ...]:
    """The ops that allocate or write, and what their inputs and the wanted tensors are views by."""
    kept: list[EagerCall] = []
    needed = set(wanted)
    for call in reversed(calls):
        if _matters(call) or any(id(t) in needed for t in _tensors(call.result)):
            kept.append(call)
            needed.update(id(t) for t in _tensors((call.args, call.kwargs)))
    return tuple(reversed(kept))


def _region_call(part: EagerPart, wanted: set[int], gradients: Mapping[int, torch.Tensor]) -> Iterator[RegionCall]:
    part = EagerPart(_needed(part.forward, wanted), tuple(filter(_matters, part.backward)), part.saved)
    if not part.forward:
        return
    inputs = tuple(_reads(part.forward))
    own = {id(t) for t in inputs}
    made = {id(t): t for call in part.forward for t in _tensors(call.result) if id(t) not in own}
    results = tuple(t for key, t in made.items() if key in wanted)
    region = _Recorder().region(part, inputs, results, gradients)
    yield RegionCall("", region, inputs, tuple(t._version for t in inputs), results)


class _Recorder:
    """Writes what ran as a graph."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.node_of: dict[int, fx.Node] = {}  # tensor -> its node
        self.holder: dict[int, fx.Node] = {}  # storage -> a node that holds it
        self.inputs = 0

    def region(
        self,
        part: EagerPart,
        inputs: Sequence[torch.Tensor],
        results: Sequence[torch.Tensor],
        gradients: Mapping[int, torch.Tensor],
    ) -> Region:
        for at, t in enumerate(inputs):
            self._placeholder(f"primals_{at}", t, PlainAOTInput(at))
        for call in part.forward:
            self._record(call)
        descs: list[Any] = [PlainAOTOutput(at) for at in range(len(results))]
        outputs: list[fx.Node | None] = [self._node(t) for t in results]
        for node in self.graph.nodes:
            node.meta["partitioner_tag"] = "is_forward"
        for at, t in enumerate(results):
            if id(t) in gradients:
                self._placeholder(f"tangents_{at}", gradients[id(t)], TangentAOTInput(PlainAOTOutput(at)))
        for call in part.backward:
            self._record(call)
        for t in inputs:
            gradient = gradients.get(id(t)) if t.requires_grad else None
            outputs.append(None if gradient is None else self.holder.get(gradient.untyped_storage()._cdata))
        output = self.graph.output(tuple(outputs))
        output.meta["desc"] = descs + [None] * len(inputs)
        joint = fx.GraphModule(torch.nn.Module(), self.graph)
        return self._held_by_nodes(analyse(joint, len(results), outside=REASON), part.saved)

    def _placeholder(self, name: str, t: torch.Tensor, desc: Any) -> None:
        last = next((n for n in reversed(self.graph.nodes) if n.op == "placeholder"), None)
        with self.graph.inserting_after(last) if last is not None else self.graph.inserting_before():
            node = self.graph.placeholder(name)
        node.meta.update(val=t, desc=desc)
        self._know(t, node)

    def _know(self, t: torch.Tensor, node: fx.Node) -> None:
        self.node_of[id(t)] = node
        self.holder.setdefault(t.untyped_storage()._cdata, node)

    def _node(self, t: torch.Tensor) -> fx.Node:
        """The node of a tensor; a view of what holds its storage; or a gradient that comes from elsewhere."""
        known = self.node_of.get(id(t))
        if known is not None and known.meta["val"] is t:
            return known
        holder = self.holder.get(t.untyped_storage()._cdata)
        if holder is None:
            self.inputs += 1
            self._placeholder(f"tangents_more_{self.inputs}", t, None)
            return self.node_of[id(t)]
        view = (holder, tuple(t.shape), t.stride(), t.storage_offset())
        node = self.graph.call_function(torch.ops.aten.as_strided.default, view)
        node.meta["val"] = t
        self._know(t, node)
        return node

    def _record(self, call: EagerCall) -> None:
        args, kwargs = pytree.tree_map_only(torch.Tensor, self._node, (tuple(call.args), dict(call.kwargs)))
        node = self.graph.call_function(call.target, args, kwargs)
        node.meta.update(val=call.result, stack_trace=call.stack_trace, autograd_node=call.node)
        if isinstance(call.result, torch.Tensor):
            self._know(call.result, node)
        elif isinstance(call.result, (tuple, list)):
            for at, t in enumerate(call.result):
                if isinstance(t, torch.Tensor):
                    item = self.graph.call_function(operator.getitem, (node, at))
                    item.meta.update(val=t, stack_trace=call.stack_trace)
                    self._know(t, item)

    def _held_by_nodes(self, region: Region, saved: Mapping[int, tuple[torch.Tensor, ...]]) -> Region:
        """The same, where what an autograd node saved, reads and makes is held until it has run."""
        ops = list(region.ops)
        used: dict[int, set[int]] = defaultdict(set)
        taken: dict[int, set[int]] = defaultdict(set)
        last: dict[int, int] = {}
        for i, op in enumerate(ops[region.boundary :], region.boundary):
            number = op.node.meta["autograd_node"]
            used[number].update(op.reads, op.writes)
            taken[number].update(op.takes)
            last[number] = i
        for number, i in last.items():
            for storage in storages(saved.get(number, ())):
                if storage in self.holder:
                    used[number].update(region.value_of[self.holder[storage]])
                    taken[number].update(at for at, n in enumerate(region.primals) if n is self.holder[storage])
            reads = tuple(sorted(used[number].difference(ops[i].writes)))
            ops[i] = replace(ops[i], reads=reads, takes=tuple(sorted(taken[number])))
        return replace(region, ops=tuple(ops))
