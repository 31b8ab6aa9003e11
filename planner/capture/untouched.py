"""A call of a model that leaves it as it was."""

from __future__ import annotations

import functools
import gc
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree

from .call import tensors_in
from .private import FakeTensor


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
def undone_on(error: type[Exception], model: nn.Module) -> Iterator[None]:
    """Where that error is raised, puts back what a call changes: buffers and the random state."""
    buffers = [(b, _bytes_of(b)) for b in model.buffers()]
    states = [(d, torch.cuda.get_rng_state(d)) for d in {p.device for p in model.parameters() if p.is_cuda}]
    state, python, numpy = _bytes_of(torch.get_rng_state()), random.getstate(), np.random.get_state()
    try:
        yield
    except error:
        with torch.no_grad():
            for buffer, saved in buffers:
                buffer.copy_(torch.from_numpy(saved).view(buffer.dtype).view(buffer.shape))
        torch.set_rng_state(torch.from_numpy(state))
        random.setstate(python)
        np.random.set_state(numpy)
        for device, kept in states:
            torch.cuda.set_rng_state(kept, device)
        raise


def _bytes_of(t: torch.Tensor) -> Any:
    """A copy in the host's memory, and not in what torch's allocator has there."""
    return t.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().copy()


@contextmanager
def random_kept() -> Iterator[None]:
    """Puts the random state of Python and NumPy back: a model may draw from them while it is planned."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def forget_fakes() -> None:
    """Clear every `functools.lru_cache` that kept a fake tensor: real calls would be given it."""
    caches = [c for c in gc.get_objects() if type(c) is functools._lru_cache_wrapper]
    for cache in caches:
        if any(isinstance(t, FakeTensor) for t in tensors_in(gc.get_referents(cache))):
            cache.cache_clear()
