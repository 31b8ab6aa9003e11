"""The ops between the compiled graphs of a step, as regions that cannot change.

torch.compile leaves out functions under `torch.compiler.disable`, modules with backward hooks, the frame around a loop
that breaks. Their ops run as without a plan, forward and backward; here they become graphs, so that a plan counts them.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from planner.capture.passes.order import traced_order
from planner.capture.regions.calls import RegionCall
from planner.capture.regions.region import Region, analyse
from planner.capture.trace.backward_trace import EagerPart, edge_of, reads, sums
from planner.capture.trace.recording import EagerCall
from planner.compat import pytree
from planner.compat.fx import PlainAOTInput, PlainAOTOutput, TangentAOTInput
from planner.compat.ops import schema_of
from planner.compat.tensors import dense_parts, storage_key, version_of
from planner.core.call import storages, tensors_in
from planner.core.gradient_sums import takes

REASON = "it runs outside every compiled graph"


def as_region_calls(
    parts: Sequence[EagerPart],
    calls: Sequence[RegionCall],
    output: Sequence[Any],
    arrived: Mapping[int, torch.Tensor],
) -> tuple[RegionCall, ...]:
    """The calls of a step in order, with the parts between them as regions of their own.

    Args:
        parts: the ops that ran before each call that has a gradient, and after the last.
        calls: of compiled graphs.
        output: the leaves of the model's output.
        arrived: gradients of tensors that cross from one call or part to another, by the tensor's identity.
    """
    wanted = {id(t) for t in pytree.tree_leaves([[c.inputs for c in calls if c.region is not None], output])}
    wanted |= {id(t) for part in parts for t in reads(part.forward)}
    merged: list[RegionCall] = []
    remaining = iter(parts)
    for call in calls:
        if call.region is not None:
            merged.extend(_region_call(next(remaining), wanted, arrived))
        merged.append(call)
    merged.extend(_region_call(next(remaining), wanted, arrived))
    return tuple(merged)


def _matters(call: EagerCall) -> bool:
    """Whether an op allocates or writes; others are views."""
    allocated = storages(call.result).keys() - storages((call.args, call.kwargs)).keys()
    return bool(allocated) or schema_of(call.target).is_mutable


def _needed(calls: Sequence[EagerCall], wanted: set[int]) -> tuple[EagerCall, ...]:
    """The ops that allocate or write, and the views by which their inputs and the wanted tensors are reached.

    What is held while a view is made was there as the op before it ran.
    """
    kept: list[EagerCall] = []
    needed, held = set(wanted), frozenset[int]()
    for call in reversed(calls):
        held |= call.held
        if matters := _matters(call):
            call, held = replace(call, held=held), frozenset()
        if matters or any(id(t) in needed for t in tensors_in(call.result)):
            kept.append(call)
            needed.update(id(t) for t in tensors_in((call.args, call.kwargs)))
    return tuple(reversed(kept))


def _region_call(part: EagerPart, wanted: set[int], arrived: Mapping[int, torch.Tensor]) -> Iterator[RegionCall]:
    part = replace(part, forward=_needed(part.forward, wanted), backward=tuple(filter(_matters, part.backward)))
    if not part.forward:
        return
    inputs = reads(part.forward)
    own = {id(t) for t in inputs}
    returned = {id(t): t for call in part.forward for t in tensors_in(call.result) if id(t) not in own}
    results = tuple(t for key, t in returned.items() if key in wanted)
    region = _Recorder().region(part, inputs, results, arrived)
    yield RegionCall("", region, inputs, tuple(map(version_of, inputs)), results)


class _Recorder:
    """Writes the ops that ran as a graph."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.node_of: dict[int, fx.Node] = {}  # tensor -> its node
        self.holder: dict[int, fx.Node] = {}  # storage -> a node that holds it
        self.inputs = 0
        self.sums: dict[int, torch.Tensor] = {}  # storage of a sum of gradients -> the gradient that it goes to

    def region(
        self,
        part: EagerPart,
        inputs: Sequence[torch.Tensor],
        results: Sequence[torch.Tensor],
        arrived: Mapping[int, torch.Tensor],
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
            if id(t) in arrived:
                self._placeholder(f"tangents_{at}", arrived[id(t)], TangentAOTInput(PlainAOTOutput(at)))
        last = {key: i for i, call in enumerate(part.backward) for key in storages((call.args, call.kwargs))}
        for i, call in enumerate(part.backward):
            if sums(call):
                self._sum(i, call, last)
            else:
                self._record(call)
        for t in inputs:
            gradient = part.gradients.get(edge_of(t)) if t.requires_grad else None
            outputs.append(None if gradient is None else self.holder.get(storage_key(dense_parts(gradient)[-1])))
        output = self.graph.output(tuple(outputs))
        output.meta["desc"] = descs + [None] * len(inputs)
        joint = fx.GraphModule(torch.nn.Module(), self.graph)
        region = analyse(joint, len(results), traced_order(self.graph), REASON)
        return self._held_by_nodes(self._held_by_variables(region), part.saved)

    def _placeholder(self, name: str, t: torch.Tensor, desc: Any) -> None:
        last = next((n for n in reversed(self.graph.nodes) if n.op == "placeholder"), None)
        with self.graph.inserting_after(last) if last is not None else self.graph.inserting_before():
            node = self.graph.placeholder(name)
        node.meta.update(val=t, desc=desc)
        self._know(t, node)

    def _know(self, t: torch.Tensor, node: fx.Node) -> None:
        self.node_of[id(t)] = node
        for part in dense_parts(t):
            self.holder.setdefault(storage_key(part), node)

    def _node(self, t: torch.Tensor) -> fx.Node:
        """The node of a tensor: known, a view of one that holds its storage, or a gradient from elsewhere."""
        known = self.node_of.get(id(t))
        if known is not None:
            return known
        holder = self.holder.get(storage_key(t))
        if holder is None:
            self.inputs += 1
            self._placeholder(f"tangents_more_{self.inputs}", t, None)
            return self.node_of[id(t)]
        view = (holder, tuple(t.shape), t.stride(), t.storage_offset())
        node = self.graph.call_function(torch.ops.aten.as_strided.default, view)
        node.meta["val"] = self._placed(t)
        self._know(t, node)
        return node

    def _sum(self, i: int, call: EagerCall, last: Mapping[int, int]) -> None:
        """A sum of gradients goes where the first one is, if no op reads that later; `last` reads of storages."""
        first, term = call.args[:2]
        key = storage_key(dense_parts(first)[-1])
        if (holder := self.holder.get(key)) is None:  # it comes from elsewhere
            return
        if first.layout is torch.strided and takes(first, term) and last[key] == i:
            self.sums[storage_key(call.result)] = self._placed(first)
            self.holder.setdefault(storage_key(call.result), holder)
        else:
            self._record(replace(call, node=-i))

    def _placed(self, t: torch.Tensor) -> torch.Tensor:
        """A tensor; where it is a sum of gradients, or a view of one, the same in the memory of the first of these."""
        first = self.sums.get(storage_key(t)) if t.layout is torch.strided else None
        if first is None:
            return t
        return first.as_strided(t.shape, t.stride(), first.storage_offset() + t.storage_offset())

    def _record(self, call: EagerCall) -> None:
        args, kwargs = pytree.tree_map_only(torch.Tensor, self._node, (tuple(call.args), dict(call.kwargs)))
        node = self.graph.call_function(call.target, args, kwargs)
        words = {"stack_trace": call.stack_trace, "nn_module_stack": {"": (call.module, "")}}
        result = pytree.tree_map_only(torch.Tensor, self._placed, call.result)
        node.meta.update(val=result, autograd_node=call.node, held=call.held, **words)
        if isinstance(call.result, torch.Tensor):
            self._know(call.result, node)
        elif isinstance(call.result, (tuple, list)):
            for at, t in enumerate(call.result):
                if isinstance(t, torch.Tensor):
                    item = self.graph.call_function(operator.getitem, (node, at))
                    item.meta.update(val=self._placed(t), **words)
                    self._know(t, item)

    def _held_by_variables(self, region: Region) -> Region:
        """The same region, in which values are held by the functions' variables while other ops run."""
        ops = list(region.ops)
        made: set[int] = set()
        for i, op in enumerate(ops[: region.boundary]):
            holders = [self.holder[storage] for storage in op.node.meta["held"] if storage in self.holder]
            held = {v for node in holders for v in region.value_of[node]} & made
            ops[i] = replace(op, reads=tuple(dict.fromkeys((*op.reads, *sorted(held)))))
            made.update(op.writes)
        return replace(region, ops=tuple(ops))

    def _held_by_nodes(self, region: Region, saved: Mapping[int, tuple[torch.Tensor, ...]]) -> Region:
        """The same region, in which each autograd node holds all that it saved, reads and produces until it has run."""
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
