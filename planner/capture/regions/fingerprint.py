"""A digest of a graph's structure, by which a plan knows the graph again in another process."""

from __future__ import annotations

import hashlib
import operator
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from planner.capture.joint_graph import tensors
from planner.capture.recomputability import group_of
from planner.capture.shapes import SYMBOLIC, is_size
from planner.compat import pytree
from planner.compat.ops import kernel_named

_ATEN = torch.ops.aten
_SPLITS = {_ATEN.split.Tensor, _ATEN.split_with_sizes.default, _ATEN.chunk.default, _ATEN.unbind.int}


def fingerprint(graph: fx.Graph) -> str:
    """A digest of a graph's structure: equal for two captures of the same step, whatever nodes and symbols are called.

    Sizes that are symbols are told apart by where they first appear; so are groups of processes, whose names are not
    the same in every process. The part of a split tensor that a process takes does not count either.
    """
    number = {node: i for i, node in enumerate(graph.nodes)}
    symbols: dict[str, str] = {}
    groups: dict[str, str] = {}
    digest = hashlib.sha256()
    for node in graph.nodes:
        target = "" if node.op in ("placeholder", "get_attr") else getattr(node.target, "__name__", str(node.target))
        args = _numbered(node, number, groups)
        value = node.meta.get(SYMBOLIC)
        shapes = [
            (tuple(t.shape), _strides(t), str(t.dtype), t.device.type, t.requires_grad) for t in tensors(node, value)
        ]
        sizes = value if is_size(node) else None
        text = repr((node.op, target, args, shapes, sizes))
        digest.update(re.sub(r"\bs\d+\b", lambda s: symbols.setdefault(s[0], f"s{len(symbols)}"), text).encode())
    return digest.hexdigest()


def _strides(t: torch.Tensor) -> tuple[Any, ...]:
    """The strides of a tensor; 0 for a dimension of size 1, where any stride does, and torch does not always give the
    same.
    """
    return tuple(0 if isinstance(n, int) and n == 1 else step for n, step in zip(t.shape, t.stride(), strict=True))


def _numbered(node: fx.Node, number: Mapping[fx.Node, int], groups: dict[str, str]) -> Any:
    """A node's arguments with numbers for nodes and for the group of processes that it is a collective of.

    Devices are by their type: each process has one of its own.
    """
    group = group_of(node)

    def plain(x: Any) -> Any:
        if isinstance(x, fx.Node):
            return number[x]
        if isinstance(x, torch.device):
            return x.type
        return groups.setdefault(x, f"group {len(groups)}") if x == group else x

    split = node.target is operator.getitem and getattr(node.args[0], "target", None) in _SPLITS
    return pytree.tree_map_only(
        (fx.Node, str, torch.device),
        plain,
        (node.args[:1] if split else node.args, kernel_named(node.target, node.kwargs)),
    )
