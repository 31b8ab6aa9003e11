"""The buckets of DistributedDataParallel, in which it adds up the gradients of all processes."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from planner.compat.distributed import bucket_sizes
from planner.parallel.group import ddp_of

LINE = "DDP buckets"  # of the account


@dataclass(frozen=True, slots=True)
class Buckets:
    """Buckets of one process.

    Attributes:
        nbytes: bytes of all buckets, which stay allocated during the whole step.
        views: whether gradients are views of the buckets: a backward pass copies each gradient there and frees it.
    """

    nbytes: int
    views: bool


def buckets_of(model: nn.Module) -> Buckets | None:
    """The buckets of the DistributedDataParallel that calls the model at the moment; None where none does.

    `initialize_buckets` in torch/csrc/distributed/c10d/reducer.cpp allocates one element for each element of every
    parameter that needs a gradient, in its dtype; none for sparse gradients. In the second step, new buckets in another
    order, as large together, replace the old ones, which are freed before.
    """
    ddp = ddp_of(model)
    if ddp is None:
        return None
    sparse = {id(m.weight) for m in ddp.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag)) and m.sparse}
    reduced = [
        p
        for name, p in ddp.module.named_parameters()
        if p.requires_grad and name not in ddp.parameters_to_ignore and id(p) not in sparse
    ]
    return Buckets(sum(p.numel() * p.element_size() for p in reduced), bool(ddp.gradient_as_bucket_view))


def gradients_together(model: nn.Module) -> tuple[int, ...]:
    """Bytes of gradients that the DistributedDataParallel around a model waits for, before it sends them: for its first
    bucket, and for each of the others. Empty where none calls the model at the moment.
    """
    ddp = ddp_of(model)
    return () if ddp is None else bucket_sizes(ddp)
