"""Fake tensors: the mode, the errors it raises, and the constants that it knows. Torch 2.11 to 2.15."""

from __future__ import annotations

import copy
import sys
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._dispatch.python import no_python_dispatcher
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeCopyMode,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
    unset_fake_temporarily,
)
from torch.multiprocessing.reductions import StorageWeakRef

from planner.compat.tensors import no_dispatch, storage_key

__all__ = [
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeCopyMode",
    "FakeTensor",
    "FakeTensorMode",
    "UnsupportedOperatorException",
    "allow_constants",
    "copy_constants",
    "detect_fake_mode",
    "fake_of_constant",
    "forget_constants",
    "keep_in_copies",
    "replace_dispatch",
    "replace_format",
    "set_constant",
    "strides_of_kernels",
    "unset_fake_temporarily",
]


@contextmanager
def strides_of_kernels() -> Iterator[None]:
    """Has tensors on meta be laid out as by torch's kernels, which Python's implementations of ops do not do where
    dimensions have one element (`reshape`; `torch._dispatch.python.no_python_dispatcher`, 2.11 to 2.15).
    """
    with unset_fake_temporarily(), no_python_dispatcher():
        yield


def replace_dispatch(mode: FakeTensorMode, dispatch: Callable[..., Any]) -> Callable[..., Any]:
    """Have one fake mode run ops by another function; returns the one before (`FakeTensorMode.dispatch`, 2.11 to 2.15).

    A subclass would not do: higher-order operators look for what to do under `FakeTensorMode` itself.
    """
    before = mode.dispatch
    mode.dispatch = dispatch  # type: ignore[method-assign]
    return before


def replace_format() -> Callable[[], None]:
    """Have fake numbers be written as their values, in all threads, as real ones are; returns what undoes it.

    `f"expert_{index}"` may name a module. Torch's own code, which may write what has no value, writes them as it does
    (`FakeTensor` has `object.__format__`, by `Tensor.__format__`; torch 2.11 to 2.15).
    """

    def written(self: FakeTensor, spec: str) -> str:
        own = sys._getframe(1).f_globals.get("__name__", "").partition(".")[0] == "torch"
        return object.__format__(self, spec) if own or self.dim() else format(self.item(), spec)

    def undo() -> None:
        del FakeTensor.__format__

    FakeTensor.__format__ = written  # type: ignore[method-assign, assignment]
    return undo


def keep_in_copies(mode: FakeTensorMode) -> FakeTensorMode:
    """The mode, which `copy.deepcopy` of its fake tensors leaves to be theirs.

    Torch copies it with them, and all that its tables hold (`FakeTensor.fake_mode`, 2.11 to 2.15).
    """
    own = weakref.ref(mode)
    mode.__deepcopy__ = lambda memo: own()  # type: ignore[attr-defined]
    return mode


def allow_constants(mode: FakeTensorMode, elements: int) -> None:
    """Let results of up to so many elements be known; torch allows for one (`may_turn_const`, torch 2.11 to 2.15)."""
    of_one = mode.may_turn_const

    def may_turn_const(t: torch.Tensor) -> bool:
        return t.layout is torch.strided and t.numel() <= elements and of_one(t.flatten()[:1])

    mode.may_turn_const = may_turn_const  # type: ignore[method-assign]


def fake_of_constant(mode: FakeTensorMode, t: torch.Tensor) -> FakeTensor:
    """A fake tensor that knows the values of a real one (`FakeTensorConverter`, torch 2.11 to 2.15).

    An op that writes into the fake one may write into the real one, too: `copy_constants` is called before.
    """
    return mode.fake_tensor_converter.from_real_tensor(mode, t, make_constant=True)


def copy_constants(t: FakeTensor, borrowed: Collection[int]) -> None:
    """Have a fake tensor, and those that share its values, know a copy of them, where their storage is a borrowed one
    (`constant_storage_mapping`, `Tensor._typed_storage`, torch 2.11 to 2.15).

    Args:
        t: the fake tensor, whose values are known.
        borrowed: storages, by `storage_key`.
    """
    if t.constant is None or storage_key(t.constant) not in borrowed:
        return
    known = t.fake_mode.fake_tensor_converter.constant_storage_mapping
    refs = known.pop(StorageWeakRef(t.constant._typed_storage()))  # type: ignore[no-untyped-call]
    memo: dict[int, Any] = {}  # views go on sharing a storage
    with no_dispatch():
        for ref in refs:
            if (alias := ref()) is not None and alias.constant is not None:
                set_constant(alias, copy.deepcopy(alias.constant, memo))


def set_constant(t: FakeTensor, value: torch.Tensor) -> None:
    """Let a fake tensor know its values, until they are written into (`FakeTensor.constant`, torch 2.11 to 2.15)."""
    t.constant = value
    t.fake_mode.fake_tensor_converter.add_constant_storage_mapping(t)


def forget_constants(mode: FakeTensorMode) -> None:
    """Have no fake tensor know its values, which are real tensors (`constant_storage_mapping`, torch 2.11 to 2.15)."""
    known = mode.fake_tensor_converter.constant_storage_mapping
    for refs in known.values():
        for ref in refs:
            if (t := ref()) is not None:
                t.constant = None
    known.clear()
