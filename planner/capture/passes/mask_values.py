"""What a mask of attention says, where that depends on no input of a Dynamo graph but ones: it is computed here, once.

A mask whose memory an op may write into is not known: only ops that are known to read it may be given any of it.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from math import prod
from typing import Any, Literal

import torch
from torch import fx
from torch.nn import functional

from planner.capture.joint_graph import ancestors, shape_of, tensors
from planner.compat.ops import OpOverload
from planner.compat.tensors import no_dispatch, storage_key

MOST_ELEMENTS = 2**34  # of a mask that is computed: 131,072 by 131,072 tokens
AT_ONCE = 2**24  # elements that are computed at a time
_ALL = slice(None)
_OPERATOR = operator.add.__module__
_CPU = torch.device("cpu")
_CHECKPOINT = torch.ops.higher_order.tag_activation_checkpoint
# functions of torch and `operator`, and methods of tensors, that write into nothing and are what their arguments say;
# autocast, which is not known here, does not change what they compute, but for numbers that are not whole
_BY_ELEMENT = {"add", "and_", "bitwise_and", "bitwise_not", "bitwise_or", "bool", "eq", "ge", "gt", "invert", "le"}
_BY_ELEMENT |= {"logical_and", "logical_not", "logical_or", "lt", "mul", "ne", "neg", "or_", "sub", "to"}
_BY_ELEMENT |= {"where", "xor"}
_OF_WHOLE_NUMBERS = {"cumsum", "diff"}
_VIEWS = {"contiguous", "expand", "getitem", "permute", "reshape", "squeeze", "transpose", "unsqueeze", "view"}
_MADE = {"arange", "full", "full_like", "new_full", "new_ones", "new_zeros", "ones", "ones_like", "tensor", "zeros"}
_PURE = _BY_ELEMENT | _OF_WHOLE_NUMBERS | _VIEWS | _MADE | {"clone", "float", "int", "long", "masked_fill", "repeat"}
_PURE |= {"tril", "triu", "zeros_like"}
_DUNDERS = {f"__{n}__": n for n in ("add", "eq", "ge", "gt", "invert", "le", "lt", "mul", "ne", "neg", "sub", "xor")}
_DUNDERS |= {"__and__": "and_", "__or__": "or_"}  # as torch 2.11 writes operators
Said = Literal["causal", "nothing", "more"]
_Part = Callable[[int | None, slice], Any]  # of the batch (None for all), rows -> a value, or that part of it


def said_by(mask: fx.Node, ones: Collection[fx.Node] = ()) -> Said:
    """What a mask lets through: what is before and at each query, everything, or something else or not known.

    Args:
        mask: a node of a Dynamo graph.
        ones: inputs of the graph that hold ones only.
    """
    makers = ancestors([mask])
    try:
        if not all(n in ones or _is_pure(n) for n in makers) or not _are_only_read(mask.graph, makers):
            return "more"
    except NotImplementedError:  # what `vmap` computes has no storage
        return "more"
    if any(t.numel() > MOST_ELEMENTS for n in makers for t in tensors(n)):
        return "more"
    if (key := _text_of(mask, makers)) not in _KNOWN:
        _KNOWN[key] = _computed(mask, makers)
    return _KNOWN[key]


def _is_pure(node: fx.Node) -> bool:
    """Whether a node computes, by arithmetic that is known here, what its arguments alone tell."""
    name = name_of(node)
    if name not in _PURE or "out" in node.kwargs:
        return False
    return name not in _OF_WHOLE_NUMBERS or not any(
        t.is_floating_point() for n in node.all_input_nodes for t in tensors(n)
    )


def name_of(node: fx.Node) -> str:
    """The name of a method of a tensor, or of a function of torch or `operator`; empty for others."""
    if node.op == "call_method":
        return _DUNDERS.get(str(node.target), str(node.target))
    target: Any = node.target
    module = (getattr(target, "__module__", None) or "torch").partition(".")[0]
    known = node.op == "call_function" and module in ("torch", _OPERATOR) and not isinstance(target, OpOverload)
    return getattr(target, "__name__", "") if known else ""


def _are_only_read(graph: fx.Graph, nodes: set[fx.Node]) -> bool:
    """Whether no op of a Dynamo graph may write into the memory of what some nodes make: only such as are known to read
    it are given any of it.
    """
    theirs = set().union(*map(_keys, nodes))
    bodies = {}
    for call, body, given in checkpointed_in(graph.owning_module) if graph.owning_module else ():
        bodies[call] = body
        same = [p for p, n in given.items() if isinstance(n, fx.Node) and _keys(n) & theirs]
        theirs.update(*map(_keys, same))

    def reads(node: fx.Node) -> bool:
        """Whether a node writes into nothing of what it is given."""
        if _is_pure(node) or node.target is functional.scaled_dot_product_attention or node.op == "output":
            return True
        if node.target is functional.embedding:
            most = node.args[3] if len(node.args) > 3 else node.kwargs.get("max_norm")  # by which it changes rows
            return most is None
        return node in bodies and all(map(reads, filter(takes, bodies[node].graph.nodes)))

    def takes(node: fx.Node) -> bool:
        return any(_keys(given) & theirs for given in node.all_input_nodes)

    return all(map(reads, filter(takes, graph.nodes)))


def _keys(node: fx.Node) -> set[int]:
    """The identities of the storages of what a node makes."""
    return {storage_key(t) for t in tensors(node)}


def checkpointed_in(graph: fx.GraphModule) -> Iterator[tuple[fx.Node, fx.GraphModule, dict[fx.Node, Any]]]:
    """The calls that a model checkpoints: the node, the graph that runs again, and what its placeholders stand for."""
    calls = graph.graph.find_nodes(op="call_function", target=_CHECKPOINT)
    names = Counter(call.args[0].target for call in calls)
    for call in calls:
        if names[call.args[0].target] == 1:
            body: fx.GraphModule = graph.get_submodule(call.args[0].target)  # type: ignore[assignment]
            yield call, body, dict(zip(body.graph.find_nodes(op="placeholder"), call.args[1:], strict=False))


_KNOWN: dict[str, Said] = {}  # graphs are compiled more than once


def _text_of(mask: fx.Node, makers: Collection[fx.Node]) -> str:
    """What is computed, whatever its nodes are called."""
    at = {n: f"%{i}" for i, n in enumerate(n for n in mask.graph.nodes if n in makers)}
    inputs = [(shape_of(n), next(tensors(n)).dtype) for n in at if n.op == "placeholder"]
    named = [("" if n.op == "placeholder" else str(n.target), n.args, n.kwargs) for n in at]
    return repr((inputs, fx.map_arg(named, lambda m: at[m])))


def _computed(mask: fx.Node, makers: Collection[fx.Node]) -> Said:
    may = {"nothing", "causal"}
    try:
        with no_dispatch(), torch.no_grad():
            for part, row in _parts_of([n for n in mask.graph.nodes if n in makers], mask):
                if not (may := may & _may_say(part, row)):
                    return "more"
    except Exception:  # an op that does not run by itself, or not in parts
        return "more"
    return "nothing" if "nothing" in may else "causal"


def _parts_of(nodes: Sequence[fx.Node], mask: fx.Node) -> Iterator[tuple[torch.Tensor, int]]:
    """The value of a mask on the CPU, in parts of so many rows that none is large, each with the number of its first.

    Args:
        nodes: those that make it, and itself, the last.
        mask: the last.
    """
    values: dict[fx.Node, _Part] = {}
    lasting = {mask}  # what is asked for parts
    last = {given: node for node in nodes for given in node.all_input_nodes}
    for node in nodes:
        if any(t.numel() > AT_ONCE for t in tensors(node)):
            values[node] = _in_parts(node, values)
            lasting.update(node.all_input_nodes)
        else:
            values[node] = _whole(node, values)
        for given in node.all_input_nodes:
            if last[given] is node and given not in lasting:
                values.pop(given, None)
    *outer, length, width = shape_of(mask)
    batch = outer[0] if len(outer) == 2 else 1
    rows = max(1, AT_ONCE // (prod(outer) // batch * width))
    for first in range(0, length, rows):
        for at in range(batch):
            part = values[mask](at, slice(first, first + rows))
            yield torch.broadcast_to(part, (*part.shape[:-2], min(rows, length - first), width)), first


def _whole(node: fx.Node, values: Mapping[fx.Node, _Part]) -> _Part:
    args, kwargs = _given(node, lambda n: values[n](None, _ALL))
    value = _called(node, args, kwargs)

    def part(at: int | None, rows: slice) -> Any:
        if not isinstance(value, torch.Tensor) or at is None:
            return value
        found = value[..., rows, :] if value.dim() > 1 and value.shape[-2] > 1 else value
        return found[at : at + 1] if value.dim() == 4 and value.shape[0] > 1 else found

    return part


def _in_parts(node: fx.Node, values: Mapping[fx.Node, _Part]) -> _Part:
    """Of an op that computes each element by itself, or repeats what it is given: of four dimensions at most."""
    name = name_of(node)
    repeats = name == "expand" or (name == "getitem" and _adds_dimensions(node.args[1]))
    if not (repeats or name in _BY_ELEMENT) or len(shape_of(node)) > 4:
        raise ValueError(name)

    def part(at: int | None, rows: slice) -> Any:
        args, kwargs = _given(node, lambda n: values[n](at, rows))
        return args[0] if repeats else _called(node, args, kwargs)

    return part


def _adds_dimensions(index: Any) -> bool:
    """Whether an index, as of x[None, None, :, :], adds dimensions before those that there are, and does no more."""
    kept = [x for x in index if x is not None] if isinstance(index, tuple) else [index]
    return all(x == _ALL for x in kept) and (not kept or None not in index[-len(kept) :])


def _given(node: fx.Node, value: Callable[[fx.Node], Any]) -> tuple[Any, Any]:
    """The arguments of a node, on the CPU."""
    given: Any = fx.map_arg((node.args, node.kwargs), value)
    args, kwargs = fx.node.map_aggregate(given, lambda x: _CPU if isinstance(x, (torch.device, str)) else x)
    return args, kwargs


def _called(node: fx.Node, args: Any, kwargs: Any) -> Any:
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    if node.op == "placeholder":
        return torch.ones(shape_of(node), dtype=next(tensors(node)).dtype)
    call: Any = node.target
    return call(*args, **kwargs)


def _may_say(part: torch.Tensor, row: int) -> set[str]:
    """What a mask may say of which this is the part from a row on: the last row of a causal one lets everything
    through.
    """
    if not (part.dtype == torch.bool or part.is_floating_point()):
        return set()
    passes = part if part.dtype == torch.bool else part == 0
    if part.is_floating_point() and not bool((passes | (part <= torch.finfo(part.dtype).min)).all()):
        return set()
    causal = torch.ones(passes.shape[-2:], dtype=torch.bool).tril(row)
    found = {"nothing"} if bool(passes.all()) else set()
    return found | ({"causal"} if bool((passes == causal).all()) else set())
