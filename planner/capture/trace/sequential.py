"""How Dynamo traces `torch.utils.checkpoint.checkpoint_sequential`, at which it breaks the graph otherwise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential


@cache
def trace_sequential_checkpoints() -> None:
    """Have torch.compile trace it as the calls of `checkpoint` that it makes, from now on, and in all models."""
    with suppress(ValueError):  # another library, or a newer torch, has it traced already
        torch.compiler.substitute_in_graph(checkpoint_sequential, skip_signature_check=True)(_in_segments)


def _in_segments(functions: Any, segments: Any, input: Any, use_reentrant: Any = None, **kwargs: Any) -> Any:
    """As torch's: all segments but the last are checkpointed."""
    every = list(functions.children()) if isinstance(functions, nn.Sequential) else functions
    size, end = len(every) // segments, 0
    for start in range(0, size * (segments - 1), size):
        end = start + size
        reentrant = True if use_reentrant is None else use_reentrant
        input = checkpoint(_one_by_one(every[start:end]), input, use_reentrant=reentrant, **kwargs)
    return _one_by_one(every[end:])(input)


def _one_by_one(functions: Sequence[Callable[[Any], Any]]) -> Callable[[Any], Any]:
    def run(x: Any) -> Any:
        for function in functions:
            x = function(x)
        return x

    return run
