"""Fake tensors with real integers among them: code that asks what is in a mask or in indices takes its usual way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from planner.capture.trace.data_dependent import Answers
from planner.capture.trace.dynamo import to_fake
from planner.compat import pytree
from planner.compat.fake import FakeTensor, FakeTensorMode
from planner.compat.modules import buffers_of
from planner.compat.ops import schema_of
from planner.core.call import tensors_in

LARGEST = 16 * 2**20  # bytes of a tensor that is real


def to_fake_with_integers(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], answers: Answers
) -> tuple[FakeTensorMode, nn.Module, Any, Any]:
    """As `to_fake`, but copies of small tensors of integers and booleans keep their values."""
    recording, fake_model, fake_args, fake_kwargs = to_fake(model, args, kwargs, answers)

    def with_values(real: Any, fake: Any) -> Any:
        return real.detach().clone() if isinstance(real, torch.Tensor) and _has_values(real) else fake

    for ours, theirs in zip(fake_model.modules(), model.modules(), strict=True):
        for name, buffer in buffers_of(ours).items():
            buffers_of(ours)[name] = with_values(buffers_of(theirs).get(name), buffer)
    leaves, spec = pytree.tree_flatten((fake_args, fake_kwargs))
    given = pytree.tree_leaves((tuple(args), dict(kwargs)))
    mixed = pytree.tree_unflatten(list(map(with_values, given, leaves)), spec)
    return recording.mode, fake_model, *mixed


def call_op(mode: FakeTensorMode, func: Any, args: Any, kwargs: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """Run an op: for real where it takes nothing fake and makes only small integers and booleans, or one number.

    Args:
        mode: of the fake tensors.
        func: the op.
        args: what it takes.
        kwargs: the same, by keyword.
        tensors: those among both.
    """
    if any(isinstance(t, FakeTensor) or _overwritten(t) for t in tensors):
        args, kwargs = pytree.tree_map_only(
            torch.Tensor, lambda t: mode.from_tensor(t) if _overwritten(t) else t, (args, kwargs)
        )
        for t in _written(func, args, kwargs):
            vars(t.untyped_storage())["planner_overwritten"] = True
        return func(*args, **kwargs)
    if not tensors:
        with mode:
            made = func(*args, **kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags:
            return made  # another step draws another number
        small = all(_small(t) for t in pytree.tree_leaves(made) if isinstance(t, torch.Tensor))
        return func(*args, **kwargs) if small else made
    result = func(*args, **kwargs)
    if all(_small(t) for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor)) or schema_of(func).is_mutable:
        return result
    with mode:
        return func(*args, **kwargs)


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The real tensors that an op writes into."""
    arguments = enumerate(schema_of(func).arguments) if schema_of(func).is_mutable else ()
    places = [(at, each.name) for at, each in arguments if each.alias_info is not None and each.alias_info.is_write]
    found = tensors_in([args[at] if at < len(args) else kwargs.get(name) for at, name in places])
    return [t for t in found if not isinstance(t, FakeTensor)]


def _overwritten(t: torch.Tensor) -> bool:
    """Whether a real tensor has other values now, which are not known: something fake was written into it."""
    return not isinstance(t, FakeTensor) and "planner_overwritten" in vars(t.untyped_storage())


def _has_values(t: torch.Tensor) -> bool:
    return t.device.type != "meta" and not isinstance(t, FakeTensor) and _small(t)


def _small(t: torch.Tensor) -> bool:
    whole = not (t.is_floating_point() or t.is_complex())
    return t.numel() == 1 if not whole else t.untyped_storage().nbytes() <= LARGEST
