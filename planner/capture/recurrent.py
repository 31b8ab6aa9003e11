"""Recurrent layers as torch.compile takes them apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from .private import decompositions


@contextmanager
def dropout_between_layers() -> Iterator[None]:
    """While it is on, taking a recurrent layer apart keeps its dropout: torch's `_rnn_helper` (2.13) leaves it out."""
    original = decompositions._rnn_helper
    decompositions._rnn_helper = partial(_layer_by_layer, original)
    try:
        yield
    finally:
        decompositions._rnn_helper = original


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
