"""The graph of one piece: ops on parts of tensors, which writes its results into the parts of whole ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from planner.capture.joint_graph import map_nodes
from planner.compat.fake import FakeTensorMode


class Body:
    """A graph that is being written, on fake tensors.

    Attributes:
        graph: so far.
        length: of the piece.
    """

    def __init__(self, mode: FakeTensorMode, length: int) -> None:
        self.graph = fx.Graph()
        self.mode = mode
        self.length = length

    def placeholder(self, name: str, like: torch.Tensor, shape: tuple[int, ...], stride: tuple[int, ...]) -> fx.Node:
        """An input: a tensor of this shape, of the dtype and device of another."""
        node = self.graph.placeholder(name)
        node.target = node.name
        with self.mode:
            node.meta["val"] = torch.empty_strided(shape, stride, dtype=like.dtype, device=like.device)
        return node

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A call of an op, with its fake result."""
        node = self.graph.call_function(target, args, kwargs)
        given_args, given_kwargs = map_nodes((args, kwargs), lambda n: n.meta["val"])
        with self.mode:
            node.meta["val"] = target(*given_args, **given_kwargs)
        return node

    def shape(self, node: fx.Node) -> tuple[int, ...]:
        """The shape of a tensor in the piece."""
        return tuple(node.meta["val"].shape)

    def reshaped(self, node: fx.Node, shape: tuple[int, ...]) -> fx.Node:
        """The tensor in another shape; itself where it has that."""
        return node if self.shape(node) == shape else self.call(torch.ops.aten.reshape.default, node, list(shape))
