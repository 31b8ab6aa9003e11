"""Autograd's sums of gradients: its engine writes them in place of the first one, unless a dispatch mode is on.

The rule is that of `can_accumulate_inplace` in torch/csrc/autograd/input_buffer.cpp.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

import torch

from planner.compat.autograd import called_by_engine, references
from planner.compat.tensors import TorchDispatchMode, is_traceable_wrapper_subclass
from planner.core.layout import is_dense

_ADD, _ADD_IN_PLACE = torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor


def in_place_of(func: Any, args: Any) -> Any:
    """The op that runs in a dispatch mode, in place if it is a sum that goes where its first gradient is."""
    dense = func is _ADD and args[0].layout is torch.strided
    return _ADD_IN_PLACE if dense and _held(args) == last_references() and takes(*args[:2]) else func


def as_without_modes(func: Any, args: Any) -> Any:
    """The same for real tensors, if it is the engine that asks for the sum, not code in Python."""
    engines = func is _ADD and not torch.is_grad_enabled() and called_by_engine()
    return in_place_of(func, args) if engines else func


def _held(args: Any) -> tuple[int, ...]:
    """How often the first argument of an op is referenced, by Python's variables, too: a hook may have kept it."""
    return (*references(args[0]), sys.getrefcount(args[0]))


def takes(sum_so_far: torch.Tensor, term: Any) -> bool:
    """Whether a sum of gradients may go where its first term is, which nothing else names."""
    if not isinstance(term, torch.Tensor) or is_traceable_wrapper_subclass(sum_so_far):
        return False
    same = (sum_so_far.shape, sum_so_far.dtype) == (term.shape, term.dtype)
    return same and is_dense(sum_so_far)


@cache
def last_references() -> tuple[int, ...]:
    """How often, in a dispatch mode, a gradient is referenced that only autograd's engine holds.

    It is to be asked for first where no mode is called: a backward pass runs.
    """
    seen: list[tuple[int, ...]] = []

    class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is _ADD:
                seen.append(_held(args))
            return func(*args, **(kwargs or {}))

    with torch.inference_mode(False), torch.enable_grad():
        x = torch.ones(2, requires_grad=True) * 2
        y = x.exp().sum() + x.tanh().sum()
        with Watch():  # type: ignore[no-untyped-call]
            y.backward()  # type: ignore[no-untyped-call]
    return seen[0]
