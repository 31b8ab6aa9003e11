"""One captured joint graph, read as ops on storages.

Values are found by storage: views, `getitem` and aliasing outputs share the value of their base. Everything here reads
`torch.fx` graphs and fake tensors; nothing runs.
"""

from __future__ import annotations

import hashlib
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import fx
from torch.utils import _pytree as pytree

from planner.capture.passes.checkpoints import checkpointed_calls, clone_of, repeat_checkpointed
from planner.capture.passes.dropout import split_dropouts
from planner.capture.passes.duplicates import merge_duplicates
from planner.capture.recomputability import (
    group_of,
    is_collective,
    is_random,
    keep_reason,
    replay_bytes,
    sent_for,
    waited_for,
)
from planner.capture.shapes import SYMBOLIC, is_size
from planner.core.options import Checkpoints

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
        fwd_outputs, grads: what the forward and the backward pass return.
        returned: forward outputs that the caller goes on holding (not the new contents of buffers).
        mutated: primals that the step writes into (BatchNorm statistics).
        value_of: for each node that holds values, their indices.
        primal_of: for each node that is a primal or a view of one, its position.
        fingerprint: equal for graphs of equal structure, shapes, dtypes and devices; empty for what ran outside them.
        checkpointed: calls in it that the model itself checkpoints.
        module: path of the module whose call it was made of.
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

    def input_at(self, at: int) -> int | None:
        """Position of the primal that stands for the region's argument number `at`."""
        return next((i for i, n in enumerate(self.primals) if _index(n.meta.get("desc")) == at), None)

    def output_at(self, at: int) -> Any:
        """The node of the region's result number `at`."""
        found = (n for n, d in zip(self.fwd_outputs, self.output_descs, strict=False) if _index(d) == at)
        return next(found, None)

    def tangent_at(self, at: int) -> Any:
        """The placeholder of the gradient of the region's result number `at`."""
        return next((n for n in self.tangents if _index(getattr(n.meta.get("desc"), "output", None)) == at), None)

    def values_in(self, outputs: Iterable[Any]) -> tuple[int, ...]:
        """The values that a list of output nodes holds alive, each once."""
        nodes = [n for n in outputs if isinstance(n, fx.Node)]
        return tuple(dict.fromkeys(v for n in nodes for v in self.value_of[n]))


def tensors(node: fx.Node, value: Any = None) -> Iterator[torch.Tensor]:
    """The fake tensors that a node returns, or those of another value of its."""
    if value is None:
        value = node.meta.get("val", node.meta.get("example_value"))  # AOTAutograd's name for it, Dynamo's
    return (t for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor))


def map_nodes(arguments: Any, of: Callable[[fx.Node], Any]) -> Any:
    """Arguments of a node with every node in them replaced by `of(node)`."""
    return fx.node.map_arg(arguments, of)


def analyse(
    joint: fx.GraphModule, num_fwd_outputs: int, checkpoints: Checkpoints = "replace", outside: str = ""
) -> Region:
    """Read a joint graph. O(nodes) time.

    Nodes that neither feed the forward outputs nor depend on a gradient run in the backward pass, just before they
    are first needed.

    Args:
        joint: the graph; forward nodes are tagged as AOTAutograd does.
        num_fwd_outputs: how many of its outputs the forward pass returns.
        checkpoints: "keep" for what the model itself checkpoints to run again as it asks.
        outside: why it runs just as it is, node by node, and nothing of it twice; empty for a graph to be planned.

    Raises:
        NotImplementedError: the graph has sizes that are known only at run time.
    """
    graph = joint.graph
    if not outside:
        normalise(joint)
    output = graph.output_node()
    placeholders = list(graph.find_nodes(op="placeholder"))
    tangents = tuple(n for n in placeholders if "tangents" in str(n.target))
    primals = tuple(n for n in placeholders if n not in set(tangents))
    flat = list(output.args[0])  # type: ignore[arg-type]
    descs = output.meta.get("desc") or [None] * len(flat)
    fwd_outputs, grads = flat[:num_fwd_outputs], flat[num_fwd_outputs:]
    mutated = _mutated(primals, [d for d in descs[:num_fwd_outputs] if _is_mutation(d)])
    returned = tuple(n for n, d in zip(fwd_outputs, descs, strict=False) if not _is_mutation(d))
    tagged = {n for n in graph.nodes if n.meta.get("partitioner_tag") == "is_forward"}
    if outside:
        forward = tagged
        order = [n for n in graph.nodes if n.op not in ("placeholder", "output")]
    else:
        # random ops draw in the order of the forward pass, whoever uses what they draw
        drawn = [n for n in graph.nodes if is_random(n) and n in tagged]
        forward = _ancestors([*(n for n in fwd_outputs if isinstance(n, fx.Node)), *drawn])
        if checkpoints == "keep":
            repeat_checkpointed(graph, forward, mutated)
        order = _execution_order(graph, forward, _ancestors(n for n in grads if isinstance(n, fx.Node)))
        order = merge_duplicates(graph, order)

    storages: dict[int, int] = {}  # storage -> value
    external = {t.untyped_storage()._cdata: at for at, n in enumerate(primals) for t in tensors(n)}
    primal_of: dict[fx.Node, tuple[int, ...]] = {n: (at,) for at, n in enumerate(primals)}
    on_gpu = any(t.is_cuda for n in primals for t in tensors(n))

    def nbytes(storage: torch.UntypedStorage) -> int:
        return 0 if on_gpu and storage.device.type == "cpu" else storage.nbytes()  # scalars stay on the host

    values: list[GraphValue] = []
    value_of: dict[fx.Node, tuple[int, ...]] = dict.fromkeys(graph.nodes, ())
    for node in tangents:
        for t in tensors(node):
            storages[t.untyped_storage()._cdata] = len(values)
            value_of[node] = (len(values),)
            values.append(GraphValue(node, nbytes(t.untyped_storage())))
    ops: list[GraphOp] = []
    boundary = 0
    states: dict[fx.Node | None, int] = {}  # random node -> the value that is its generator's state
    tainted = set(mutated)  # nodes that hold a mutated input
    for node in order:
        inputs = node.all_input_nodes
        result = waited_for(node)
        if result is not None:  # what it returns is what it waits for; what was sent is held until then
            known, at = (storages, value_of[result]) if value_of[result] else (external, primal_of[result])
            known.update({t.untyped_storage()._cdata: at[0] for t in tensors(node)})
            inputs = [*inputs, *sent_for(result)]
        reads = tuple(dict.fromkeys(v for n in inputs for v in value_of[n]))
        writes: list[int] = []
        held: list[int] = []
        for t in tensors(node):
            if isinstance(t.numel(), torch.SymInt):
                raise NotImplementedError(f"{node.format_node()}: its size is known only at run time")
            storage = t.untyped_storage()
            key = storage._cdata
            if key in external:
                primal_of[node] = (external[key],)
                continue
            if key not in storages:
                storages[key] = len(values)
                writes.append(len(values))
                values.append(GraphValue(node, nbytes(storage)))
            held.append(storages[key])
        value_of[node] = tuple(dict.fromkeys(held))
        if (node.target is operator.getitem or result is not None) and not writes:
            for v in value_of[node]:
                if values[v].owner is node.args[0]:
                    values[v] = GraphValue(node, values[v].nbytes)
        if not writes and not node.is_impure() and not (outside and _writes(node)):
            if any(n in tainted for n in inputs):
                tainted.add(node)
            continue
        reason = outside or keep_reason(node, tainted)
        original = clone_of(node)
        if original in states:
            reads = (*reads, states[original])
        elif not reason and is_random(node):
            states[node] = len(values)
            values.append(GraphValue(node, replay_bytes(node)[0]))
            ops.append(GraphOp(node, "rng_state", (), (len(values) - 1,), "the state of a random op"))
            reads = (*reads, len(values) - 1)
            boundary += node in forward
        takes = tuple(dict.fromkeys(at for n in inputs for at in primal_of.get(n, ())))
        ops.append(GraphOp(node, "call", reads, tuple(writes), reason, takes))
        boundary += node in forward
    return Region(
        joint=joint,
        ops=tuple(ops),
        boundary=boundary,
        values=tuple(values),
        primals=primals,
        tangents=tangents,
        fwd_outputs=tuple(fwd_outputs),
        returned=returned,
        grads=tuple(grads),
        output_descs=tuple(descs),
        mutated=mutated,
        value_of=value_of,
        primal_of=primal_of,
        fingerprint="" if outside else fingerprint(graph),
        checkpointed=checkpointed_calls(graph),
    )


def _index(desc: Any) -> int | None:
    """The number in AOTAutograd's name of a plain input or output."""
    return desc.idx if type(desc).__name__ in ("PlainAOTInput", "PlainAOTOutput") else None


def _mutated(primals: tuple[fx.Node, ...], descs: list[Any]) -> frozenset[fx.Node]:
    """The inputs that are overwritten; all of them where a name does not say which."""
    named = {d.mutated_input for d in descs}
    found = frozenset(n for n in primals if n.meta.get("desc") in named)
    return found if len(found) == len(named) else frozenset(primals)


def _is_mutation(desc: Any) -> bool:
    return type(desc).__name__ == "InputMutationAOTOutput"


def _writes(node: fx.Node) -> bool:
    """Whether a node writes into its inputs."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _ancestors(roots: Iterable[fx.Node]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    stack = list(roots)
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack.extend(node.all_input_nodes)
    return found


def _execution_order(graph: fx.Graph, forward: set[fx.Node], needed: set[fx.Node]) -> list[fx.Node]:
    """Forward nodes, then backward nodes; those that wait for no gradient are sunk to their first use.

    Impure nodes without results (assertions) stay where they are: in the forward pass if no gradient reaches them.
    Collectives stay as well: every process has to run them in the same order.
    """
    waits: set[fx.Node] = {n for n in graph.nodes if n.op == "placeholder" and "tangents" in str(n.target)}
    nodes = [n for n in graph.nodes if n.op not in ("placeholder", "output")]
    for node in nodes:
        if any(n in waits for n in node.all_input_nodes):
            waits.add(node)
    forward |= _ancestors(n for n in nodes if n.is_impure() and n not in waits and n not in needed)
    first = [n for n in nodes if n in forward]
    rest = [n for n in nodes if n not in forward and (n in needed or n.is_impure())]
    done: set[fx.Node] = set()
    late: list[fx.Node] = []
    members = set(rest)
    for node in rest:
        # a clone's draws are replayed
        stays = is_collective(node.target) or (node.is_impure() and clone_of(node) is None)
        if node not in waits and not stays:
            continue
        stack = [node]
        while stack:  # its inputs that wait for no gradient, deepest first
            top = stack[-1]
            todo = [n for n in top.all_input_nodes if n in members and n not in done]
            if top in done:
                stack.pop()
            elif todo:
                stack.extend(reversed(todo))
            else:
                done.add(top)
                late.append(top)
                stack.pop()
    # gradients that wait for no gradient at all (constants) come last
    late.extend(n for n in rest if n not in done)
    return first + late


def normalise(joint: fx.GraphModule) -> None:
    """Drop what a training-mode BatchNorm's backward reads but does not use: the running statistics; split dropouts.

    They are the *updated* buffers: read, they would hold copies of them until the backward pass.
    """
    split_dropouts(joint.graph)
    for node in joint.graph.nodes:
        at = _BATCH_NORM_BACKWARD.get(node.target) if node.op == "call_function" else None
        if at is not None and node.args[at] is True:
            node.args = (*node.args[:3], None, None, *node.args[5:])
    joint.graph.eliminate_dead_code()


def fingerprint(graph: fx.Graph) -> str:
    """A digest of a graph's structure: equal for two captures of the same step, whatever nodes and symbols are called.

    Sizes that are symbols are told apart by where they first appear; so are groups of processes, whose names are not
    the same in every process. Nor is the part that a process takes of what is split, which counts for nothing.
    """
    number = {node: i for i, node in enumerate(graph.nodes)}
    symbols: dict[str, str] = {}
    groups: dict[str, str] = {}
    digest = hashlib.sha256()
    for node in graph.nodes:
        target = "" if node.op in ("placeholder", "get_attr") else getattr(node.target, "__name__", str(node.target))
        args = _numbered(node, number, groups)
        value = node.meta.get(SYMBOLIC)
        shapes = [
            (tuple(t.shape), t.stride(), str(t.dtype), t.device.type, t.requires_grad) for t in tensors(node, value)
        ]
        sizes = value if is_size(node) else None
        text = repr((node.op, target, args, shapes, sizes))
        digest.update(re.sub(r"\bs\d+\b", lambda s: symbols.setdefault(s[0], f"s{len(symbols)}"), text).encode())
    return digest.hexdigest()


def _numbered(node: fx.Node, number: Mapping[fx.Node, int], groups: dict[str, str]) -> Any:
    """A node's arguments with numbers for nodes and for the group of processes that it is a collective of.

    Devices are by their type: each process has one of its own.
    """
    group = group_of(node)

    def plain(x: Any) -> Any:
        if isinstance(x, fx.Node):
            return number[x]
        if isinstance(x, torch.device):
            return x.type
        return groups.setdefault(x, f"group {len(groups)}") if x == group else x

    split = node.target is operator.getitem and getattr(node.args[0], "target", None) in _SPLITS
    return pytree.tree_map_only(
        (fx.Node, str, torch.device), plain, (node.args[:1] if split else node.args, node.kwargs)
    )


_ATEN = torch.ops.aten
_SPLITS = {_ATEN.split.Tensor, _ATEN.split_with_sizes.default, _ATEN.chunk.default, _ATEN.unbind.int}
# op -> position of its `train` / `update` flag; running statistics are arguments 3 and 4 of both
_BATCH_NORM_BACKWARD = {
    _ATEN.native_batch_norm_backward.default: 7,
    _ATEN.batch_norm_backward.default: 7,
}
