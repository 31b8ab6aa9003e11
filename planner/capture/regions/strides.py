"""The strides of what one captured graph makes for others, which are captured for these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from planner.capture.regions.region import Region
from planner.capture.shapes import SYMBOLIC


def strides_out(region: Region) -> dict[int, tuple[int, ...]]:
    """The strides that the results of a region had as it was captured, by position; of fixed sizes."""
    if any(SYMBOLIC in node.meta for node in region.joint.graph.nodes):
        return {}
    values = {at: getattr(region.output_at(at), "meta", {}).get("val") for at in range(len(region.fwd_outputs))}
    return {at: t.stride() for at, t in values.items() if isinstance(t, torch.Tensor) and t.layout is torch.strided}


def as_captured(outputs: Sequence[Any], strides: Mapping[int, tuple[int, ...]]) -> Sequence[Any]:
    """The results of a graph laid out as other graphs were captured with.

    Kernels may lay a result out otherwise than fake tensors say; mostly it is the stride of a dimension of size 1.
    """
    if all(outputs[at].stride() == wanted for at, wanted in strides.items()):
        return outputs
    laid_out = list(outputs)
    for at, wanted in strides.items():
        t = laid_out[at]
        same = all(a == b or n == 1 for a, b, n in zip(t.stride(), wanted, t.shape, strict=True))
        laid_out[at] = t.as_strided(t.shape, wanted) if same else t.new_empty_strided(t.shape, wanted).copy_(t)
    return laid_out
