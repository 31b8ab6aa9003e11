"""Training on several devices: DistributedDataParallel, `fully_shard`, meshes. Torch 2.11 to 2.15."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.fsdp._fully_shard._fsdp_state import _get_module_fsdp_state as state_of
from torch.distributed.tensor import _random
from torch.nn.parallel import DistributedDataParallel

__all__ = [
    "FSDPMeshInfo",
    "FSDPParam",
    "FSDPParamGroup",
    "FSDPState",
    "QuietTracker",
    "autocast_policy",
    "bucket_sizes",
    "forward_hooks",
    "gathered_parameter",
    "gradient_dtype",
    "has_unreduced",
    "keeps_root_gathered",
    "mixed_precision",
    "modules_of",
    "param_groups",
    "prefetched",
    "reshards_after_forward",
    "reshards_to_smaller_mesh",
    "rng_tracker",
    "running_ddp",
    "set_rng_tracker",
    "state_of",
    "swapped_by_ddp",
]


def running_ddp() -> DistributedDataParallel | None:
    """The DistributedDataParallel whose forward pass runs, or None (torch 2.11 to 2.15)."""
    return DistributedDataParallel._active_ddp_module


def bucket_sizes(ddp: DistributedDataParallel) -> tuple[int, int]:
    """Bytes of gradients that fill the first bucket, and each later one (2.11 to 2.15)."""
    cap = int(ddp.bucket_bytes_cap)
    first: int = distributed._DEFAULT_FIRST_BUCKET_BYTES  # type: ignore[attr-defined]
    return (first if ddp.bucket_bytes_cap_default else cap), cap


def swapped_by_ddp(parameter: nn.Parameter) -> bool:
    """Whether `DistributedDataParallel(device_mesh=...)` has put a plain tensor in the place of a DTensor.

    `torch.distributed.tensor.parallel.ddp` marks it with `_st_info` (torch 2.11 to 2.15).
    """
    return hasattr(parameter, "_st_info")


def rng_tracker() -> Any:
    """What keeps the random numbers of DTensors in step, None before the first random op (torch 2.11 to 2.15)."""
    return _random._rng_tracker


def set_rng_tracker(tracker: Any) -> None:
    """Put a tracker, or None, in the place of that of `rng_tracker` (torch 2.11 to 2.15)."""
    _random._rng_tracker = tracker


class QuietTracker:
    """A tracker under which random ops on a mesh draw as anywhere: 2.11 enters its context, later ones ask first."""

    distribute_region_enabled = False

    def _distribute_region(self, *_: Any, **__: Any) -> AbstractContextManager[None]:
        return nullcontext()


def param_groups(state: FSDPState) -> Sequence[FSDPParamGroup]:
    """The groups of parameters that a call of `fully_shard` gathers together (2.11 has one at most; 2.12 to 2.15)."""
    if hasattr(state, "_fsdp_param_groups"):
        return state._fsdp_param_groups
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def modules_of(state: FSDPState) -> Sequence[nn.Module]:
    """The modules that a call of `fully_shard` was given (torch 2.11 to 2.15)."""
    return state._modules


def autocast_policy(state: FSDPState) -> MixedPrecisionPolicy:
    """The policy by which inputs and outputs of its modules are cast (torch 2.11 to 2.15)."""
    return state._mp_policy


def prefetched(state: FSDPState) -> tuple[Sequence[FSDPState], Sequence[FSDPState]]:
    """The states that are gathered ahead, in the forward pass and in the backward pass (torch 2.11 to 2.15)."""
    return state._states_to_forward_prefetch, state._states_to_backward_prefetch


def keeps_root_gathered(state: FSDPState) -> bool:
    """Whether the parameters stay gathered after the forward pass if this is the root (torch 2.11 to 2.15)."""
    return bool(state._auto_reshard_after_forward)


def reshards_after_forward(group: FSDPParamGroup) -> bool:
    """Whether the gathered parameters are freed after the forward pass (torch 2.11 to 2.15)."""
    return group._reshard_after_forward


def reshards_to_smaller_mesh(group: FSDPParamGroup) -> bool:
    """Whether they are sharded over fewer ranks then: `reshard_after_forward` is a number (torch 2.11 to 2.15)."""
    return group._use_post_forward_mesh


def gathered_parameter(parameter: FSDPParam) -> nn.Parameter | None:
    """The whole parameter; None before it is gathered for the first time (torch 2.11 to 2.15)."""
    return getattr(parameter, "_unsharded_param", None)


def mixed_precision(parameter: FSDPParam) -> MixedPrecisionPolicy:
    """The policy of one parameter, which 2.15 lets differ within a group (`FSDPParam.mp_policy`, 2.11 to 2.15)."""
    return parameter.mp_policy


def gradient_dtype(parameter: FSDPParam) -> torch.dtype:
    """The data type in which gradients are reduced, and in which whole ones wait for a later reduction.

    Without a `reduce_dtype`, it is that of the gathered parameter in 2.11 to 2.14, and in 2.15, whose gathered
    parameters have a `grad_dtype` (`FSDPParam.unsharded_grad_dtype`), that of the shard.
    """
    shard, policy = parameter.sharded_param, mixed_precision(parameter)
    if not shard.is_floating_point():
        return shard.dtype
    as_shard = hasattr(FSDPParam, "unsharded_grad_dtype")
    return policy.reduce_dtype or (None if as_shard else policy.param_dtype) or shard.dtype


def has_unreduced(parameter: FSDPParam) -> bool:
    """Whether a whole gradient waits to be reduced: 2.11 to 2.14 move it where it has another data type than there."""
    return (
        getattr(parameter, "unsharded_accumulated_grad", None) is not None
        or getattr(gathered_parameter(parameter), "grad", None) is not None
    )


def forward_hooks(state: FSDPState) -> Iterator[tuple[Callable[..., Any], bool]]:
    """The hooks of `fully_shard` on its modules, and whether each runs before the forward pass (torch 2.11 to 2.15)."""
    before = [id(m._forward_pre_hooks) for m in state._modules]
    for handles in (state._pre_forward_hook_handle, state._post_forward_hook_handle):
        for handle in getattr(handles, "handles", (handles,)):
            hooks: Any = handle.hooks_dict_ref()
            yield hooks[handle.id], id(hooks) in before
