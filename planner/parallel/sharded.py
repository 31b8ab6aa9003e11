"""Models that `torch.distributed.fsdp.fully_shard` has taken over, and copies of them that can be captured.

`fully_shard` gives a module a class of its own, parameters that are shards, and hooks around its call that gather them.
The hooks communicate and stay out of every compiled graph. In a copy, the parameters are whole, and other hooks cut the
graphs at the same places, with the same nodes of autograd and the same casts, but do not communicate.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from planner.compat import pytree
from planner.compat.distributed import (
    FSDPParam,
    FSDPParamGroup,
    FSDPState,
    autocast_policy,
    forward_hooks,
    gathered_parameter,
    gradient_dtype,
    has_unreduced,
    mixed_precision,
    param_groups,
    state_of,
)
from planner.compat.modules import modules_in, parameters_in


def parameters_of(model: nn.Module) -> list[nn.Parameter]:
    """The parameters of a model; the shard of each that is gathered at the moment, as after an evaluation."""
    return _sharded_again(model.parameters(), modules_in(model))


def parameters_among(modules: Sequence[nn.Module]) -> list[nn.Parameter]:
    """`parameters_of` the model that has these modules and no `parameters()` of its own."""
    return _sharded_again(parameters_in(modules), modules)


def _sharded_again(parameters: Iterable[nn.Parameter], modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    managed = _managed(modules)
    shards = {id(whole): p.sharded_param for _, p in managed if (whole := gathered_parameter(p)) is not None}
    return [shards.get(id(p), p) for p in parameters] if shards else list(parameters)


def unreduced_bytes(model: nn.Module) -> int:
    """Bytes of whole gradients that wait for a later microbatch to reduce them; 0 where each backward pass reduces.

    They wait with `set_requires_gradient_sync(False)`, from the first backward pass to the end of the next one without.
    """
    managed = list(_managed(modules_in(model)))
    if not any(not group.reduce_grads or has_unreduced(p) for group, p in managed):
        return 0
    trained = [p for _, p in managed if p.sharded_param.requires_grad]
    return sum(p.sharded_param.numel() * gradient_dtype(p).itemsize for p in trained)


def _managed(modules: Iterable[nn.Module]) -> Iterator[tuple[FSDPParamGroup, FSDPParam]]:
    return ((group, p) for s in _states(modules) for group in param_groups(s) for p in group.fsdp_params)


def states_of(model: nn.Module) -> list[FSDPState]:
    """The state of each call of `fully_shard` on modules of a model, the outer before the inner."""
    return _states(modules_in(model))


def _states(modules: Iterable[nn.Module]) -> list[FSDPState]:
    states = (state_of(m) for m in modules if isinstance(m, FSDPModule))
    return list({id(s): s for s in states if s is not None}.values())  # a copy for planning has none


@contextmanager
def as_defined(model: nn.Module, make: Callable[[torch.Tensor, torch.dtype], nn.Parameter]) -> Iterator[dict[int, Any]]:
    """Gives a memo with which `copy.deepcopy` copies a model without the shards, hooks and states of FSDP.

    FSDP's classes refuse to be copied; the modules do not have them meanwhile, and their copies have them afterwards.

    Args:
        model: is the same afterwards.
        make: a shard, and a data type -> the whole parameter in the copy.
    """
    memo: dict[int, Any] = {}
    sharded = [m for m in model.modules() if isinstance(m, FSDPModule)]
    classes = [type(m) for m in sharded]
    for state in states_of(model):
        memo[id(state)] = None
        _instead_of_parameters(state, make, memo)
        _instead_of_hooks(state, memo)
    try:
        for module, kind in zip(sharded, classes, strict=True):
            module.__class__ = kind.__mro__[2]  # its own is behind FSDP's two
        yield memo
    finally:
        for module, kind in zip(sharded, classes, strict=True):
            for each in (module, memo.get(id(module), module)):  # torch.compile tells modules apart by their classes
                each.__class__ = kind


def _instead_of_parameters(state: FSDPState, make: Callable[..., nn.Parameter], memo: dict[int, Any]) -> None:
    for group in param_groups(state):
        for param in group.fsdp_params:
            whole = make(param.sharded_param, compute_dtype(param))
            for parameter in (param.sharded_param, gathered_parameter(param)):
                if parameter is not None:
                    memo[id(parameter)] = whole


def compute_dtype(parameter: FSDPParam) -> torch.dtype:
    """The data type of a parameter once it is gathered."""
    shard, wanted = parameter.sharded_param, mixed_precision(parameter).param_dtype
    return wanted if wanted is not None and shard.is_floating_point() else shard.dtype


def _instead_of_hooks(state: FSDPState, memo: dict[int, Any]) -> None:
    policy = autocast_policy(state)
    inputs = policy.param_dtype if policy.cast_forward_inputs else None

    # hooks run as they are, beside the compiled graphs
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        args, kwargs = _cast((args, kwargs), inputs)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        at = [i for i, t in enumerate(leaves) if isinstance(t, torch.Tensor) and t.requires_grad]
        if at and torch.is_grad_enabled():
            same: Any = _Same.apply(*(leaves[i] for i in at))  # type: ignore[no-untyped-call]
            for i, t in zip(at, same, strict=True):
                leaves[i] = t
        return pytree.tree_unflatten(leaves, spec)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def after(module: nn.Module, args: Any, output: Any) -> Any:
        return _cast(output, policy.output_dtype)

    for hook, runs_before in forward_hooks(state):
        memo[id(hook)] = before if runs_before else after


class _Same(torch.autograd.Function):
    """Autograd's node at the entry of a module, as FSDP's."""

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return gradients


def _cast(tensors: Any, dtype: torch.dtype | None) -> Any:
    if dtype is None:
        return tensors
    return pytree.tree_map_only(torch.Tensor, functools.partial(_cast_one, dtype), tensors)


def _cast_one(dtype: torch.dtype, t: torch.Tensor) -> torch.Tensor:
    return t.to(dtype) if t.is_floating_point() else t
