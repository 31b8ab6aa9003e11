"""Static memory: the bytes that are live all the time beside a step's activations, line by line."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from planner.core.account import BATCH, UNREDUCED
from planner.core.call import storages, tensors_in
from planner.core.objects import leaves
from planner.core.plan import EARLIER
from planner.devices.specs import Device
from planner.parallel.sharded import parameters_of, unreduced_bytes


def storage_bytes(things: Iterable[Any], shard: int = 1) -> int:
    """Bytes of the tensors among the things, each storage counted once; one device's share of each."""
    return sum(-(-size // shard) for size in storages(list(things)).values())


def trained_bytes(model: nn.Module, shard: int = 1) -> int:
    """Bytes of the parameters that need a gradient, and so of all gradients; one device's share of each."""
    return storage_bytes((p for p in parameters_of(model) if p.requires_grad), shard)


def account(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    device: Device,
    *,
    optimizer_state: int = 0,
    accumulate: bool = False,
    shard: int = 1,
) -> dict[str, int]:
    """The lines of the budget that are live all the time: name -> bytes.

    Args:
        model: the model that is trained.
        args: its arguments.
        kwargs: the same, by keyword.
        device: its sizes of the CUDA context and of cuBLAS workspaces count.
        optimizer_state: bytes, of one device.
        accumulate: whether the gradients of earlier microbatches are live through the step.
        shard: how many devices share parameters, gradients and optimizer state.
    """
    where = next(model.parameters()).device
    lines = {
        "parameters": storage_bytes(parameters_of(model), shard),
        "parameters gathered for use": gathered_bytes(model) if shard > 1 else 0,
        "buffers": storage_bytes(model.buffers()),
        BATCH: storage_bytes(batch_tensors(args, kwargs, where)),
        "optimizer state": optimizer_state,
        "CUDA context": device.context,
        "cuBLAS workspace": device.blas,
    }
    if accumulate:
        lines[EARLIER] = trained_bytes(model, shard)
    if waiting := unreduced_bytes(model):
        lines[UNREDUCED] = waiting
    return lines


def batch_tensors(args: Sequence[Any], kwargs: Mapping[str, Any], where: torch.device) -> list[torch.Tensor]:
    """The tensors of a batch that take memory where the model is: those on the host take none on a GPU."""
    return [
        t
        for t in tensors_in(leaves((tuple(args), dict(kwargs))))
        if where.type in ("cpu", "meta") or t.device.type == where.type
    ]


def gathered_bytes(model: nn.Module) -> int:
    """Bytes of whole parameters that are there at once when devices share them.

    As `torch.distributed.fsdp.fully_shard` does it, wrapped block by block: the block that runs and the one fetched
    ahead of it, and the parameters of no block. A block is a member of an outermost `nn.ModuleList`.
    """
    lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    outermost = [name for name in lists if not any(name.startswith(other + ".") for other in lists)]
    blocks = [storages(list(b.parameters())) for name in outermost for b in model.get_submodule(name).children()]
    in_blocks = {storage for block in blocks for storage in block}
    rest = sum(size for storage, size in storages(list(model.parameters())).items() if storage not in in_blocks)
    largest = sorted(sum(block.values()) for block in blocks)[-2:]
    return rest + sum(largest)
