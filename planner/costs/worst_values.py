"""Values for which ops need the most memory, where it depends on values: what an op takes is bounded, not sampled.

Which ops those are was read from ATen/native and tried: the tests compare them with adversarial values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from planner.compat.ops import OpOverload, schema_of
from planner.core.call import tensors_in

_ATEN = torch.ops.aten
Fill = Callable[[torch.Tensor, Mapping[str, Any]], object]  # a tensor of zeros, and all arguments by their names


def fill_worst(op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], made: int = 0) -> None:
    """Write the values for which an op takes the most memory into arguments of zeros; others stay as they are.

    Those for which its results have other sizes than the step's, of so many bytes, are not among them.
    """
    fills = _WORST.get(op, {})
    named = {**dict(zip((a.name for a in schema_of(op).arguments), args, strict=False)), **kwargs, "made": made}
    for name, fill in fills.items():
        for t in tensors_in(named.get(name)):
            fill(t, named)


def fill_valid(op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Make arguments of zeros valid ones, where zeros would end a process that runs the op on a GPU."""
    if op is _ATEN.multinomial.default:
        args[0].fill_(1)
    if op is _ATEN.repeat_interleave.Tensor and kwargs.get("output_size") and args[0].numel():
        args[0][0] = kwargs["output_size"]  # its kernel asserts that the repeats add up to it


def _ones(t: torch.Tensor, _: Mapping[str, Any]) -> None:
    t.fill_(1)


def _most_of_mask(t: torch.Tensor, named: Mapping[str, Any]) -> None:
    """A mask as an index becomes the positions where it holds: as many as there are values to be written, or as the
    result has.
    """
    if t.dtype not in (torch.bool, torch.uint8):
        return
    data, values, indices = named["self"], named.get("values"), named["indices"]
    at = next(i for i, x in enumerate(indices) if x is t)
    behind = data.dim() - at - t.dim() - sum(x is not None for x in indices[at + 1 :])
    rows = t.numel()
    if values is None:
        each = math.prod(data.shape[:at]) * math.prod(data.shape[data.dim() - behind :]) * data.itemsize
        rows = named["made"] // max(1, each)
    elif values.dim() > behind and values.shape[-1 - behind] > 1:
        rows = values.shape[-1 - behind]
    t.copy_((torch.arange(t.numel(), device=t.device) < rows).view(t.shape))


def _different(t: torch.Tensor, named: Mapping[str, Any]) -> None:
    """A kernel that sorts indices has a partial sum for each different one."""
    t.copy_((torch.arange(t.numel(), device=t.device) % named["num_weights"]).view(t.shape))


def _differently_scaled(t: torch.Tensor, _: Mapping[str, Any]) -> None:
    """A Taylor polynomial of the highest degree, which large norms need, and a new group of matrices to be squared for
    each power of two among their norms (`compute_T18_scale_square` in ATen/native/LinearAlgebra.cpp).
    """
    batch = t.shape[:-2]
    most = math.log2(torch.finfo(t.dtype).max) - 1
    powers = torch.arange(2, 2 + math.prod(batch), dtype=torch.float64, device=t.device).clamp(max=most)
    t.diagonal(dim1=-2, dim2=-1).copy_(torch.exp2(powers).view(*batch, 1))


def _as_long_as_inputs(t: torch.Tensor, named: Mapping[str, Any]) -> None:
    t.fill_(named["log_probs"].shape[0])


def _as_long_as_states(t: torch.Tensor, named: Mapping[str, Any]) -> None:
    longest, labels = (named["log_alpha"].shape[-1] - 1) // 2, named["targets"]  # a blank around each label
    if labels.dim() > 1:
        t.fill_(longest)
        return
    ends = torch.arange(1, t.numel() + 1, device=t.device) * longest  # targets of all samples follow each other
    t.copy_((labels.numel() - (ends - longest)).clamp(0, longest).view(t.shape))


_BAGS: dict[str, Fill] = {"bag_size": _ones, "indices": _different}
_MASKS: dict[str, Fill] = {"indices": _most_of_mask}
_WORST: dict[OpOverload, dict[str, Fill]] = {
    _ATEN.linalg_matrix_exp.default: {"self": _differently_scaled},
    _ATEN.embedding_dense_backward.default: {"indices": _different},
    _ATEN._embedding_bag_backward.default: _BAGS,
    _ATEN._embedding_bag_dense_backward.default: _BAGS,  # the largest of a bag: only bags that are not empty count
    _ATEN.index.Tensor: _MASKS,
    _ATEN.index_put.default: _MASKS,
    _ATEN.index_put_.default: _MASKS,
    _ATEN._unsafe_index_put.default: _MASKS,
    _ATEN._ctc_loss_backward.Tensor: {"input_lengths": _as_long_as_inputs, "target_lengths": _as_long_as_states},
}
