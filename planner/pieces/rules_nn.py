"""How ATen's ops of neural networks run in pieces: losses, normalisations, convolutions, attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from planner.capture.joint_graph import shape_of
from planner.capture.recomputability import is_random
from planner.pieces.body import Body
from planner.pieces.groups import SUM, Group, in_piece, size_of
from planner.pieces.ways import Way, args_of, count, given, parts, sums

_ATEN = torch.ops.aten
_NONE, _MEAN, _SUM = range(3)  # the reductions of a loss
_BATCH: Group = (0, 0)


@sums(_ATEN.nll_loss_forward.default, _ATEN.nll_loss2d_forward.default)
def _nll(node: fx.Node, at: int, group: Group) -> Way | None:
    """Sums of losses and of weights; the mean over what counts is their quotient."""
    x, _, *weight = given(node)
    if group != _BATCH or args_of(node)[3] == _NONE or len(shape_of(x)) < 2 or at > 1:
        return None

    def write(body: Body, args: Any, kwargs: Any) -> Any:
        return body.call(node.target, *args[:3], _SUM, args[4])

    mean = args_of(node)[3] == _MEAN
    return Way((_BATCH, _BATCH, *[None for _ in weight]), (SUM, SUM), write, (0, 1) if mean else None)


@parts(_ATEN.nll_loss_backward.default, _ATEN.nll_loss2d_backward.default)
def _nll_backward(node: fx.Node, group: Group) -> Way | None:
    """Rows of the gradient; the gradient of the loss and what it was divided by are whole."""
    if group != _BATCH or args_of(node)[4] == _NONE or len(shape_of(node)) < 2:
        return None
    cut: list[Group | None] = [None, _BATCH, _BATCH]
    return Way((*cut, *[None for _ in given(node)[3:]]), (_BATCH,))


@sums(_ATEN.mse_loss.default)
def _mse(node: fx.Node, at: int, group: Group) -> Way | None:
    x, y = given(node)
    reduction = args_of(node)[2] if len(args_of(node)) > 2 else _MEAN
    if reduction == _NONE or shape_of(x) != shape_of(y):
        return None
    whole = size_of(shape_of(x), group)

    def write(body: Body, args: Any, kwargs: Any) -> Any:
        loss = body.call(node.target, args[0], args[1], reduction)
        return body.call(_ATEN.mul.Tensor, loss, body.length / whole) if reduction == _MEAN else loss

    return Way((group, group), (SUM,), write)


@parts(_ATEN.native_layer_norm.default)
def _layer_norm(node: fx.Node, group: Group) -> Way | None:
    x = given(node)[0]
    if group[1] >= len(shape_of(x)) - len(args_of(node)[1]):
        return None
    return Way((group, *[None for _ in given(node)[1:]]), (group, group, group))


@parts(_ATEN.native_layer_norm_backward.default)
def _layer_norm_backward(node: fx.Node, group: Group) -> Way | None:
    """The gradient of the input is cut, those of scale and shift add up."""
    rows = len(shape_of(given(node)[0])) - len(args_of(node)[2])
    if group[1] >= rows or not args_of(node)[7][0]:
        return None
    reads = (group, group, group, group, *[None for _ in given(node)[4:]])
    return Way(reads, (group, *[SUM] * (count(node) - 1)))


@parts(_ATEN.native_group_norm.default)
def _group_norm(node: fx.Node, group: Group) -> Way | None:
    def write(body: Body, args: Any, kwargs: Any) -> Any:
        return body.call(node.target, *args[:3], body.length, *args[4:])

    return Way((_BATCH, *[None for _ in given(node)[1:]]), (_BATCH,) * 3, write) if group == _BATCH else None


@parts(_ATEN.native_group_norm_backward.default)
def _group_norm_backward(node: fx.Node, group: Group) -> Way | None:
    if group != _BATCH or not args_of(node)[9][0]:
        return None

    def write(body: Body, args: Any, kwargs: Any) -> Any:
        return body.call(node.target, *args[:5], body.length, *args[6:])

    reads = (*[_BATCH] * 4, *[None for _ in given(node)[4:]])
    return Way(reads, (_BATCH, *[SUM] * (count(node) - 1)), write)


@parts(_ATEN.convolution.default)
def _convolution(node: fx.Node, group: Group) -> Way | None:
    return Way((_BATCH, *[None for _ in given(node)[1:]]), (_BATCH,)) if group == _BATCH else None


@parts(_ATEN.convolution_backward.default)
def _convolution_backward(node: fx.Node, group: Group) -> Way | None:
    if group != _BATCH or not args_of(node)[10][0]:
        return None
    return Way((_BATCH, _BATCH, None), (_BATCH, *[SUM] * (count(node) - 1)))


@parts(_ATEN.max_pool2d_with_indices.default, _ATEN.avg_pool2d.default, _ATEN._adaptive_avg_pool2d.default)
@parts(_ATEN.max_pool2d_with_indices_backward.default, _ATEN.avg_pool2d_backward.default)
@parts(_ATEN._adaptive_avg_pool2d_backward.default)
def _pool(node: fx.Node, group: Group) -> Way | None:
    """Ops on images, each for itself."""
    if group != _BATCH or any(len(shape_of(n)) != 4 for n in given(node)):
        return None
    return Way((_BATCH,) * len(given(node)), (_BATCH,) * count(node))


# each image for itself; their backward passes, with the size of the whole input as argument 2
_UPSAMPLE = (
    _ATEN.upsample_nearest1d,
    _ATEN.upsample_nearest2d,
    _ATEN.upsample_nearest3d,
    _ATEN._upsample_nearest_exact2d,
    _ATEN.upsample_linear1d,
    _ATEN.upsample_bilinear2d,
    _ATEN.upsample_bicubic2d,
    _ATEN.upsample_trilinear3d,
)
_UPSAMPLE_BACKWARD = (
    _ATEN.upsample_nearest1d_backward,
    _ATEN.upsample_nearest2d_backward,
    _ATEN.upsample_nearest3d_backward,
    _ATEN._upsample_nearest_exact2d_backward,
    _ATEN.upsample_linear1d_backward,
    _ATEN.upsample_bilinear2d_backward,
    _ATEN.upsample_bicubic2d_backward,
    _ATEN.upsample_trilinear3d_backward,
)


@parts(*[op.vec for op in _UPSAMPLE], *[op.default for op in _UPSAMPLE])
def _upsample(node: fx.Node, group: Group) -> Way | None:
    return Way((_BATCH,), (_BATCH,)) if group == _BATCH and len(given(node)) == 1 else None


@parts(*[op.default for op in _UPSAMPLE_BACKWARD])
def _upsample_backward(node: fx.Node, group: Group) -> Way | None:
    if group != _BATCH:
        return None
    whole = shape_of(node)

    def write(body: Body, args: Any, kwargs: Any) -> Any:
        return body.call(node.target, *args[:2], list(in_piece(whole, _BATCH, body.length)), *args[3:])

    return Way((_BATCH,), (_BATCH,), write)


@parts(_ATEN._scaled_dot_product_flash_attention_for_cpu.default)
@parts(_ATEN._scaled_dot_product_flash_attention_for_cpu_backward.default)
def _attention(node: fx.Node, group: Group) -> Way | None:
    """Attention of a batch, or of heads; a mask is broadcast over what it lacks: one of rows and columns, over both."""
    if group not in ((0, 0), (1, 1)) or is_random(node):
        return None
    size = shape_of(node)[group[0]]
    shapes = [shape_of(n) for n in given(node)]
    whole = [len(shape) == 2 or shape[group[0]] == 1 < size for shape in shapes]
    if any(not alone and shape[group[0]] != size for shape, alone in zip(shapes, whole, strict=True)):
        return None
    masks = 1 if node.kwargs.get("attn_mask") is not None else 0
    if any(whole[: len(whole) - masks]):
        return None
    reads = tuple(None if alone else group for alone in whole)
    return Way(reads, (group,) * count(node))
