"""Models whose tensors are spread over a mesh of devices (`torch.distributed.tensor`): a real call of one communicates.

A call on fake tensors does not, so that one process can plan alone. Code that would call the model for real has to ask
`on_mesh` first.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from planner.compat.distributed import QuietTracker, rng_tracker, set_rng_tracker, swapped_by_ddp
from planner.core.call import tensors_in
from planner.errors import CaptureError
from planner.parallel.sharded import parameters_of


def on_mesh(model: nn.Module, args: Any = (), kwargs: Any = None) -> bool:
    """Whether parameters, buffers or arguments are `DTensor`s: all processes of their mesh have to call together."""
    return any(isinstance(t, DTensor) for t in (*parameters_of(model), *model.buffers(), *tensors_in((args, kwargs))))


def refuse_swapped(model: nn.Module) -> None:
    """Raise CaptureError where DistributedDataParallel was given a `device_mesh`, and swaps a model's parameters."""
    if any(map(swapped_by_ddp, model.parameters())):
        raise CaptureError(
            f"{type(model).__name__} is spread over a mesh, and DistributedDataParallel(device_mesh=...) puts its "
            "parameters in and out in each forward pass, which cannot be planned. Have the copies of it trained by "
            "torch.distributed.fsdp.fully_shard, or reduce the gradients after backward() without this wrapper"
        )


@contextmanager
def tracker_kept(*, off: bool = False) -> Iterator[None]:
    """Puts back the tracker that keeps the random numbers of a mesh in step.

    The first random op on a mesh makes the tracker, and the processes agree on its state, unless the op is only traced.

    Args:
        off: have no tracker meanwhile, so that random ops which are not traced do not communicate, either.
    """
    tracker = rng_tracker()
    if off:
        set_rng_tracker(QuietTracker())
    try:
        yield
    finally:
        set_rng_tracker(tracker)
