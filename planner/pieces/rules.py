"""How ATen's elementwise ops, views, reductions and products of matrices run in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import fx

from planner.capture.joint_graph import map_nodes, shape_of, tensors
from planner.compat.ops import OpOverload, schema_of
from planner.pieces.body import Body
from planner.pieces.groups import NEITHER, SUM, Group, aligned, dim_in_piece, in_piece, size_of, through_view
from planner.pieces.ways import Way, args_of, given, parts, sums

_ATEN = torch.ops.aten
# elementwise, though torch does not tag them so
_MORE_ELEMENTWISE = (
    _ATEN._to_copy.default,
    _ATEN.elu_backward.default,
    _ATEN.empty_like.default,
    _ATEN.full_like.default,
    _ATEN.hardsigmoid_backward.default,
    _ATEN.hardswish_backward.default,
    _ATEN.hardtanh_backward.default,
    _ATEN.leaky_relu_backward.default,
    _ATEN.log_sigmoid_backward.default,
    _ATEN.mish_backward.default,
    _ATEN.ones_like.default,
    _ATEN.softplus_backward.default,
    _ATEN.zeros_like.default,
)
IN_PLACE = {_ATEN.add_.Tensor: _ATEN.add.Tensor}  # the sums that the backward pass makes in place
_FORMATS = (None, torch.preserve_format, torch.contiguous_format)


def is_elementwise(target: Any) -> bool:
    """Whether each element of an op's result depends on one element of each argument alone."""
    if target in _MORE_ELEMENTWISE or target in IN_PLACE:
        return True
    if not isinstance(target, OpOverload) or target.namespace not in ("aten", "prims"):
        return False
    plain = not schema_of(target).is_mutable and torch.Tag.nondeterministic_seeded not in target.tags
    return plain and torch.Tag.pointwise in target.tags


def elementwise(node: fx.Node, group: Group) -> Way | None:
    """Broadcast arguments are cut where they have the dimensions of the group, and whole where they have size 1."""
    results = [tuple(t.shape) for t in tensors(node)]
    out, arguments = results[0], given(node)
    several = group[0] != group[1]
    if len(set(results)) > 1 or not arguments or (several and node.kwargs.get("memory_format") not in _FORMATS):
        return None
    shapes = [shape_of(n) for n in arguments]
    if _broadcast(shapes) != out:
        return None
    reads = [aligned(shape, out, group) for shape in shapes]
    if NEITHER in reads or not any(reads):
        return None

    target = IN_PLACE.get(node.target, node.target)  # type: ignore[call-overload]

    def write(body: Body, args: Any, kwargs: Any) -> Any:
        places = iter(zip(shapes, reads, strict=True))

        def fit(x: fx.Node) -> fx.Node:
            shape, found = next(places)
            off = len(out) - len(shape)
            if found is not None or group[1] - off < 0:
                return x
            first, last = max(0, group[0] - off), group[1] - off  # of size 1 each
            return body.reshaped(x, (*shape[:first], 1, *shape[last + 1 :]))

        args, kwargs = map_nodes((args, kwargs), fit)
        return body.call(target, *args, **kwargs)

    return Way(tuple(reads), (group,) * len(results), write)


def _broadcast(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The shape to which tensors are broadcast."""
    columns = zip_longest(*(reversed(shape) for shape in shapes), fillvalue=1)
    return tuple(reversed([max(column, key=lambda n: n != 1 and n) for column in columns]))


@parts(_ATEN.view.default, _ATEN._unsafe_view.default, _ATEN.reshape.default, _ATEN.unsqueeze.default)
@parts(_ATEN.squeeze.default, _ATEN.squeeze.dim, _ATEN.squeeze.dims)
def _view(node: fx.Node, group: Group) -> Way | None:
    (x,) = given(node)
    out = shape_of(node)
    found = through_view(out, group, shape_of(x))

    def write(body: Body, args: Any, kwargs: Any) -> Any:
        return body.reshaped(args[0], in_piece(out, group, body.length))

    return None if found is None else Way((found,), (group,), write)


@parts(_ATEN.alias.default, _ATEN.detach.default)
def _same(node: fx.Node, group: Group) -> Way | None:
    return Way((group,), (group,), lambda body, args, kwargs: args[0])


@parts(_ATEN.permute.default, _ATEN.transpose.int, _ATEN.t.default)
def _permute(node: fx.Node, group: Group) -> Way | None:
    rank = len(shape_of(node))
    order = list(range(rank))
    if node.target is _ATEN.permute.default:
        order = [d % rank for d in args_of(node)[1]]
    elif rank > 1:
        a, b = (d % rank for d in args_of(node)[1:3]) if node.target is _ATEN.transpose.int else (0, 1)
        order[a], order[b] = order[b], order[a]
    first = order[group[0]]
    source = first, first + group[1] - group[0]
    if order[group[0] : group[1] + 1] != list(range(source[0], source[1] + 1)):
        return None
    kept = [dim_in_piece(d, rank, source) for d in order if d not in range(source[0] + 1, source[1] + 1)]
    new = [source[0] if d is None else d for d in kept]
    return Way((source,), (group,), lambda body, args, kwargs: body.call(_ATEN.permute.default, args[0], new))


@parts(_ATEN.expand.default)
def _expand(node: fx.Node, group: Group) -> Way | None:
    (x,) = given(node)
    out = shape_of(node)
    found = aligned(shape_of(x), out, group)
    if found is None or found == NEITHER:
        return None
    off = len(out) - len(shape_of(x))

    def write(body: Body, args: Any, kwargs: Any) -> Any:
        return body.call(_ATEN.expand.default, args[0], list(in_piece(out, group, body.length)))

    return Way((found,), (group,), write) if off >= 0 else None


def _along(node: fx.Node, group: Group, at: int = 1) -> int | None:
    """The dimension that is argument number `at`, in a piece; None where it is cut."""
    dim = args_of(node)[at] if len(args_of(node)) > at else 0
    x = given(node)[0]
    return dim_in_piece(dim, len(shape_of(x)), group) if isinstance(dim, int) else None


@parts(_ATEN.slice.Tensor, _ATEN._softmax.default, _ATEN._log_softmax.default, _ATEN._safe_softmax.default)
def _other_dimension(node: fx.Node, group: Group) -> Way | None:
    """Ops that do something along one dimension, and leave the number of dimensions as it is."""
    dim = _along(node, group)
    if shape_of(node) == shape_of(given(node)[0]) and node.target is _ATEN.slice.Tensor:
        return _same(node, group)
    if dim is None or len(given(node)) != 1:
        return None

    def write(body: Body, args: Any, kwargs: Any) -> Any:
        return body.call(node.target, args[0], dim, *args[2:], **kwargs)

    return Way((group,), (group,), write)


@parts(_ATEN._softmax_backward_data.default, _ATEN._log_softmax_backward_data.default)
def _softmax_backward(node: fx.Node, group: Group) -> Way | None:
    dim = _along(node, group, at=2)

    def write(body: Body, args: Any, kwargs: Any) -> Any:
        return body.call(node.target, args[0], args[1], dim, *args[3:], **kwargs)

    return None if dim is None else Way((group, group), (group,), write)


@parts(_ATEN.select.int)
def _select(node: fx.Node, group: Group) -> Way | None:
    (x,) = given(node)
    dim = args_of(node)[1] % len(shape_of(x))
    if group[0] < dim <= group[1]:
        return None
    source = group if dim > group[1] else (group[0] + 1, group[1] + 1)
    new = dim_in_piece(dim, len(shape_of(x)), source)
    return Way((source,), (group,), lambda body, args, kwargs: body.call(_ATEN.select.int, args[0], new, args[2]))


@parts(_ATEN.slice_backward.default)
def _slice_backward(node: fx.Node, group: Group) -> Way | None:
    return _into_zeros(node, group, group)


@parts(_ATEN.select_backward.default)
def _select_backward(node: fx.Node, group: Group) -> Way | None:
    out = shape_of(node)
    dim = args_of(node)[2] % len(out)
    source = group if dim > group[1] else (group[0] - 1, group[1] - 1)
    return _into_zeros(node, group, source)


def _into_zeros(node: fx.Node, group: Group, source: Group) -> Way | None:
    """Ops that put a tensor into zeros, along one dimension."""
    out = shape_of(node)
    dim = dim_in_piece(args_of(node)[2], len(out), group)

    def write(body: Body, args: Any, kwargs: Any) -> Any:
        return body.call(node.target, args[0], list(in_piece(out, group, body.length)), dim, *args[3:])

    return None if dim is None else Way((source,), (group,), write)


@parts(_ATEN.cat.default)
def _cat(node: fx.Node, group: Group) -> Way | None:
    dim = dim_in_piece(args_of(node)[1] if len(args_of(node)) > 1 else 0, len(shape_of(node)), group)
    whole = [shape_of(n) for n in given(node)]
    if dim is None or any(len(shape) != len(shape_of(node)) for shape in whole):
        return None
    return Way((group,) * len(whole), (group,), lambda body, args, kwargs: body.call(_ATEN.cat.default, args[0], dim))


@parts(_ATEN.gather.default)
def _gather(node: fx.Node, group: Group) -> Way | None:
    x, index = given(node)
    dim = _along(node, group)
    if dim is None or shape_of(x)[group[0] : group[1] + 1] != shape_of(index)[group[0] : group[1] + 1]:
        return None

    def write(body: Body, args: Any, kwargs: Any) -> Any:
        return body.call(_ATEN.gather.default, args[0], dim, args[2], **kwargs)

    return Way((group, group), (group,), write)


def _reduced(node: fx.Node) -> tuple[list[int], bool]:
    """The dimensions that a reduction takes away, and whether they stay with size 1."""
    rank = len(shape_of(given(node)[0]))
    dims: Any = args_of(node)[1] if len(args_of(node)) > 1 else None
    if node.target in (_ATEN.sum.default, _ATEN.mean.default) or dims is None or dims == []:
        dims = range(rank)
    keep = bool(args_of(node)[2]) if len(args_of(node)) > 2 else False
    return [d % max(rank, 1) for d in ([dims] if isinstance(dims, int) else dims)], keep


@parts(_ATEN.sum.dim_IntList, _ATEN.mean.dim, _ATEN.amax.default, _ATEN.amin.default, _ATEN.logsumexp.default)
def _reduction(node: fx.Node, group: Group) -> Way | None:
    (x,) = given(node)
    shape, (gone, keep) = shape_of(x), _reduced(node)
    kept = list(range(len(shape))) if keep else [d for d in range(len(shape)) if d not in gone]
    source = kept[group[0]], kept[group[1]]
    if any(source[0] <= d <= source[1] for d in gone):
        return None
    dims = [dim_in_piece(d, len(shape), source) for d in gone]

    def write(body: Body, args: Any, kwargs: Any) -> Any:
        return body.call(node.target, args[0], dims, keep, **kwargs)

    return Way((source,), (group,), write)


@sums(_ATEN.sum.dim_IntList, _ATEN.sum.default, _ATEN.mean.dim, _ATEN.mean.default)
def _add_up(node: fx.Node, at: int, group: Group) -> Way | None:
    """Sums over the whole group; a mean is the sum of the pieces' means, each by its share."""
    (x,) = given(node)
    shape, (gone, _) = shape_of(x), _reduced(node)
    if any(d not in gone for d in range(group[0], group[1] + 1)):
        return None
    dims = list(dict.fromkeys(group[0] if (d2 := dim_in_piece(d, len(shape), group)) is None else d2 for d in gone))
    whole, out = size_of(shape, group), shape_of(node)
    mean = node.target in (_ATEN.mean.dim, _ATEN.mean.default)

    def write(body: Body, args: Any, kwargs: Any) -> Any:
        op: Any = _ATEN.mean.dim if mean else _ATEN.sum.dim_IntList
        total = body.call(op, args[0], dims, False, **kwargs)
        if mean:
            total = body.call(_ATEN.mul.Tensor, total, body.length / whole)
        return body.reshaped(total, out)

    return Way((group,), (SUM,), write)
