"""Tensors: identities of storages, version counters, wrapper subclasses, dispatch modes. Torch 2.11 to 2.15."""

from __future__ import annotations

from itertools import count
from typing import Any, TypeVar

import torch
from torch._prims_common import suggest_memory_format
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

__all__ = [
    "TorchDispatchMode",
    "is_batched",
    "is_traceable_wrapper_subclass",
    "key_of",
    "no_dispatch",
    "storage_key",
    "suggest_memory_format",
    "version_of",
    "viewed",
    "without_memory",
]

Wrapper = TypeVar("Wrapper", bound=torch.Tensor)
_NUMBERS = count(1)


def storage_key(t: torch.Tensor) -> int:
    """The identity of a tensor's storage, equal for all its views: a number that no other storage has, or had.

    An address comes again once a storage is freed. Meta and fake tensors have storages, too.
    """
    return key_of(t.untyped_storage())


def key_of(storage: torch.UntypedStorage) -> int:
    """The identity of a storage itself, as `storage_key`: an attribute of it, as torch keeps one object for each."""
    key: int = vars(storage).setdefault("_planner_key", next(_NUMBERS))
    return key


def dense_parts(t: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that have the storages: of a sparse tensor its indices and values, else the tensor itself.

    Fake tensors, and those not coalesced, have them too (`Tensor._indices`, `Tensor._values`, torch 2.11 to 2.15).
    """
    if t.layout == torch.sparse_coo:
        return [t._indices(), t._values()]
    if t.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [t.crow_indices(), t.col_indices(), t.values()]
    return [t.ccol_indices(), t.row_indices(), t.values()] if t.layout in (torch.sparse_csc, torch.sparse_bsc) else [t]


def entries_of(t: torch.Tensor | None) -> int:
    """The entries of a tensor that is sparse in its rows (`Tensor._nnz`, torch 2.11 to 2.15); 0 for others."""
    return t._nnz() if t is not None and t.layout == torch.sparse_coo and t.sparse_dim() == 1 else 0


def is_batched(t: torch.Tensor) -> bool:
    """Whether a tensor stands for several under `vmap`, as a gradient does by `is_grads_batched` (2.11 to 2.15)."""
    of: Any = torch._C._functorch
    return bool(of.is_batchedtensor(t) or of.is_legacy_batchedtensor(t))


def viewed(t: torch.Tensor) -> torch.Tensor | None:
    """The tensor that a differentiable view is of (`Tensor._base`, torch 2.11 to 2.15); None for what is no view."""
    return t._base


def without_memory(kind: type[Wrapper], like: torch.Tensor) -> Wrapper:
    """A tensor of a class that has `__torch_dispatch__`, with the shape, strides, dtype and device of another one, and
    a storage of no bytes (`Tensor._make_wrapper_subclass`, 2.11 to 2.15).
    """
    made: Wrapper = torch.Tensor._make_wrapper_subclass(
        kind, like.shape, strides=like.stride(), storage_size=0, dtype=like.dtype, device=like.device
    )
    return made


def version_of(t: torch.Tensor) -> int:
    """How often a tensor's contents were written into (`Tensor._version`, torch 2.11 to 2.15); views share it."""
    return t._version
