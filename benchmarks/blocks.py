"""`torch.utils.checkpoint` around a model's repeated blocks, one by one or in runs of about sqrt(L), on any model."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential


class NotApplicableError(Exception):
    """Why an alternative cannot be put on a model."""


def checkpoint_blocks(model: nn.Module) -> list[str]:
    """Checkpoint every block, as the model's own library does it where it can.

    Returns:
        The paths of the checkpointed modules; complete once the model has been called.
    """
    paths = {m: name for name, m in model.named_modules()}
    found: list[str] = []
    try:
        if hasattr(model, "enable_gradient_checkpointing"):  # diffusers; `use_reentrant=False` is its default
            model.enable_gradient_checkpointing()  # type: ignore[operator]
        else:
            kwargs = {"use_reentrant": False}
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)  # type: ignore[operator]
    except (AttributeError, ValueError):  # the class does not support it
        for container in repeated(model):
            for block in container.children():
                found.append(paths[block])
                block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        return found
    for module in model.modules():
        inner = getattr(module, "_gradient_checkpointing_func", None)
        if inner is not None:
            module._gradient_checkpointing_func = partial(_note, inner, paths, found)  # type: ignore[assignment]
    return found


def _note(
    inner: Callable[..., Any], paths: dict[nn.Module, str], found: list[str], run: Any, *args: Any, **kwargs: Any
) -> Any:
    """Note which module is checkpointed: diffusers passes the module, transformers a partial of its forward pass."""
    bound = run.args[0] if isinstance(run, partial) and run.args else getattr(run, "func", run)
    path = paths[getattr(bound, "__self__", bound)]
    if path not in found:
        found.append(path)
    return inner(run, *args, **kwargs)


def repeated(model: nn.Module) -> list[nn.Module]:
    """The containers of the model's repeated blocks: of those that hold modules of one class, the longest and its kin.

    Kin have the same path but for numbers, as `stages.0.layers` and `stages.1.layers`.
    """
    kin: dict[str, list[nn.Module]] = {}
    for name, module in model.named_modules():
        alike = len({type(child) for child in module.children()}) == 1 and len(list(module.children())) > 1
        if isinstance(module, nn.ModuleList | nn.Sequential) and alike and any(True for _ in module.parameters()):
            kin.setdefault(re.sub(r"\d+", "*", name), []).append(module)
    if not kin:
        raise NotApplicableError("the model has no repeated blocks")
    return max(kin.values(), key=lambda found: max(len(list(m.children())) for m in found))


def checkpoint_groups(model: nn.Module, blocks: Sequence[str], call: Callable[[], object]) -> list[str]:
    """`checkpoint_sequential` over each sequence of blocks, in round(sqrt(L)) segments.

    Args:
        model: eager so far.
        blocks: paths of the blocks.
        call: calls the model, without a backward pass, to see what blocks pass on.

    Returns:
        The paths of the blocks that run again: all but those of each sequence's last segment.

    Raises:
        NotApplicableError: the blocks are no plain sequences.
    """
    lists: dict[str, list[str]] = {}
    for path in blocks:
        lists.setdefault(path.rpartition(".")[0], []).append(path)
    if all(len(paths) < 3 for paths in lists.values()):
        raise NotApplicableError("no three blocks follow each other")
    calls: dict[str, tuple[tuple[Any, ...], dict[str, Any], Any]] = {}
    hooks = [
        model.get_submodule(p).register_forward_hook(
            lambda _module, args, kwargs, output, p=p: calls.__setitem__(p, (args, kwargs, output)), with_kwargs=True
        )
        for p in blocks
    ]
    call()
    for hook in hooks:
        hook.remove()
    again: list[str] = []
    for paths in lists.values():
        for one, following in pairwise(paths):
            _check_sequence(one, following, calls)
        segments = max(1, round(math.sqrt(len(paths))))
        _chain([model.get_submodule(p) for p in paths], segments)
        again += paths[: len(paths) // segments * (segments - 1)]
    return again


def _check_sequence(one: str, following: str, calls: dict[str, tuple[tuple[Any, ...], dict[str, Any], Any]]) -> None:
    """Whether a block's output is the next one's first argument, and all other arguments are the same."""
    (args, kwargs, output), (next_args, next_kwargs, _) = calls[one], calls[following]
    if not next_args or output is not next_args[0]:
        raise NotApplicableError(f"{following} takes more than the output of {one}")
    if len(args) != len(next_args) or kwargs.keys() != next_kwargs.keys():
        raise NotApplicableError(f"{following} takes other arguments than {one}")
    pairs = [*zip(args[1:], next_args[1:], strict=True), *((kwargs[k], next_kwargs[k]) for k in kwargs)]
    for a, b in pairs:
        if a is not b and (isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor) or a != b):
            raise NotApplicableError(f"{following} takes other arguments than {one}")


def _chain(blocks: Sequence[nn.Module], segments: int) -> None:
    """The first block runs all of them; the others hand on what they are given."""
    forwards = [b.forward for b in blocks]

    def run(x: Any, *args: Any, **kwargs: Any) -> Any:
        functions = [lambda x, f=f: f(x, *args, **kwargs) for f in forwards]
        return checkpoint_sequential(functions, segments, x, use_reentrant=False)  # type: ignore[no-untyped-call]

    def hand_on(x: Any, *_args: Any, **_kwargs: Any) -> Any:
        return x

    for i, block in enumerate(blocks):
        block.forward = hand_on if i else run
