"""Runs the custom ops of a forward pass twice on the same inputs, to find those that do not give the same again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from planner.capture.recomputability import OWN, draws_apart, is_collective
from planner.compat import pytree
from planner.compat.ops import OpOverload, is_functional, schema_of
from planner.compat.tensors import TorchDispatchMode
from planner.devices.accelerator import accelerator_of


def ops_unlike_again(forward: Callable[[], object], device: torch.device) -> tuple[str, ...]:
    """The names of custom ops whose second run, under the random state of the first, gave other results than the first.

    Args:
        forward: runs the model without a plan.
        device: whose random state is put back, beside the CPU's.
    """
    with _Twice(device) as seen:
        forward()
    return tuple(sorted(seen.unlike))


class _Twice(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device
        self.unlike: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not _is_custom(func, args, kwargs):
            return func(*args, **kwargs)
        accelerator = accelerator_of(self.device)
        with torch.random.fork_rng(devices=[]):
            before = None if accelerator is None else accelerator.random_state(self.device)
            again = func(*args, **kwargs)
        if accelerator is not None and before is not None:
            accelerator.set_random_state(self.device, before)
        result = func(*args, **kwargs)
        pairs = zip(pytree.tree_leaves(result), pytree.tree_leaves(again), strict=True)
        if not all(_same(a, b) for a, b in pairs):
            self.unlike.add(schema_of(func).name)
        return result


def _is_custom(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an op is none of torch's own, and nothing but its results tells that it ran."""
    if not isinstance(func, OpOverload) or func.namespace in OWN or is_collective(func):
        return False
    return is_functional(func) and not draws_apart(args, kwargs)


def _same(a: Any, b: Any) -> bool:
    if not isinstance(a, torch.Tensor):
        return bool(a == b)
    return bool(torch.equal(a, b) or torch.allclose(a, b, 0, 0, equal_nan=True))
