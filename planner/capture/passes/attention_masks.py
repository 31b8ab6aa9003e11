"""Attention whose mask says no more than that it is causal, or nothing: the kernel is told so, as in eager mode.

Libraries ask for the values of a mask, and give attention none where it would only be causal; while torch.compile
traces them they cannot ask, and make the mask whatever it says (`find_packed_sequence_indices` and
`_ignore_causal_mask_sdpa` in transformers/masking_utils.py). Attention then computes twice as much, by kernels that
keep more, and the keys and values of grouped queries are repeated, which kernels do not need without a mask. A mask
that depends on no input of the graph is computed here, once, to see what it says.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from math import prod
from typing import Any, Literal

import torch
from torch import fx
from torch.nn import functional

from planner.capture.joint_graph import ancestors, tensors
from planner.compat.ops import OpOverload
from planner.compat.tensors import no_dispatch, storage_key

MOST_ELEMENTS = 2**34  # of a mask that is computed: 131,072 by 131,072 tokens
AT_ONCE = 2**24  # elements that are computed at a time
_ALL = slice(None)
_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
_WIDEST = 256  # of a head, for kernels of grouped queries
_HALF = (torch.float16, torch.bfloat16)
_OPERATOR = operator.add.__module__
_CPU = torch.device("cpu")
# functions of torch and `operator`, and methods of tensors, that write into nothing and are what their arguments say;
# autocast, which is not known here, does not change what they compute, but for numbers that are not whole
_BY_ELEMENT = {"add", "and_", "bitwise_and", "bitwise_not", "bitwise_or", "bool", "eq", "ge", "gt", "invert", "le"}
_BY_ELEMENT |= {
    "logical_and",
    "logical_not",
    "logical_or",
    "lt",
    "mul",
    "ne",
    "neg",
    "or_",
    "sub",
    "to",
    "where",
    "xor",
}
_OF_WHOLE_NUMBERS = {"cumsum", "diff"}
_VIEWS = {"contiguous", "expand", "getitem", "permute", "reshape", "squeeze", "transpose", "unsqueeze", "view"}
_MADE = {"arange", "full", "full_like", "new_full", "new_ones", "new_zeros", "ones", "ones_like", "tensor", "zeros"}
_PURE = _BY_ELEMENT | _OF_WHOLE_NUMBERS | _VIEWS | _MADE | {"clone", "float", "int", "long", "masked_fill", "repeat"}
_PURE |= {"tril", "triu", "zeros_like"}
Said = Literal["causal", "nothing", "more"]
_Part = Callable[[int | None, slice], Any]  # of the batch (None for all), rows -> a value, or that part of it


def drop_known_masks(graph: fx.GraphModule) -> None:
    """Take masks that are causal, or let everything through, from the attention of a Dynamo graph, in place.

    What a mask says is computed on the CPU, a part at a time; O(its elements x ops that make it) time.
    Masks that depend on an input, or on a symbolic size, are left alone.
    """
    known: dict[fx.Node, Said] = {}
    changed = False
    for node in graph.graph.find_nodes(op="call_function", target=functional.scaled_dot_product_attention):
        named = {**dict(zip(_NAMES, node.args, strict=False)), **node.kwargs}
        mask: Any = named.get("attn_mask")
        if named.get("is_causal") or not all(_is_tensor(named.get(name)) for name in _NAMES[:4]):
            continue
        if mask not in known:
            known[mask] = _said_by(mask)
        if known[mask] == "more" or not _fits(mask, named["query"], named["key"], whole=known[mask] == "causal"):
            continue
        named |= {"attn_mask": None, "is_causal": known[mask] == "causal"}
        once = [_before_repeating(named[name]) for name in ("key", "value")]
        if all(n is not None for n in once) and _takes_groups(*(named[name] for name in _NAMES[:3])):
            named |= {"key": once[0], "value": once[1], "enable_gqa": True}
        node.args, node.kwargs = (), named
        changed = True
    if changed:
        graph.recompile()


def _is_tensor(x: Any) -> bool:
    return isinstance(x, fx.Node) and next(tensors(x), None) is not None


def _fits(mask: fx.Node, query: fx.Node, key: fx.Node, whole: bool) -> bool:
    """Whether a mask makes attention no larger, and where it is `whole`, has a row for each query, as many as keys."""
    scores, shape = (*_shape(query)[:-1], _shape(key)[-2]), _shape(mask)
    if whole and not shape[-2] == shape[-1] == scores[-2] == scores[-1]:
        return False
    return len(shape) <= len(scores) and all(a in (1, b) for a, b in zip(shape[::-1], scores[::-1], strict=False))


def _shape(node: fx.Node) -> torch.Size:
    return next(tensors(node)).shape


def _said_by(mask: fx.Node) -> Said:
    """What a mask lets through: what is before and at each query, everything, or something else or not known."""
    makers = ancestors([mask])
    try:
        if not all(map(_is_pure, makers)) or not _are_only_read(mask.graph, makers):
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
    name = _name_of(node)
    if name not in _PURE or "out" in node.kwargs:
        return False
    return name not in _OF_WHOLE_NUMBERS or not any(
        t.is_floating_point() for n in node.all_input_nodes for t in tensors(n)
    )


def _name_of(node: fx.Node) -> str:
    """The name of a method of a tensor, or of a function of torch or `operator`; empty for others."""
    if node.op == "call_method":
        return str(node.target)
    target: Any = node.target
    module = (getattr(target, "__module__", None) or "torch").partition(".")[0]
    known = node.op == "call_function" and module in ("torch", _OPERATOR) and not isinstance(target, OpOverload)
    return getattr(target, "__name__", "") if known else ""


def _are_only_read(graph: fx.Graph, nodes: set[fx.Node]) -> bool:
    """Whether no op of a Dynamo graph may write into the memory of what some nodes make: only such as are known to read
    it are given any of it.
    """
    theirs = {storage_key(t) for n in nodes for t in tensors(n)}
    return all(
        _is_pure(node) or _reads(node)
        for node in graph.nodes
        if node.op not in ("placeholder", "output")
        and any(storage_key(t) in theirs for given in node.all_input_nodes for t in tensors(given))
    )


def _reads(node: fx.Node) -> bool:
    """Whether a node is attention, or looks rows up without changing them."""
    if node.target is functional.embedding:
        most = node.args[3] if len(node.args) > 3 else node.kwargs.get("max_norm")  # by which it changes rows
        return most is None
    return node.target is functional.scaled_dot_product_attention


_KNOWN: dict[str, Said] = {}  # graphs are compiled more than once


def _text_of(mask: fx.Node, makers: Collection[fx.Node]) -> str:
    """What is computed, whatever its nodes are called."""
    at = {n: f"%{i}" for i, n in enumerate(n for n in mask.graph.nodes if n in makers)}
    return repr([(str(n.target), fx.map_arg((n.args, n.kwargs), lambda m: at[m])) for n in at])


def _computed(mask: fx.Node, makers: Collection[fx.Node]) -> Said:
    state, may = torch.get_rng_state(), {"nothing", "causal"}
    try:
        with no_dispatch(), torch.no_grad():
            for part, row in _parts_of([n for n in mask.graph.nodes if n in makers], mask):
                if not (may := may & _may_say(part, row)) or not torch.equal(state, torch.get_rng_state()):
                    return "more"
    except Exception:  # an op that does not run by itself, as those of `vmap`
        return "more"
    finally:
        torch.set_rng_state(state)
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
    *outer, length, width = _shape(mask)
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
    name = _name_of(node)
    repeats = name == "expand" or (name == "getitem" and _adds_dimensions(node.args[1]))
    if not (repeats or name in _BY_ELEMENT) or len(_shape(node)) > 4:
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


def _before_repeating(repeated: Any) -> fx.Node | None:
    """What was repeated for each query of a group: x[:, :, None].expand(...).reshape(...); None for anything else.

    That is what transformers' `repeat_kv` does, (batch, heads, length, width) -> more heads.
    """
    if (_name_of(repeated), repeated.target) != ("reshape", "reshape") or not isinstance(repeated.args[0], fx.Node):
        return None
    expanded = repeated.args[0]
    if expanded.target != "expand" or not isinstance(expanded.args[0], fx.Node):
        return None
    apart = expanded.args[0]
    index: Any = apart.args[1] if apart.target is operator.getitem else ()
    if not isinstance(index, tuple) or index[:3] != (_ALL, _ALL, None) or any(x != _ALL for x in index[3:]):
        return None
    once: fx.Node = apart.args[0]  # type: ignore[assignment]
    if len(_shape(once)) != 4 or len(_shape(expanded)) != 5:
        return None
    (batch, heads, length, width), times = _shape(once), _shape(expanded)[2]
    as_such = (batch, heads, times, length, width), (batch, heads * times, length, width)
    return once if (_shape(expanded), _shape(repeated)) == as_such else None


def _takes_groups(query: fx.Node, key: fx.Node, value: fx.Node) -> bool:
    """Whether attention without a mask has kernels for fewer heads of keys and values than these."""
    t, heads = next(tensors(query)), _shape(key)[1]
    alike = t.dim() == 4 and t.shape[1] == heads == _shape(value)[1] and t.shape[-1] == _shape(value)[-1] <= _WIDEST
    return alike and (t.device.type == "cpu" or t.dtype in _HALF)
