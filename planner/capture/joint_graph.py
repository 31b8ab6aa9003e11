"""Joint graphs as AOTAutograd traces them: the fake tensors of their nodes, their inputs and outputs."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from planner.compat import pytree
from planner.compat.fake import FakeTensor
from planner.compat.ops import FUNCTIONAL, OpOverload, schema_of
from planner.compat.tensors import dense_parts
from planner.core.pieces import run_in_pieces


@dataclass(frozen=True)
class Signature:
    """The inputs and outputs of a joint graph.

    Attributes:
        primals: placeholders of the forward pass's inputs.
        tangents: placeholders of the gradients that come in.
        fwd_outputs: results of the forward pass, nodes or constants.
        grads: results of the backward pass.
        output_descs: AOTAutograd's description of each output; None where it has none.
        mutated: primals that the step writes into (BatchNorm statistics).
    """

    primals: tuple[fx.Node, ...]
    tangents: tuple[fx.Node, ...]
    fwd_outputs: tuple[Any, ...]
    grads: tuple[Any, ...]
    output_descs: tuple[Any, ...]
    mutated: frozenset[fx.Node]

    @property
    def returned(self) -> tuple[Any, ...]:
        """The forward outputs that the caller goes on holding: the new contents of buffers are not among them."""
        pairs = zip(self.fwd_outputs, self.output_descs, strict=False)
        return tuple(n for n, d in pairs if not is_mutation(d))


def signature_of(graph: fx.Graph, num_fwd_outputs: int) -> Signature:
    """Read the inputs and outputs of a joint graph, of which the forward pass returns the first outputs."""
    output = graph.output_node()
    placeholders = graph.find_nodes(op="placeholder")
    tangents = tuple(filter(is_tangent, placeholders))
    primals = tuple(n for n in placeholders if not is_tangent(n))
    flat: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    descs = output.meta.get("desc") or [None] * len(flat)
    mutated = _mutated(primals, [d for d in descs[:num_fwd_outputs] if is_mutation(d)])
    return Signature(
        primals, tangents, tuple(flat[:num_fwd_outputs]), tuple(flat[num_fwd_outputs:]), tuple(descs), mutated
    )


def is_tangent(node: fx.Node) -> bool:
    """Whether a node is a placeholder of a gradient that comes in."""
    return node.op == "placeholder" and "tangents" in str(node.target)


def index_of(desc: Any) -> int | None:
    """The position in AOTAutograd's description of a plain input or output; None for another one."""
    return desc.idx if type(desc).__name__ in ("PlainAOTInput", "PlainAOTOutput") else None


def _mutated(primals: tuple[fx.Node, ...], descs: list[Any]) -> frozenset[fx.Node]:
    """The inputs that are overwritten; all of them where a description does not say which."""
    named = {d.mutated_input for d in descs}
    mutated = frozenset(n for n in primals if n.meta.get("desc") in named)
    return mutated if len(mutated) == len(named) else frozenset(primals)


def is_mutation(desc: Any) -> bool:
    """Whether AOTAutograd's description is that of an input as the graph leaves it, which has written into it."""
    return type(desc).__name__ == "InputMutationAOTOutput"


def nodes_in(outputs: Iterable[Any]) -> Iterator[fx.Node]:
    """The nodes among the outputs of a graph, without its constants."""
    return (n for n in outputs if isinstance(n, fx.Node))


def tensors(node: fx.Node, value: Any = None) -> Iterator[torch.Tensor]:
    """The fake tensors that a node returns, or those in another value of the node."""
    if value is None:
        value = node.meta.get("val", node.meta.get("example_value"))  # AOTAutograd's name for it, Dynamo's
    outer = (t for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor))
    return (t for each in outer for t in dense_parts(each))


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """The shape of the first tensor that a node returns."""
    return tuple(next(tensors(node)).shape)


def map_nodes(arguments: Any, of: Callable[[fx.Node], Any]) -> Any:
    """Arguments of a node with every node in them replaced by `of(node)`."""
    return fx.node.map_arg(arguments, of)


def fake_result(node: fx.Node) -> Any:
    """The fake result of a node for its present inputs: new storages, or views of theirs."""
    target: Any = node.target
    args, kwargs = map_nodes((node.args, node.kwargs), lambda n: n.meta["val"])
    fakes = (t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, FakeTensor))
    mode = next((t.fake_mode for t in fakes), None)  # another one may be on, where sizes are symbols
    with mode or nullcontext():
        return target(*args, **kwargs)


def ancestors(roots: Iterable[fx.Node]) -> set[fx.Node]:
    """Some nodes and all that they are computed from. O(nodes + edges) time."""
    seen: set[fx.Node] = set()
    stack = list(roots)
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            stack.extend(node.all_input_nodes)
    return seen


def may_write(node: fx.Node) -> bool:
    """Whether a node's operator writes into its inputs; so may a call of something that is no operator of torch."""
    if node.op != "call_function" or node.target is operator.getitem or node.target in (*FUNCTIONAL, run_in_pieces):
        return False
    return not isinstance(node.target, OpOverload) or schema_of(node.target).is_mutable
