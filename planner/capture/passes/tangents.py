"""The gradients that enter a backward pass: what it is without some of them, and where they become whole.

Without some, the graph goes as autograd does without undefined gradients. A gradient that is computed from such
gradients alone is none, and is not computed. A sum takes the other summand, bit for bit what autograd's buffers do. Any
other op that reads such a gradient beside one that is there, as the backward pass of `split`, is given zeros: a zero
that had come all the way through the graph would be NaN beside an infinity.

An output that another output is computed from has a gradient from outside, which enters, and one from the graph. Where
both are added up, a view in the graph is marked as the whole gradient of that output: its hooks are to see that.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.fx import traceback

from planner.capture.joint_graph import ancestors, index_of, is_tangent
from planner.errors import ApplyError

_ATEN = torch.ops.aten
_WHOLE = "planner_whole_gradient"  # in a node's `meta`: the position of the output
_MARKED = "planner_marked"  # the same, and the node's name and target, while the marks are off the graph


def mark_whole(graph: fx.GraphModule) -> None:
    """Have a Dynamo graph of several differentiable outputs mark their whole gradients where it is traced, in place."""
    output = graph.graph.output_node()
    results: tuple[Any, ...] = output.args[0]  # type: ignore[assignment]
    found = [(at, n) for at, n in enumerate(results) if isinstance(n, fx.Node)]
    examples = [(at, n, n.meta.get("example_value")) for at, n in found]
    marked = [(at, n) for at, n, t in examples if isinstance(t, torch.Tensor) and t.requires_grad]
    if len(marked) > 1:
        with graph.graph.inserting_before(output):
            for at, node in marked:
                graph.graph.call_function(_mark, (node, at))
        graph.recompile()


def _mark(output: torch.Tensor, at: int) -> None:
    if output.requires_grad:
        output.register_hook(partial(_whole, at))  # type: ignore[no-untyped-call]


def _whole(at: int, gradient: torch.Tensor) -> torch.Tensor:
    with traceback.annotate({_WHOLE: at}):
        whole: torch.Tensor = _ATEN.alias.default(gradient)
    return whole


def take_marks_off(graph: fx.Graph) -> None:
    """Write the marks of a joint graph on what they mark, in place, before passes that remove aliases.

    `read_marks` puts them back. A gradient of two outputs at once is not marked: a mark would be that of either.
    """
    for node in graph.nodes:
        at = (node.meta.get("custom") or {}).get(_WHOLE)
        if at is not None and node.target is _ATEN.alias.default and len(node.args[0].users) == 1:
            gradient = node.args[0]
            gradient.meta[_MARKED] = at, gradient.name, gradient.target


def _put_marks_on(graph: fx.Graph) -> None:
    for node in list(graph.nodes):
        at, *marked = node.meta.pop(_MARKED, (None,))
        if marked == [node.name, node.target]:  # others may have been given its `meta`
            with graph.inserting_after(node):
                mark = graph.call_function(_ATEN.alias.default)
            node.replace_all_uses_with(mark)
            mark.args = (node,)
            mark.meta.update(val=node.meta["val"], custom={_WHOLE: at})


def read_marks(graph: fx.Graph) -> None:
    """Write the marks of a joint graph where rewrites keep them; drop those of gradients from outside alone."""
    _put_marks_on(graph)
    for node in list(graph.nodes):
        at = (node.meta.get("custom") or {}).get(_WHOLE)
        if at is not None and node.target is _ATEN.alias.default:
            if is_tangent(node.args[0]):
                node.replace_all_uses_with(node.args[0])
                graph.erase_node(node)
            else:
                node.meta[_WHOLE] = at


def is_mark(node: fx.Node) -> bool:
    """Whether a node marks the whole gradient of an output: all that is computed from it reads the node itself."""
    return _WHOLE in node.meta


def whole_gradients(graph: fx.Graph) -> Mapping[int, list[fx.Node]]:
    """The nodes that are the whole gradient of an output, by its position, where the graph adds to it."""
    found = defaultdict(list)
    for node in graph.nodes:
        if is_mark(node):
            found[node.meta[_WHOLE]].append(node)
    return found


def entering(graph: fx.Graph) -> dict[int, fx.Node]:
    """The placeholders of gradients that enter a graph, by the position of the output that they are of."""
    named = {index_of(getattr(n.meta.get("desc"), "output", None)): n for n in filter(is_tangent, graph.nodes)}
    return {at: n for at, n in named.items() if at is not None}


def feeds(graph: fx.Graph) -> dict[int, frozenset[int]]:
    """For each output whose gradient the graph adds to, the outputs whose gradients it is computed from."""
    position = {n: at for at, n in entering(graph).items()}
    return {
        at: frozenset(position[n] for n in ancestors(nodes) if n in position) - {at}
        for at, nodes in whole_gradients(graph).items()
    }


def take_whole(graph: fx.Graph, at: int) -> None:
    """What enters as the gradient of an output is its whole gradient, in place."""
    tangent = entering(graph)[at]
    for node in whole_gradients(graph)[at]:
        node.replace_all_uses_with(tangent)


def sums_from(node: fx.Node) -> Iterator[int]:
    """The arguments of the sums that a gradient which enters goes through, the first of them first."""
    while len(node.users) == 1 and _is_sum(user := next(iter(node.users))):
        yield user.args.index(node)
        node = user


def add_entering(graph: fx.Graph, at: int, sums: Sequence[int]) -> None:
    """Let a gradient enter that was left out, in place, where the graph adds to it.

    As autograd does, which adds the others to it one by one: sums are rounded alike.

    Args:
        graph: in which it is left out.
        at: the position of the output.
        sums: as by `sums_from`, of the gradient in the graph with all that enters.
    """
    tangent = entering(graph)[at]
    for whole in whole_gradients(graph)[at]:
        user, argument = _first_sum(whole, sums[:0:-1]) or (whole, 0)
        before: Any = user.args[argument]
        with graph.inserting_before(user):
            total = graph.call_function(_ATEN.add.Tensor, (tangent, before))
        total.meta["val"] = before.meta["val"]
        user.update_arg(argument, total)


def _first_sum(node: fx.Node, arguments: Sequence[int]) -> tuple[fx.Node, int] | None:
    """The node and the argument that one comes to from the first of a node by these of the sums; None for no sum."""
    place = node, 0
    for argument in arguments:
        found = place[0].args[place[1]]
        if not (isinstance(found, fx.Node) and _is_sum(found) and len(found.users) == 1):
            return None
        place = found, argument
    return place


def leave_out(graph: fx.Graph, undefined: Collection[fx.Node]) -> set[fx.Node]:
    """Take gradients that do not enter a graph, which is a joint graph or a backward pass, out of it, in place.

    The placeholders stay. Outputs that are computed from those gradients alone become None.

    Args:
        graph: the graph.
        undefined: placeholders of gradients.

    Returns:
        The nodes that read a summand in the place of a sum: it may be laid out otherwise.

    Raises:
        ApplyError: zeros are needed whose size, a symbol, no tensor has that is there.
    """
    gone = set(undefined)
    other = set[fx.Node]()
    gradients = set(filter(is_tangent, graph.nodes))
    for node in list(graph.nodes):
        inputs = node.all_input_nodes
        if node.op == "output":
            node.args = fx.node.map_arg(node.args, lambda n: None if n in gone else n)
        elif not gradients.isdisjoint(inputs):
            gradients.add(node)
            there = [n for n in inputs if n in gradients and n not in gone]
            if not there:
                gone.add(node)
            elif not gone.isdisjoint(inputs):
                if _is_sum(node):
                    other.update(node.replace_all_uses_with(there[0]))
                else:
                    for n in filter(gone.__contains__, inputs):
                        node.replace_input_with(n, _zeros(graph, n, node, gone))
    _drop_unused(graph, gone)
    return other.intersection(graph.nodes)


def _is_sum(node: fx.Node) -> bool:
    """Whether a node is autograd's sum of two gradients of one tensor."""
    if node.target is not _ATEN.add.Tensor or node.kwargs or len(node.args) != 2:
        return False
    values = [n.meta.get("val") for n in node.args if isinstance(n, fx.Node)]
    kinds = [(v.shape, v.dtype) for v in values if isinstance(v, torch.Tensor)]
    return len(kinds) == 2 and kinds[0] == kinds[1]


def _zeros(graph: fx.Graph, like: fx.Node, before: fx.Node, gone: Collection[fx.Node]) -> fx.Node:
    value = like.meta["val"]
    with graph.inserting_before(before):
        shape = [_size(graph, n, before, gone) if isinstance(n, torch.SymInt) else n for n in value.shape]
        zeros = graph.call_function(_ATEN.zeros.default, (shape,), {"dtype": value.dtype, "device": value.device})
    zeros.meta["val"] = value
    return zeros


def _size(graph: fx.Graph, size: torch.SymInt, before: fx.Node, gone: Collection[fx.Node]) -> fx.Node:
    """A node for a size that is a symbol, read off an earlier tensor."""
    for node in graph.nodes:
        value = node.meta.get("val")
        if node is before:
            break
        if isinstance(value, torch.SymInt) and str(value) == str(size):
            return node  # type: ignore[no-any-return]
        shape = list(map(str, value.shape)) if isinstance(value, torch.Tensor) and node not in gone else []
        if str(size) in shape:
            found: fx.Node = graph.call_function(_ATEN.sym_size.int, (node, shape.index(str(size))))
            found.meta["val"] = size
            return found
    raise ApplyError(
        f"a backward pass in which only some of the model's outputs get a gradient needs zeros of size {size}, which "
        "none of its tensors has. Plan without dynamic=, or give every output that the model returns a gradient"
    )


def _drop_unused(graph: fx.Graph, gone: Collection[fx.Node]) -> None:
    for node in reversed(list(graph.nodes)):
        if node.op in ("placeholder", "output") or node.users:
            continue
        if node in gone or not node.is_impure():
            graph.erase_node(node)
