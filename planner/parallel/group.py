"""Which processes train a model together."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from planner.compat.distributed import running_ddp
from planner.errors import OptionError
from planner.parallel.sharded import parameters_of


def world_size() -> int:
    """How many processes there are; 1 where no process group is initialised, or one of the backend "fake"."""
    here = dist.is_available() and dist.is_initialized() and dist.get_backend() != "fake"
    return dist.get_world_size() if here else 1


def communication_buffers(where: torch.device) -> int:
    """Bytes that NCCL takes of a GPU for the processes' communication, outside of PyTorch's allocator.

    About what one communicator has by default: NCCL_BUFFSIZE (4 MiB) for each direction of up to 32 channels.
    """
    if where.type != "cuda" or world_size() == 1 or "nccl" not in str(dist.get_backend()):
        return 0
    return 2 * 32 * 4 * 2**20


def ddp_of(model: nn.Module) -> nn.parallel.DistributedDataParallel | None:
    """The DistributedDataParallel that calls the model, or a module around it, at the moment; None for none."""
    ddp = running_ddp()
    return ddp if ddp is not None and any(m is model for m in ddp.modules()) else None


def together(model: nn.Module) -> bool:
    """Whether this call of the model is by DistributedDataParallel, or on parameters that several processes share."""
    return ddp_of(model) is not None or sharded(model)


def sharded(model: nn.Module) -> bool:
    """Whether a parameter is a DTensor: one of several processes' parts of it."""
    return world_size() > 1 and any(isinstance(p, DTensor) for p in parameters_of(model))


def ranks_of(model: nn.Module) -> tuple[list[int], Any]:
    """The ranks that run this step of the model, this one among them, and their process group; none for one rank alone.

    The ranks are those of the DistributedDataParallel that calls the model, or of the mesh that its parameters are
    spread over. Other processes may run models of their own, as the stages of a pipeline, and no rank waits for them.
    The process group is None where that of a mesh is not known.
    """
    ddp = ddp_of(model)
    if world_size() == 1:
        return [], None
    if ddp is not None:
        group: Any = ddp.process_group
        ranks = dist.get_process_group_ranks(group)
    elif sharded(model):
        meshes = [p.device_mesh for p in parameters_of(model) if hasattr(p, "device_mesh")]
        ranks = sorted(max(meshes, key=lambda mesh: mesh.size()).mesh.flatten().tolist())
        group = dist.group.WORLD if len(ranks) == world_size() else None
    else:
        return [], None
    return (ranks, group) if len(ranks) > 1 else ([], None)


def refuse_verification(model: nn.Module) -> None:
    """Raise OptionError where steps of this rank alone, which are to be measured, would disturb the others."""
    ddp = ddp_of(model)
    if ddp is not None and ddp.static_graph:
        raise OptionError(
            "apply(verify=True) runs steps of its own, which DistributedDataParallel(static_graph=True) would take for "
            "its first: leave one of them out, or call plan.verify() before the model is wrapped"
        )
    if sharded(model):
        raise OptionError(
            "apply(verify=True) runs steps on one rank alone, and this model's parameters are spread over several, "
            "which it would wait for: leave it out"
        )


def other_world(ranks: int, shard: int, model: nn.Module) -> str:
    """How many processes a plan is for, in words, where each of the processes here has another part of the model.

    Args:
        ranks: how many processes there were when it was made; a plan of one process alone is for `shard` processes.
        shard: how many processes share parameters, as in `plan()`.
        model: of the plan; one that is whole on every process has the same plan for any number of them.

    Returns:
        "" where the number of processes is that of the plan, or does not matter.
    """
    here = world_size()
    there = shard if ranks == 1 and here > 1 else ranks
    if here == there or (shard == 1 and not sharded(model)):
        return ""
    return f"it is for {there} processes with a part of the parameters each, and this is one of {here}"
