"""Layers of torch.nn that torch.compile does not capture as they are: other helpers while a planned model compiles."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from planner.compat.layers import (
    ONE_LAYER_LSTM,
    ONEDNN_LSTM,
    RNN_HELPER,
    replace_decompositions,
    replace_helpers,
    restore_helpers,
)

_lock = threading.Lock()
_users = 0
_put_back: Callable[[], None] = restore_helpers


@contextmanager
def capturable_layers() -> Iterator[None]:
    """While it is on, in any thread, torch's layers can be captured.

    Attention is not asked whether its mask is causal, which would stop compiling. Taking a recurrent layer apart keeps
    its dropout, which torch's `_rnn_helper` (2.13) leaves out, and goes for every LSTM: oneDNN's, which torch would
    call, saves nothing for a backward pass. Ops that have kernels of their own are captured as they are.
    """
    global _users, _put_back
    with _lock:
        if not _users:
            replace_helpers(_causal_if_told, partial(_layer_by_layer, RNN_HELPER))
            _put_back = replace_decompositions()
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if not _users:
                restore_helpers()
                _put_back()


def _causal_if_told(mask: Any, is_causal: bool | None = None, size: int | None = None) -> bool:
    return is_causal is True


def _layer_by_layer(
    one_layer: Callable[..., Any],
    sequence: torch.Tensor,
    hidden: Sequence[Any],
    params: Sequence[Any],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
    layer_fn: Callable[..., Any],
) -> tuple[torch.Tensor, list[Any]]:
    if layer_fn is ONEDNN_LSTM:
        layer_fn = ONE_LAYER_LSTM
    sequence = sequence.transpose(0, 1) if batch_first else sequence
    directions = 2 if bidirectional else 1
    final = []
    for i in range(num_layers):
        at = slice(i * directions, (i + 1) * directions)
        sequence, last = one_layer(
            sequence, hidden[at], params[at], has_biases, 1, 0.0, train, bidirectional, False, layer_fn
        )
        final += last
        if dropout and train and i < num_layers - 1:
            sequence = torch.dropout(sequence, dropout, train=True)
    return (sequence.transpose(0, 1) if batch_first else sequence), final
