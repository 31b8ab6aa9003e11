"""What DistributedDataParallel holds beside a model: buckets in which gradients of all processes are added up."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from planner.parallel.group import ddp_of

LINE = "DDP buckets"  # of the account


@dataclass(frozen=True, slots=True)
class Buckets:
    """Buckets of one process.

    Attributes:
        nbytes: all of them; they are held all the time.
        views: whether gradients are views of them, so that those which a backward pass makes are copied there and
            freed.
    """

    nbytes: int
    views: bool


def buckets_of(model: nn.Module) -> Buckets | None:
    """Those of the DistributedDataParallel that calls the model at the moment; None for none.

    As `initialize_buckets` in torch/csrc/distributed/c10d/reducer.cpp allocates them: one element for each of every
    parameter that needs a gradient, in its dtype; none for sparse gradients. Made anew in the second step, in another
    order, they take as much, and the old ones are gone before.
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
