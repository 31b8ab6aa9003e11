"""The lines of the budget that are held all the time, as a request has them."""

from __future__ import annotations

from .capture.private import FakeTensorMode
from .capture.shapes import enlarged
from .capture.sharded import parameters_of
from .distributed.buckets import LINE as BUCKETS
from .estimate.optimizer import optimizer_memory
from .estimate.resident import account
from .request import GB, Request

OPTIMIZER_STEP = "optimizer step"  # a line that can be set, and is not held all the time


def account_of(request: Request) -> tuple[dict[str, int], int | None]:
    """The lines, fragmentation apart: name -> bytes; bytes of the optimizer's step, None where it is not counted."""
    given = {name: round(size * GB) for name, size in request.account_gb.items()}
    optimizer = optimizer_memory(parameters_of(request.model), request.optimizer, cuda=request.device.type == "cuda")
    args, kwargs, buckets = request.args or (), request.kwargs, request.buckets
    if request.maxima is not None:
        args, kwargs = enlarged(args, kwargs, request.maxima, FakeTensorMode(allow_non_fake_inputs=True))
    lines = account(
        request.model,
        args,
        kwargs,
        request.device,
        optimizer_state=-(-optimizer.state // request.shard),
        accumulate=request.accumulate and not (buckets and buckets.views),
        shard=request.shard,
    )
    if buckets is not None:
        lines[BUCKETS] = buckets.nbytes
    counted = request.optimizer is not None or OPTIMIZER_STEP in given
    step = given.pop(OPTIMIZER_STEP, -(-optimizer.step // request.shard))
    return {**lines, **given}, step if counted else None
