"""Attention whose mask says no more than that it is causal, or nothing: the kernel is told so, as in eager mode.

Libraries ask for the values of a mask, and give attention none where it would only be causal; while torch.compile
traces them they cannot ask, and make the mask whatever it says (`find_packed_sequence_indices` and
`_ignore_causal_mask_sdpa` in transformers/masking_utils.py). Attention then computes twice as much, by kernels that
keep more, and the keys and values of grouped queries are repeated, which kernels do not need without a mask.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import fx
from torch.nn import functional

from planner.capture.joint_graph import ancestors, shape_of, tensors
from planner.capture.passes.mask_values import Said, checkpointed_in, name_of, said_by

_ALL = slice(None)
_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
_WIDEST = 256  # of a head, for kernels of grouped queries
_HALF = (torch.float16, torch.bfloat16)


def drop_known_masks(graph: fx.GraphModule, ones: Collection[int] = ()) -> None:
    """Take masks that are causal, or let everything through, from the attention of a Dynamo graph, in place.

    What a mask says is computed on the CPU, a part at a time; O(its elements x ops that make it) time.
    Masks that depend on other inputs, or on a symbolic size, are left alone.

    Args:
        graph: what Dynamo has captured.
        ones: positions of inputs that hold ones only.
    """
    known: dict[fx.Node, Said] = {}
    inputs = graph.graph.find_nodes(op="placeholder")
    held = {inputs[at] for at in ones}
    for body, given in _bodies(graph):
        calls = [(call, _without_mask(call, given, held, known)) for call in _attention_in(body)]
        for call, named in calls:
            if named is not None:
                call.args, call.kwargs = (), named
        if any(named is not None for _, named in calls):
            body.recompile()


def dropped_if_ones(graph: fx.GraphModule) -> tuple[int, ...]:
    """Positions of the inputs by which a mask is dropped where they hold ones only."""
    inputs = {n: at for at, n in enumerate(graph.graph.find_nodes(op="placeholder"))}
    found: set[fx.Node] = set()
    for body, given in _bodies(graph):
        known: dict[fx.Node, Said] = {}
        for call in _attention_in(body):
            mask: Any = _named(call).get("attn_mask")
            maker = given.get(mask, mask)
            held = {n for n in ancestors([maker]) if n in inputs} if isinstance(maker, fx.Node) else set()
            if held and all(map(_holds_whole_numbers, held)) and _without_mask(call, given, held, known) is not None:
                found |= held
    return tuple(sorted(inputs[n] for n in found))


def _bodies(graph: fx.GraphModule) -> Iterator[tuple[fx.GraphModule, Mapping[fx.Node, Any]]]:
    """A graph, and those that it checkpoints: with the nodes of the graph that a body's placeholders stand for."""
    yield graph, {}
    yield from ((body, given) for _, body, given in checkpointed_in(graph))


def _attention_in(body: fx.GraphModule) -> Collection[fx.Node]:
    return body.graph.find_nodes(op="call_function", target=functional.scaled_dot_product_attention)


def _named(call: fx.Node) -> dict[str, Any]:
    return {**dict(zip(_NAMES, call.args, strict=False)), **call.kwargs}


def _without_mask(
    call: fx.Node, given: Mapping[fx.Node, Any], ones: Collection[fx.Node], known: dict[fx.Node, Said]
) -> dict[str, Any] | None:
    """What attention takes where it needs no mask; None where it needs one.

    Args:
        call: the attention.
        given: placeholders of its graph -> the nodes of the graph around it that they stand for.
        ones: inputs that hold ones only.
        known: what masks say, added to.
    """
    named = _named(call)
    if named.get("is_causal") or not all(_is_tensor(named.get(name)) for name in _NAMES[:4]):
        return None
    mask = named["attn_mask"]
    maker = given.get(mask, mask)
    if maker not in known:
        known[maker] = said_by(maker, ones)
    query, key, value = (named[name] for name in _NAMES[:3])
    said = known[maker]
    if said == "more" or not _fits(mask, query, key, whole=said == "causal"):
        return None
    named |= {"attn_mask": None, "is_causal": said == "causal"}
    once = _before_repeating(key), _before_repeating(value)
    if all(n is not None for n in once) and _takes_groups(query, key, value):
        named |= {"key": once[0], "value": once[1], "enable_gqa": True}
    return named


def _holds_whole_numbers(given: fx.Node) -> bool:
    """Whether an input is a tensor of a fixed size, of whole numbers or booleans."""
    t = next(tensors(given), None)
    fixed = t is not None and all(isinstance(size, int) for size in t.shape)
    return t is not None and fixed and not (t.is_floating_point() or t.is_complex())


def _is_tensor(x: Any) -> bool:
    return isinstance(x, fx.Node) and next(tensors(x), None) is not None


def _fits(mask: fx.Node, query: fx.Node, key: fx.Node, whole: bool) -> bool:
    """Whether a mask makes attention no larger, and where it is `whole`, has a row for each query, as many as keys."""
    scores, shape = (*shape_of(query)[:-1], shape_of(key)[-2]), shape_of(mask)
    if whole and not shape[-2] == shape[-1] == scores[-2] == scores[-1]:
        return False
    return len(shape) <= len(scores) and all(a in (1, b) for a, b in zip(shape[::-1], scores[::-1], strict=False))


def _before_repeating(repeated: Any) -> fx.Node | None:
    """What was repeated for each query of a group: x[:, :, None].expand(...).reshape(...); None for anything else.

    That is what transformers' `repeat_kv` does, (batch, heads, length, width) -> more heads.
    """
    if name_of(repeated) != "reshape" or not isinstance(expanded := repeated.args[0], fx.Node):
        return None
    if name_of(expanded) != "expand" or not isinstance(apart := expanded.args[0], fx.Node):
        return None
    index: Any = apart.args[1] if apart.target is operator.getitem else ()
    if not isinstance(index, tuple) or index[:3] != (_ALL, _ALL, None) or any(x != _ALL for x in index[3:]):
        return None
    once: fx.Node = apart.args[0]  # type: ignore[assignment]
    if len(shape_of(once)) != 4 or len(shape_of(expanded)) != 5:
        return None
    (batch, heads, length, width), times = shape_of(once), shape_of(expanded)[2]
    as_such = (batch, heads, times, length, width), (batch, heads * times, length, width)
    return once if (shape_of(expanded), shape_of(repeated)) == as_such else None


def _takes_groups(query: fx.Node, key: fx.Node, value: fx.Node) -> bool:
    """Whether attention without a mask has kernels for fewer heads of keys and values than these."""
    t, heads = next(tensors(query)), shape_of(key)[1]
    alike = t.dim() == 4 and t.shape[1] == heads == shape_of(value)[1] and t.shape[-1] == shape_of(value)[-1] <= _WIDEST
    return alike and (t.device.type == "cpu" or t.dtype in _HALF)
