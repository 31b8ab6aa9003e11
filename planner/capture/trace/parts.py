"""A backward graph in parts: gradients go out to autograd after each part, and no longer all at the end.

DistributedDataParallel adds up the gradients of all processes bucket by bucket, each once its gradients are there,
while the backward pass goes on (`torch/csrc/distributed/c10d/reducer.cpp`). A compiled graph is one node of autograd's
graph. Here a chain of nodes stands between it and its inputs, one for each part after the first: the compiled graph's
node runs the first part, and each of the others runs its own when autograd comes to it, which is after the gradients
that are out have been accumulated (autograd runs such nodes first, of all that are ready). Where a backward pass has to
run whole, it does so in the compiled graph's node, and the others hand its gradients on.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import fx

from planner.capture.joint_graph import index_of
from planner.capture.trace.out_of_sight import out_of_sight
from planner.compat.autograd import autocast_off, compiled_node, graph_is_kept, runs_in_this_pass
from planner.compat.fx import boxed
from planner.compat.tensors import is_traceable_wrapper_subclass
from planner.core.call import storages

Boxed = Callable[[list[Any]], Any]
HANDING = "planned_handing"  # on autograd's node of a compiled graph: its call, whose gradients go out in parts
PART = "planned_part"  # on the node of a part after the first: its number


@dataclass(frozen=True, eq=False)
class Parts:
    """A backward graph in parts, of which each takes what the one before has left for it.

    Attributes:
        run: what each part calls: what is left -> its gradients, and what is left for the next one.
        gradients: for each part, the positions of its gradients among the results of the whole graph.
        inputs: for each part, the positions of the tensors that these are the gradients of, among the inputs of the
            compiled graph.
        results: how many results the whole graph has.
    """

    run: tuple[Boxed, ...]
    gradients: tuple[tuple[int, ...], ...]
    inputs: tuple[tuple[int, ...], ...]
    results: int


def in_parts(graph: fx.GraphModule, forward: fx.GraphModule, sizes: Sequence[int]) -> Parts | None:
    """Cut a backward graph where enough gradients are made; None where there is nothing to cut. O(nodes + edges).

    A gradient goes out once nothing touches its storage any more, nor that of the parameter: autograd and hooks may
    write into the one, and a hook may step the other.

    Args:
        graph: the backward graph; it is not changed.
        forward: the forward graph.
        sizes: bytes of gradients of the first part, of the second, ...; the last of them for all that follow.
    """
    nodes = [n for n in graph.graph.nodes if n.op != "output"]
    output = graph.graph.output_node()
    results: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    descs = output.meta.get("desc") or [None] * len(results)
    inputs = {index_of(n.meta.get("desc")): n.meta.get("val") for n in forward.graph.find_nodes(op="placeholder")}
    of = {k: index_of(getattr(d, "grad_of", None)) for k, d in enumerate(descs) if isinstance(results[k], fx.Node)}
    if any(at is None or not _is_plain(inputs.get(at)) or not _is_plain(_val(results[k])) for k, at in of.items()):
        return None
    ready = _ready(nodes, {k: (_val(results[k]), inputs[at]) for k, at in of.items()})
    cuts = _cuts(nodes, results, ready, sizes)
    if not cuts:
        return None
    begins = [-1, *cuts, len(nodes)]
    gradients = tuple(tuple(k for k in ready if a < ready[k] <= b) for a, b in pairwise(begins))
    given = tuple(tuple(at for k in part if (at := of[k]) is not None) for part in gradients)
    return Parts(tuple(_written(graph, nodes, cuts, gradients)), gradients, given, len(results))


def _val(node: fx.Node) -> Any:
    return node.meta.get("val")


def _is_plain(t: Any) -> bool:
    return isinstance(t, torch.Tensor) and not is_traceable_wrapper_subclass(t)


def _ready(nodes: Sequence[fx.Node], gradients: Mapping[int, Any]) -> dict[int, int]:
    """For each gradient, the place of the last node that touches it, or what it is the gradient of; earliest first.

    Gradients that an input of the graph holds are ready at the end.

    Args:
        nodes: of the backward graph.
        gradients: each with what it is the gradient of, by its position among the results.
    """
    last: dict[int, int] = {}
    for at, node in enumerate(nodes):
        for each in () if node.op == "placeholder" else (node, *node.all_input_nodes):
            last.update(dict.fromkeys(storages(_val(each)), at))
    held = {s for node in nodes if node.op != "call_function" for s in storages(_val(node))}
    places = {}
    for k, (gradient, of) in gradients.items():
        own = storages(gradient)
        touched = max(last.get(s, -1) for s in (*own, *storages(of)))
        places[k] = touched if held.isdisjoint(own) else len(nodes)
    return dict(sorted(places.items(), key=lambda item: item[1]))


def _cuts(
    nodes: Sequence[fx.Node], results: Sequence[Any], ready: Mapping[int, int], sizes: Sequence[int]
) -> list[int]:
    """The places of the last nodes of all parts but the last one; at each of them gradients are ready."""
    cuts: list[int] = []
    made = 0
    for k, at in ready.items():
        if cuts and at <= cuts[-1]:
            continue  # it is ready as early
        made += _val(results[k]).nbytes
        if made >= sizes[min(len(cuts), len(sizes) - 1)] and at < len(nodes):
            cuts.append(_with_outputs(nodes, at))
            made = 0
    while cuts and max(ready.values()) <= cuts[-1]:
        cuts.pop()
    return cuts


def _with_outputs(nodes: Sequence[fx.Node], at: int) -> int:
    """The place of a node, or of the last of its outputs: a tuple would hold them all."""
    while at + 1 < len(nodes) and nodes[at + 1].target is operator.getitem:
        at += 1
    return at


def _written(
    graph: fx.GraphModule, nodes: Sequence[fx.Node], cuts: Sequence[int], gradients: Sequence[Sequence[int]]
) -> Iterator[Boxed]:
    """The parts of a graph."""
    results: list[Any] = list(graph.graph.output_node().args[0])  # type: ignore[arg-type]
    begins = [0, *(cut + 1 for cut in cuts), len(nodes)]
    place = {node: at for at, node in enumerate(nodes)}
    last = {node: max((place.get(user, -1) for user in node.users), default=-1) for node in nodes}
    for begin, positions in zip(begins, gradients, strict=False):
        last.update({results[k]: max(last[results[k]], begin) for k in positions})
    left = graph.graph.find_nodes(op="placeholder")
    for begin, end, positions in zip(begins, begins[1:], gradients, strict=False):
        written, now = fx.Graph(), dict[fx.Node, fx.Node]()
        for node in left:
            now[node] = new = written.placeholder(node.name)
            new.target, new.meta = new.name, dict(node.meta)
        own = [n for n in nodes[begin:end] if n.op != "placeholder"]
        for node in own:
            now[node] = written.node_copy(node, now.__getitem__)
        left = [n for n in (*left, *own) if last[n] >= end]
        written.output(tuple(now[n] for n in (*(results[k] for k in positions), *left)))
        yield boxed(fx.GraphModule(graph, written))


class Handing:
    """One call of a compiled graph whose gradients go out part by part.

    The nodes of the parts hold it, so that it holds no tensor but what is left for the next part.

    Args:
        parts: of its backward graph.
    """

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self._left: list[Any] | None = None  # for the next part, in a backward pass that runs in parts
        self._nodes: list[weakref.ref[Any]] = []  # of the parts after the first, the last one first

    def entered(self, inputs: Sequence[Any]) -> list[Any]:
        """The inputs of the compiled graph, of which those of parts after the first come out of nodes of these."""
        given = list(inputs)
        token = None
        for part in range(len(self.parts.run) - 1, 0, -1):
            at = self.parts.inputs[part]
            token, *own = _Part.apply(self, part, token, *(inputs[i] for i in at))  # type: ignore[no-untyped-call]
            self._nodes.append(weakref.ref(token.grad_fn))
            for i, t in zip(at, own, strict=True):
                given[i] = t
        return given

    def belongs_to(self, results: Iterable[Any]) -> None:
        """Have the backward pass of the results run in parts, if their node gives its gradients to those of parts."""
        node = next((found for t in results if (found := compiled_node(t)) is not None), None)
        if node is None:
            return
        following = list(node.next_functions)
        for part, ref in enumerate(reversed(self._nodes), 1):
            of = ref()
            for number, k in enumerate(self.parts.gradients[part], 1):
                if k >= len(following) or following[k][0] is not of or following[k][1] != number:
                    return
        setattr(node, HANDING, self)

    def begin(self, arguments: list[Any]) -> list[Any] | None:
        """Run the first part; None, with nothing done, where the whole graph has to run at once.

        Args:
            arguments: of the backward graph; the list is emptied.
        """
        self._left = None
        last = self._nodes[0]()
        if graph_is_kept() or last is None or not runs_in_this_pass(last):
            return None
        results: list[Any] = [None] * self.parts.results
        for k, gradient in zip(self.parts.gradients[0], self._run(0, arguments), strict=True):
            results[k] = gradient
        return results

    def go_on(self, part: int) -> list[Any]:
        """The gradients of a part after the first; of none, where the whole graph has run."""
        if self._left is None:
            return [None] * len(self.parts.gradients[part])
        left, self._left = self._left, None
        with autocast_off():
            gradients: list[Any] = out_of_sight(lambda arguments: self._run(part, arguments))(left)
        return gradients

    def _run(self, part: int, arguments: list[Any]) -> list[Any]:
        results = self.parts.run[part](arguments)
        count = len(self.parts.gradients[part])
        if part + 1 < len(self.parts.run):
            self._left = list(results[count:])
        return list(results[:count])


class _Part(torch.autograd.Function):
    """The node of a part: its inputs as they are, with what comes after the next one in the backward pass."""

    @staticmethod
    def forward(ctx: Any, handing: Handing, part: int, after: torch.Tensor | None, *given: torch.Tensor) -> Any:
        ctx.handing = handing
        setattr(ctx, PART, part)
        ctx.set_materialize_grads(False)
        return torch.empty(0), *(t.detach() for t in given)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        _, *coming = gradients
        own = ctx.handing.go_on(getattr(ctx, PART))
        sums = [b if a is None else a if b is None else a + b for a, b in zip(own, coming, strict=True)]
        return None, None, None, *sums
