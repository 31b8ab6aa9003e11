"""Kinds of tensors that no plan can be made for, refused by name: in the batch, and among the parameters."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from planner.compat.pytree import keystr, tree_flatten_with_path
from planner.compat.tensors import is_traceable_wrapper_subclass
from planner.errors import CaptureError
from planner.requests.request import Request

_ARGUMENT = "the argument"
_SPARSE = {torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc}


def refuse_tensors(request: Request) -> None:
    """Raise CaptureError for nested and sparse tensors, and for subclasses that torch.compile cannot follow."""
    compiled = request.options.mode != "eager"
    for name, t in _named(request):
        if t.is_nested:
            raise CaptureError(
                f"{name} is a nested tensor, whose sizes a plan does not know; give a padded one with a mask, as "
                "torch.nested.to_padded_tensor makes it"
            )
        if t.layout in _SPARSE and name.startswith(_ARGUMENT):
            raise CaptureError(
                f"{name} is a sparse tensor ({t.layout}), which torch.compile does not take; plan the submodules that "
                "are given dense ones, or give indices and values, as for index_select() and index_add()"
            )
        kind = type(t)
        plain = kind is torch.Tensor or kind.__torch_function__ is nn.Parameter.__torch_function__
        if compiled and not plain and not is_traceable_wrapper_subclass(t):
            raise CaptureError(
                f"{name} is a {kind.__module__}.{kind.__qualname__}, a subclass of torch.Tensor that torch.compile "
                "cannot take apart; give a plain tensor, as t.as_subclass(torch.Tensor), or plan with mode='eager'"
            )


def _named(request: Request) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a request with what to call them."""
    for path, x in tree_flatten_with_path((request.args or (), dict(request.kwargs)))[0]:
        if isinstance(x, torch.Tensor):
            yield f"{_ARGUMENT} {keystr(path[1:])} of the batch", x
    for name, p in request.model.named_parameters():
        yield f"the parameter {name}", p
    for name, b in request.model.named_buffers():
        yield f"the buffer {name}", b
