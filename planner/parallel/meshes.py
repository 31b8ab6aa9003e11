"""Models whose tensors are spread over a mesh of devices (`torch.distributed.tensor`): a real call of one communicates.

Under fake tensors nothing does, so that one process can plan alone. What would run the model for real has to ask first.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from planner.core.call import tensors_in
from planner.errors import CaptureError
from planner.parallel.sharded import parameters_of


def on_mesh(model: nn.Module, args: Any = (), kwargs: Any = None) -> bool:
    """Whether parameters, buffers or arguments are `DTensor`s: all processes of their mesh have to call together."""
    return any(isinstance(t, DTensor) for t in (*parameters_of(model), *model.buffers(), *tensors_in((args, kwargs))))


def refuse_swapped(model: nn.Module) -> None:
    """Raise CaptureError for what DistributedDataParallel makes of a model on a mesh (its `device_mesh`)."""
    # torch.distributed.tensor.parallel.ddp, torch 2.11 to 2.13
    if any(hasattr(p, "_st_info") for p in model.parameters()):
        raise CaptureError(
            f"{type(model).__name__} is spread over a mesh, and DistributedDataParallel(device_mesh=...) puts its "
            "parameters in and out in each forward pass, which cannot be planned. Have the copies of it trained by "
            "torch.distributed.fsdp.fully_shard, or reduce the gradients after backward() without this wrapper"
        )


@contextmanager
def tracker_kept(*, off: bool = False) -> Iterator[None]:
    """Puts back what keeps the random numbers of a mesh in step.

    The first random op on a mesh makes it, and has the processes agree on its state, unless that op is only traced.

    Args:
        off: do without meanwhile, so that random ops which are not traced do not communicate, either.
    """
    module: Any = sys.modules.get("torch.distributed.tensor._random")
    tracker = getattr(module, "_rng_tracker", None)
    if module is not None and off:
        module._rng_tracker = SimpleNamespace(distribute_region_enabled=False)
    try:
        yield
    finally:
        if module is not None:
            module._rng_tracker = tracker
