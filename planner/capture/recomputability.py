"""Which ops may run twice, and which state a second run has to replay."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from planner.capture.joint_graph import tensors
from planner.compat.ops import FUNCTIONAL, OpOverload, is_functional, name_of, schema_of
from planner.core.pieces import run_in_pieces

_ATEN = torch.ops.aten

# Training-mode normalisations that also update running statistics. Their other outputs do not depend on the old
# statistics, so they can run again on scratch ones: op -> positions of the running statistics in its arguments.
RUNNING_STATISTICS: dict[object, tuple[int, int]] = {
    _ATEN._native_batch_norm_legit_functional.default: (3, 4),
    _ATEN._batch_norm_with_update_functional.default: (3, 4),
}

OWN = ("aten", "prims", "planner")  # namespaces of ops of torch and ours, of which it is said what they do
_COLLECTIVES = ("_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "c10d")

# These choose among equal values, on some devices differently in each run: a second run could route data elsewhere.
# Other ops that return indices (argmax, cummax, max_pool, searchsorted) take the first of equals.
_ROUTING = {
    _ATEN.topk.default,
    _ATEN.sort.default,
    _ATEN.sort.stable,
    _ATEN.nonzero.default,
    _ATEN.multinomial.default,
    _ATEN.kthvalue.default,
    _ATEN.median.dim,
    _ATEN.nanmedian.dim,
    _ATEN.mode.default,
}

# These add on a GPU in the order in which threads come (`torch.use_deterministic_algorithms` lists them).
_UNORDERED_SUMS = {
    _ATEN.index_add.default,
    _ATEN.index_put.default,
    _ATEN.scatter_add.default,
    _ATEN.scatter_reduce.two,
    _ATEN.index_reduce.default,
    _ATEN.put.default,
    _ATEN._unsafe_index_put.default,
    _ATEN.scatter.src,
    _ATEN.scatter.reduce,
    _ATEN.cumsum.default,
}


def keep_reason(node: fx.Node, tainted: Collection[fx.Node]) -> str:
    """Why a node's results must be kept; empty where running it again is safe.

    Args:
        node: a `call_function` node of a joint graph.
        tainted: nodes that hold an input which the step overwrites.
    """
    target = node.target
    overwritten = "it reads a buffer or an input that the step overwrites"
    if target is run_in_pieces:
        return overwritten if any(n in tainted for n in node.all_input_nodes) else ""
    if not isinstance(target, OpOverload):
        return _opaque_reason(node)
    name = schema_of(target).name.split("::")[1]
    if draws_apart(node.args, node.kwargs):
        return f"{name} draws from a torch.Generator of the model's own, whose state a second run would not find"
    if is_collective(target):
        return f"{name} is a collective, which all processes would have to run again together"
    if schema_of(target).is_mutable:
        return f"{name} writes into what it reads"
    if target.namespace not in OWN and not is_functional(target):
        return f"{schema_of(target).name} is a custom op that may do more than make new results: its schema says so"
    if target in _ROUTING:
        return f"{name} chooses among equal values, and may choose otherwise in a second run"
    if crosses_the_link(node):
        return f"{name} copies between the host and a GPU, which a second run would wait for again"
    if target in _UNORDERED_SUMS and any(t.is_cuda and t.is_floating_point() for t in tensors(node)):
        return f"{name} adds in no fixed order on a GPU, and may round otherwise in a second run"
    statistics = RUNNING_STATISTICS.get(target)
    inputs = node.all_input_nodes
    if statistics is not None:
        inputs = [n for i, n in enumerate(node.args) if i not in statistics and isinstance(n, fx.Node)]
    if any(n in tainted for n in inputs):
        return overwritten
    return ""


def statistics_of(node: fx.Node) -> list[fx.Node]:
    """The running statistics that the first run of an op reads, and later runs do not."""
    return [n for at in RUNNING_STATISTICS.get(node.target, ()) if isinstance(n := node.args[at], fx.Node)]


def crosses_the_link(node: fx.Node) -> bool:
    """Whether a node reads tensors of one kind of device only, and makes tensors on another."""
    read = {t.device.type for n in node.all_input_nodes for t in tensors(n)}
    made = {t.device.type for t in tensors(node)}
    return bool(read and made) and not read & made


def _opaque_reason(node: fx.Node) -> str:
    """Why the results of what is no `OpOverload` must be kept; empty for a kernel or graph that only makes them."""
    if node.target not in FUNCTIONAL:
        return f"{name_of(node.target)} is opaque: nothing says that a second run would give the same"
    called = [n for graph in _subgraphs(node) for n in graph.nodes if n.op == "call_function"]
    inner = [n for n in called if n.target is not operator.getitem]
    unsafe = next((n for n in inner if is_replayed(n) or keep_reason(n, ())), None)
    return f"{name_of(node.target)} runs {name_of(unsafe.target)}, which it must not run twice" if unsafe else ""


def _subgraphs(node: fx.Node) -> Iterator[fx.Graph]:
    """The graphs among the arguments of a higher-order operator."""
    for given in node.all_input_nodes:
        inner = getattr(node.graph.owning_module, str(given.target), None) if given.op == "get_attr" else None
        if isinstance(inner, fx.GraphModule):
            yield inner.graph


def is_collective(op: object) -> bool:
    """Whether an op sends to other processes, or waits for them."""
    if not isinstance(op, OpOverload):
        return False
    return op.namespace in _COLLECTIVES or any(a.name == "group_name" for a in schema_of(op).arguments)


def group_of(node: fx.Node) -> str | None:
    """The name of the group of processes that a node is a collective of; None for other nodes."""
    if not isinstance(node.target, OpOverload) or not is_collective(node.target):
        return None
    given = dict(zip((a.name for a in schema_of(node.target).arguments), node.args, strict=False)) | dict(node.kwargs)
    group = given.get("group_name")
    return group if isinstance(group, str) else None


def waited_for(node: fx.Node) -> fx.Node | None:
    """The result of a collective for which a node waits, and which it then returns itself; None for other nodes."""
    target, source = node.target, next(iter(node.args), None)
    waits = isinstance(target, OpOverload) and target.namespace in _COLLECTIVES and "wait" in target.__name__
    return source if waits and isinstance(source, fx.Node) else None


def sent_for(result: fx.Node) -> list[fx.Node]:
    """The nodes that a collective of this result sends."""
    sender: Any = result.args[0] if result.target is operator.getitem else result
    return list(sender.all_input_nodes)


def is_random(node: fx.Node) -> bool:
    """Whether a node draws from the device's random number generator."""
    target = node.target
    return isinstance(target, OpOverload) and draws(target, node.args, node.kwargs)


def is_replayed(node: fx.Node) -> bool:
    """Whether a second run of a node has to find the state of the generator that the first one found."""
    return isinstance(node.target, OpOverload) and may_draw(node.target, node.args, node.kwargs)


def may_draw(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """As `draws()`; and whether an op that is not torch's own, whose tags may be missing, could draw."""
    return draws(op, args, kwargs, tagged=op.namespace in (*OWN, *_COLLECTIVES))


def draws(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], *, tagged: bool = True) -> bool:
    """Whether a call of an op draws from the device's random number generator.

    Args:
        op: an op.
        args: what it is given.
        kwargs: the same, by name.
        tagged: whether only ops that are tagged as random can draw.
    """
    if tagged and torch.Tag.nondeterministic_seeded not in op.tags:
        return False
    # attention is tagged random for its dropout; without dropout it draws nothing
    names = [a.name for a in schema_of(op).arguments]
    if "dropout_p" not in names:
        return True
    at = names.index("dropout_p")
    return bool(kwargs.get("dropout_p", args[at] if at < len(args) else 0.0) != 0.0)


def draws_apart(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of an op is given a generator, and so does not draw from the device's."""
    return any(isinstance(x, torch.Generator) for x in (*args, *kwargs.values()))


def replay_bytes(node: fx.Node) -> tuple[int, int]:
    """Bytes that running a node again takes: kept from its first run, and only while it runs.

    A node that may draw needs the generator's state, and saves the present one; a normalisation needs scratch
    statistics.
    """
    state = 0
    if is_replayed(node):
        leaves = [t for n in (node, *node.all_input_nodes) for t in tensors(n)]
        # that of an accelerator is small, and on the host
        state = 0 if any(t.device.type != "cpu" for t in leaves) else torch.get_rng_state().nbytes
    scratch = sum(t.nbytes for n in statistics_of(node) for t in tensors(n))
    return state, state + scratch
