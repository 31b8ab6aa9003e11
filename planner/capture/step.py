"""The whole training step, captured under fake tensors: every region, and what happens between the passes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..errors import BatchError, CaptureError, ModelError
from .dry import DryPass
from .dynamo import Partition, lone_loss, to_fake
from .outside import LossFn, OutsideLoss, checked_loss, differentiable, leaves
from .private import FakeTensorMode
from .region import Link, Region


@dataclass(frozen=True)
class TrainingGraph:
    """The training step of a model on one batch.

    Attributes:
        regions: in the order in which their forward passes run.
        detached: for each Dynamo graph, by its key, the outputs that get no gradient and are cut off before capture.
        loss: the loss, as far as it is computed outside the model.
        links: what regions make for each other.
    """

    regions: tuple[Region, ...]
    detached: Mapping[str, tuple[int, ...]] = field(repr=False)
    loss: OutsideLoss
    links: tuple[Link, ...] = ()


def capture(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    split: Partition,
    loss_fn: LossFn | None = None,
) -> TrainingGraph:
    """Capture the training step under fake tensors: no memory, no compute, the model untouched.

    Args:
        model: in the mode (training or evaluation) in which it will run.
        args: positional arguments that it is called with.
        kwargs: keyword arguments.
        split: a region -> any forward and backward graph of it, for the pass under fake tensors.
        loss_fn: the model's output -> the scalar loss; None: the loss is among the outputs (`find_loss`), or unknown,
            and then every differentiable output gets a gradient.

    Raises:
        BatchError: the model does not accept the arguments, or the loss is not a differentiable scalar.
        CaptureError: the step cannot be written as graphs.
    """
    mode, fake_model, fake_args, fake_kwargs = to_fake(model, args, kwargs)
    unsure = _try_eagerly(mode, fake_model, fake_args, fake_kwargs, loss_fn)
    cut: dict[str, tuple[int, ...]] | None = None
    for _ in range(2):
        dry = DryPass(mode, split, lone_loss if cut is None and loss_fn is None else (cut or {}))
        try:
            output = dry.run(fake_model, fake_args, fake_kwargs)
        except CaptureError:
            if unsure is not None:
                blame(model, args, kwargs, unsure)
            raise
        cut, loss = dry.gradients(output, loss_fn)
        if cut == dry.cut:
            return TrainingGraph(tuple(dry.regions), cut, loss, dry.links(output))
    raise CaptureError(f"{type(model).__name__}: which outputs get a gradient changes from one pass to the next")


def _try_eagerly(
    mode: FakeTensorMode, model: nn.Module, args: Any, kwargs: Any, loss_fn: LossFn | None
) -> Exception | None:
    """Call the fake model without a compiler; returns what it raised, which may be a limit of fake tensors."""
    try:
        with mode, torch.enable_grad():
            output = model(*args, **kwargs)
    except Exception as e:
        return e
    if not any(map(differentiable, leaves(output))):
        raise ModelError(f"{type(model).__name__}: no output of the model depends on a parameter that needs a gradient")
    if loss_fn is not None:
        with mode:
            checked_loss(loss_fn, output)
    return None


def blame(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], error: Exception) -> None:
    """Raise BatchError if the model itself refuses the batch, run for real without gradients; return if it does not."""
    tensors = [t for t in pytree.tree_leaves((args, dict(kwargs))) if isinstance(t, torch.Tensor)]
    devices = sorted({t.device.index or 0 for t in (*tensors, *model.parameters()) if t.is_cuda})
    buffers = [(b, b.detach().clone()) for b in model.buffers()]
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=devices):
            model(*args, **kwargs)
    except Exception as e:
        given = ", ".join(f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in tensors)
        raise BatchError(
            f"{type(model).__name__} does not accept the batch ({given or 'no tensors'}): {type(e).__name__}: {e}"
        ) from error
    finally:
        with torch.no_grad():
            for buffer, saved in buffers:
                buffer.copy_(saved)
