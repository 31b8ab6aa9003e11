"""A call of a model that leaves it as it was."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree

from .call import tensors_in


@contextmanager
def untouched(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Without gradients; gives copies of the arguments. Buffers and the random state are put back afterwards."""
    tensors = [*tensors_in((args, dict(kwargs))), *model.parameters()]
    devices = sorted({t.device.index or 0 for t in tensors if t.is_cuda})
    buffers = [(b, b.detach().clone()) for b in model.buffers()]
    with torch.no_grad(), torch.random.fork_rng(devices=devices):
        copies = pytree.tree_map_only(torch.Tensor, torch.clone, (tuple(args), dict(kwargs)))
        try:
            yield copies
        finally:
            for buffer, saved in buffers:
                buffer.copy_(saved)


@contextmanager
def random_kept() -> Iterator[None]:
    """Puts the random state of Python and NumPy back: a model may draw from them while it is planned."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
