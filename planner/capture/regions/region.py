"""One captured joint graph, read as ops on storages.

Values are identified by storage: views, `getitem` and aliasing outputs share the value of their base. Everything here
reads `torch.fx` graphs and fake tensors; no op runs, and no graph is changed.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import fx

from planner.capture.joint_graph import Signature, index_of, may_write, nodes_in, signature_of, tensors
from planner.capture.passes.checkpoints import checkpointed_calls, clone_of
from planner.capture.passes.order import Order
from planner.capture.passes.steps import is_step
from planner.capture.recomputability import (
    is_replayed,
    keep_reason,
    replay_bytes,
    sent_for,
    statistics_of,
    waited_for,
)
from planner.capture.regions.fingerprint import fingerprint
from planner.compat.tensors import storage_key
from planner.core.pieces import Split

Kind = Literal["call", "rng_state"]


@dataclass(frozen=True, slots=True)
class GraphOp:
    """One op of a region: a node that allocates storages, or the RNG state read just before a random node.

    Attributes:
        node: the node of the joint graph.
        kind: "call", or "rng_state" for the state that replays the random op `node`.
        reads: indices of the values it reads.
        writes: indices of the values it produces.
        keep_because: why it must not run twice; empty where it may.
        takes: positions of the primals that it reads, itself or through views.
    """

    node: fx.Node
    kind: Kind
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    keep_because: str = ""
    takes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class GraphValue:
    """One storage that an op of the region produces.

    Attributes:
        owner: the first node that holds it as a tensor; every view of it derives from this one.
        nbytes: size of the storage in bytes.
    """

    owner: fx.Node
    nbytes: int


@dataclass(frozen=True)
class Region:
    """A joint graph, as ops in execution order on values; forward first.

    Attributes:
        joint: the graph itself.
        ops: forward ops (`ops[:boundary]`), then backward ops.
        values: the storages that the ops produce, and those of the gradients that come in.
        primals, tangents: placeholders of the forward inputs and of the gradients that come in.
        fwd_outputs, grads: results of the forward and of the backward pass.
        returned: forward outputs that the caller goes on holding (not the new contents of buffers).
        mutated: primals that the step writes into (BatchNorm statistics).
        value_of: for each node that holds values, their indices.
        primal_of: for each node that is a primal or a view of one, its position.
        fingerprint: equal for graphs of equal structure, shapes, dtypes and devices; empty for ops outside graphs.
        checkpointed: calls in it that the model itself checkpoints.
        module: path of the module whose call it was made of.
        order: in which the nodes of the graph run.
        splits: the sets of its ops that run in pieces, as one op each.
        rnns_in_parts: whether it was traced with recurrent layers in parts of their sequences.
    """

    joint: fx.GraphModule
    ops: tuple[GraphOp, ...]
    boundary: int
    values: tuple[GraphValue, ...]
    primals: tuple[fx.Node, ...]
    tangents: tuple[fx.Node, ...]
    fwd_outputs: tuple[Any, ...]
    returned: tuple[Any, ...]
    grads: tuple[Any, ...]
    output_descs: tuple[Any, ...]
    mutated: frozenset[fx.Node]
    value_of: dict[fx.Node, tuple[int, ...]] = field(repr=False)
    primal_of: dict[fx.Node, tuple[int, ...]] = field(repr=False)
    fingerprint: str = ""
    checkpointed: int = 0
    module: str = ""
    order: Order = field(default=Order((), ()), repr=False)
    splits: tuple[Split, ...] = ()
    rnns_in_parts: bool = False

    def input_at(self, at: int) -> int | None:
        """Position of the primal that stands for the region's argument number `at`."""
        return next((i for i, n in enumerate(self.primals) if index_of(n.meta.get("desc")) == at), None)

    def output_at(self, at: int) -> Any:
        """The node of the region's result number `at`."""
        nodes = (n for n, d in zip(self.fwd_outputs, self.output_descs, strict=False) if index_of(d) == at)
        return next(nodes, None)

    def tangent_at(self, at: int) -> Any:
        """The placeholder of the gradient of the region's result number `at`, or of the one that this is a view of."""
        given = [(n, getattr(n.meta.get("desc"), "output", None)) for n in self.tangents]
        own = next((n for n, output in given if index_of(output) == at), None)
        if own is not None:
            return own
        values = self.values_in([self.output_at(at)])
        bases = ((n, index_of(getattr(output, "base_of", output))) for n, output in given)
        same = (n for n, of in bases if of is not None and self.values_in([self.output_at(of)]) == values)
        return next(same, None) if values else None

    def values_in(self, outputs: Iterable[Any]) -> tuple[int, ...]:
        """The values that a list of output nodes holds alive, each once."""
        return tuple(dict.fromkeys(v for n in nodes_in(outputs) for v in self.value_of[n]))

    def value_by_storage(self) -> dict[int, int]:
        """The values that ops of its forward pass make, by `storage_key`."""
        made = {v for op in self.ops[: self.boundary] for v in op.writes}
        alone = ((list(tensors(n)), vs) for n, vs in self.value_of.items())
        return {storage_key(ts[0]): vs[0] for ts, vs in alone if len(ts) == len(vs) == 1 and vs[0] in made}

    def statistics(self) -> set[int]:
        """The values that are running statistics for the next call of their layer; no op's `reads` name them.

        They are those of an op's first run: others make such of scratch ones.
        """
        calls = [op.node for op in self.ops if op.kind == "call"]
        return {v for node in calls for n in statistics_of(node) for v in self.value_of[n]}

    def statistics_bytes(self) -> int:
        """The most bytes that they hold at a time."""
        statistics, held, most = self.statistics(), 0, 0
        for op in self.ops:
            held += sum(self.values[v].nbytes for v in op.writes if v in statistics)
            most = max(most, held)
            if statistics and op.kind == "call":
                held -= sum(self.values[v].nbytes for n in statistics_of(op.node) for v in self.value_of[n])
        return most


def analyse(
    joint: fx.GraphModule, num_fwd_outputs: int, order: Order, outside: str = "", known_as: str | None = None
) -> Region:
    """Read a joint graph as ops on storages. O(nodes + edges) time; the graph is not changed.

    Args:
        joint: the graph.
        num_fwd_outputs: how many of its outputs the forward pass returns.
        order: in which its nodes run.
        outside: why the graph runs just as it is, node by node, and no op of it twice; empty for a graph to be planned.
        known_as: the fingerprint of the region; None for that of the graph.

    Raises:
        NotImplementedError: the graph has sizes that are known only at run time.
    """
    signature = signature_of(joint.graph, num_fwd_outputs)
    table = _ValueTable(joint.graph, signature)
    ops, boundary = _read_ops(order, table, signature.mutated, outside)
    return Region(
        joint=joint,
        ops=ops,
        boundary=boundary,
        values=tuple(table.values),
        primals=signature.primals,
        tangents=signature.tangents,
        fwd_outputs=signature.fwd_outputs,
        returned=signature.returned,
        grads=signature.grads,
        output_descs=signature.output_descs,
        mutated=signature.mutated,
        value_of=table.value_of,
        primal_of=table.primal_of,
        fingerprint="" if outside else fingerprint(joint.graph) if known_as is None else known_as,
        checkpointed=checkpointed_calls(joint.graph),
        order=order,
    )


def _read_ops(
    order: Order, table: _ValueTable, mutated: Iterable[fx.Node], outside: str
) -> tuple[tuple[GraphOp, ...], int]:
    """The ops in their order, entered into the table, and how many of them run in the forward pass."""
    ops: list[GraphOp] = []
    boundary = 0
    states: dict[fx.Node | None, int] = {}  # node that may draw -> the value that is its generator's state
    # those that read or make a value into which another writes must not run twice, nor those that read such an input
    into = [n for node in order.nodes if may_write(node) for n in node.args[:1] if isinstance(n, fx.Node)]
    steps = {node.args[0] for node in order.nodes if is_step(node)}
    tainted = {*mutated, *(n for node in into if node not in steps for n in table.primals_of(node))}  # what holds one
    for node in order.nodes:
        result = waited_for(node)
        # the tensors that a collective sends are held until it has been waited for
        inputs = node.all_input_nodes if result is None else [*node.all_input_nodes, *sent_for(result)]
        first = statistics_of(node)  # what a second run need not have
        reads = tuple(dict.fromkeys(v for n in inputs if n not in first for v in table.value_of[n]))
        writes = table.enter(node)
        if not (writes or node.is_impure() or (outside and may_write(node))):  # a view
            if not tainted.isdisjoint(inputs):
                tainted.add(node)
            continue
        before = len(ops)
        reason = outside or keep_reason(node, tainted)
        original = clone_of(node)
        if original in states:
            reads = (*reads, states[original])
        elif not reason and is_replayed(node):
            states[node] = state = table.add(node, replay_bytes(node)[0])
            ops.append(GraphOp(node, "rng_state", (), (state,), "the state of a random op"))
            reads = (*reads, state)
        takes = tuple(dict.fromkeys(at for n in inputs for at in table.primal_of.get(n, ())))
        ops.append(GraphOp(node, "call", reads, writes, reason, takes))
        if node in order.forward:
            boundary += len(ops) - before
    if any(is_step(op.node) for op in ops):
        because = "parameters are stepped in the backward pass, and it may read one"
        ops[boundary:] = [replace(op, keep_because=op.keep_because or because) for op in ops[boundary:]]
    written = {v for n in into for v in table.value_of[n]}
    for i, op in enumerate(ops):
        if not op.keep_because and not written.isdisjoint((*op.reads, *op.writes)):
            ops[i] = replace(op, keep_because="another op writes into what it reads or makes")
    return tuple(ops), boundary


class _ValueTable:
    """The storages of a graph, numbered as they are produced, and the nodes that hold them.

    Attributes:
        values: one for each storage that the graph produces or that comes in as a gradient.
        value_of: for each node, the indices of the values that it holds.
        primal_of: for each node that is a primal or a view of one, its position.
    """

    def __init__(self, graph: fx.Graph, signature: Signature) -> None:
        self.values: list[GraphValue] = []
        self.value_of: dict[fx.Node, tuple[int, ...]] = dict.fromkeys(graph.nodes, ())
        self.primal_of: dict[fx.Node, tuple[int, ...]] = {n: (at,) for at, n in enumerate(signature.primals)}
        self._given = signature.primals
        given = [(at, t) for at, n in enumerate(self._given) for t in tensors(n)]
        self._primals = {storage_key(t): at for at, t in given}  # storage -> position of the primal
        self._produced: dict[int, int] = {}  # storage -> value
        self._on_gpu = any(t.device.type != "cpu" for _, t in given)
        for node in signature.tangents:
            for t in tensors(node) if node.users else ():  # one that is not read does not arrive
                self._produced[storage_key(t)] = value = self.add(node, self._nbytes(t))
                self.value_of[node] = (value,)

    def add(self, owner: fx.Node, nbytes: int) -> int:
        """Enter a value; returns its index."""
        self.values.append(GraphValue(owner, nbytes))
        return len(self.values) - 1

    def primals_of(self, node: fx.Node) -> list[fx.Node]:
        """The primals whose memory a node's tensors are in."""
        keys = {storage_key(t) for t in tensors(node)} & self._primals.keys()
        return [n for n in self._given if any(storage_key(t) in keys for t in tensors(n))] if keys else []

    def enter(self, node: fx.Node) -> tuple[int, ...]:
        """Enter the tensors that a node returns; returns the values that it produces: none for a view."""
        waited = waited_for(node)
        if waited is not None:
            self._alias(node, waited)
        writes: list[int] = []
        held: list[int] = []
        for t in tensors(node):
            if isinstance(t.numel(), torch.SymInt):
                raise NotImplementedError(f"{node.format_node()}: its size is known only at run time")
            key = storage_key(t)
            if key in self._primals:
                self.primal_of[node] = (self._primals[key],)
                continue
            if key not in self._produced:
                self._produced[key] = self.add(node, self._nbytes(t))
                writes.append(self._produced[key])
            held.append(self._produced[key])
        self.value_of[node] = tuple(dict.fromkeys(held))
        if not writes and (waited is not None or node.target is operator.getitem):
            for v in held:  # views derive from the tensor itself, not from the tuple or the handle that held it first
                if self.values[v].owner is node.args[0]:
                    self.values[v] = replace(self.values[v], owner=node)
        return tuple(writes)

    def _alias(self, node: fx.Node, result: fx.Node) -> None:
        """A node that waits for a collective returns the collective's result, though its fake tensor is another."""
        keys = map(storage_key, tensors(node))
        if self.value_of[result]:
            self._produced.update(dict.fromkeys(keys, self.value_of[result][0]))
        else:
            self._primals.update(dict.fromkeys(keys, self.primal_of[result][0]))

    def _nbytes(self, t: torch.Tensor) -> int:
        storage = t.untyped_storage()
        return 0 if self._on_gpu and storage.device.type == "cpu" else storage.nbytes()  # scalars stay on the host
