"""Contiguous copies of views in an emitted graph, as one op each: half the calls, and the same kernel."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

_ATEN = torch.ops.aten
# each is its view and a contiguous `clone` of that, in C++ (CompositeViewCopyKernels.cpp, which torchgen writes)
_COPIES: dict[Any, Any] = {
    _ATEN.as_strided.default: _ATEN.as_strided_copy.default,
    _ATEN.expand.default: _ATEN.expand_copy.default,
    _ATEN.permute.default: _ATEN.permute_copy.default,
    _ATEN.t.default: _ATEN.t_copy.default,
    _ATEN.transpose.int: _ATEN.transpose_copy.int,
}


def copy_views(graph: fx.Graph) -> None:
    """Write a view that only a contiguous copy reads, and the copy, as one op, in place. O(nodes)."""
    for copy in graph.find_nodes(op="call_function", target=_ATEN.clone.default):
        (view,) = copy.args
        if len(view.users) > 1 or view.target not in _COPIES:
            continue
        if copy.kwargs.get("memory_format") is torch.contiguous_format:
            copy.target, copy.args, copy.kwargs = _COPIES[view.target], view.args, view.kwargs
            graph.erase_node(view)
