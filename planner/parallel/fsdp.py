"""Groups of parameters that `torch.distributed.fsdp.fully_shard` gathers together, and their sizes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod
from typing import Any

from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy

from planner.compat.distributed import (
    FSDPMeshInfo,
    FSDPParamGroup,
    FSDPState,
    gradient_dtype,
    keeps_root_gathered,
    modules_of,
    param_groups,
    prefetched,
    reshards_after_forward,
    reshards_to_smaller_mesh,
)
from planner.core.parameter_group import ParameterGroup
from planner.errors import ModelError
from planner.parallel.sharded import compute_dtype, states_of


def groups_of(model: nn.Module) -> tuple[ParameterGroup, ...]:
    """Groups of parameters, the outer before the inner; empty where nothing is sharded.

    Raises:
        ModelError: the parameters are sharded in a way that is not counted.
    """
    paths = {id(m): name for name, m in model.named_modules()}
    states = states_of(model)
    groups = [(state, group) for state in states for group in param_groups(state)]
    roots = [s for s in states if not any(_inside(s, other, paths) for other in states)]
    if len(roots) > 1:
        raise ModelError(
            f"fully_shard() was called on {len(roots)} modules, none of them inside another; call it on the model "
            "itself as well, after its parts"
        )

    def at(ahead: Iterable[FSDPState]) -> tuple[int, ...]:
        return tuple(i for other in ahead for i, (state, _) in enumerate(groups) if state is other)

    return tuple(
        _group(
            group,
            paths=tuple(paths[id(m)] for m in modules_of(state)),
            root=state in roots and keeps_root_gathered(state),
            next_forward=at(prefetched(state)[0]),
            next_backward=at(prefetched(state)[1]),
        )
        for state, group in groups
    )


def _inside(state: FSDPState, other: FSDPState, paths: Mapping[int, str]) -> bool:
    outer = {f"{path}." if path else "" for m in modules_of(other) for path in [paths[id(m)]]}
    return other is not state and any(paths[id(m)].startswith(o) for m in modules_of(state) for o in outer)


def _group(group: FSDPParamGroup, *, root: bool, **known: Any) -> ParameterGroup:
    if reshards_to_smaller_mesh(group):
        raise ModelError("fully_shard(reshard_after_forward=a number) is not counted; give it True or False")
    if isinstance(group.offload_policy, CPUOffloadPolicy):
        raise ModelError(
            "fully_shard() was given a CPUOffloadPolicy: what is on the host at which time is not counted; leave it out"
        )
    if any(p.is_dtensor for p in group.fsdp_params):
        raise ModelError(
            "fully_shard() was given parameters that are sharded already (tensor parallel): the two together cannot be "
            "planned; use one of them"
        )
    ranks = group.mesh_info.shard_mesh_size if isinstance(group.mesh_info, FSDPMeshInfo) else 1
    shares = [(p, prod(p.padded_sharded_param_size)) for p in group.fsdp_params]
    computed = [n * compute_dtype(p).itemsize for p, n in shares]
    cast = [size for (p, n), size in zip(shares, computed, strict=True) if size != n * p.sharded_param.itemsize]
    trained = [(p, n) for p, n in shares if p.sharded_param.requires_grad]
    made = [n * max(gradient_dtype(p).itemsize for p, _ in trained) for _, n in trained]  # reduced together
    kept = [n * p.sharded_param.itemsize for p, n in trained]
    whole = ranks * sum(computed)
    return ParameterGroup(
        **known,
        whole=whole,
        buffer=whole if ranks > 1 else 0,
        casting=sum(cast) if ranks > 1 else 0,
        reduced=ranks * sum(made),
        share=sum(kept),
        scattering=sum(made) if made != kept else 0,
        copied=group.device.type == "cpu" and ranks > 1,
        stays=root or not reshards_after_forward(group),
    )
