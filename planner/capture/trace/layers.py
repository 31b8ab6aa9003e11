"""Layers of torch.nn that torch.compile does not capture as they are: other helpers while a planned model compiles."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import partial
from itertools import chain
from typing import Any

import torch

from planner.compat.layers import (
    ONE_LAYER_LSTM,
    ONEDNN_LSTM,
    RNN_HELPER,
    onednn_lstm,
    replace_decompositions,
    replace_helpers,
    restore_helpers,
    runs_on_onednn,
)


class _Switch:
    """Something that is on while any thread is in it.

    Args:
        turn_on: turns it on, and returns what turns it off.
    """

    def __init__(self, turn_on: Callable[[], Callable[[], None]]) -> None:
        self._turn_on = turn_on
        self._lock = threading.Lock()
        self._users = 0
        self._turn_off: Callable[[], None] = _nothing

    def __enter__(self) -> None:
        with self._lock:
            if not self._users:
                self._turn_off = self._turn_on()
            self._users += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                self._turn_off()


def _nothing() -> None:
    """What turns off what is not on."""


def _own_helpers() -> Callable[[], None]:
    replace_helpers(_causal_if_told, partial(_layer_by_layer, RNN_HELPER))
    return restore_helpers


_IN_STEPS: ContextVar[bool] = ContextVar("lstms in steps", default=False)
_helpers, _decompositions = _Switch(_own_helpers), _Switch(replace_decompositions)


def helpers() -> AbstractContextManager[None]:
    """While it is on, in any thread, torch's layers call the helpers with which they were captured.

    Attention is not asked whether its mask is causal, which would stop compiling. Taking a recurrent layer apart keeps
    its dropout, which torch's `_rnn_helper` (2.13) leaves out. An LSTM that oneDNN's kernel runs in eager mode runs by
    that kernel, in the way that saves what its backward pass needs; torch would do so without gradients alone.
    """
    return _helpers


@contextmanager
def capturable_layers() -> Iterator[None]:
    """While it is on, in any thread, torch's layers can be captured.

    They have other `helpers`, and ops that have kernels of their own are captured as they are.
    """
    with _helpers, _decompositions:
        yield


@contextmanager
def lstms_in_steps() -> Iterator[None]:
    """Meanwhile an LSTM is traced as steps of plain ops, whatever kernel runs it here: for another device, or Inductor,
    whose forward pass runs without gradients, in which oneDNN's kernel leaves nothing for a backward pass.
    """
    before = _IN_STEPS.set(True)
    try:
        yield
    finally:
        _IN_STEPS.reset(before)


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
    own = layer_fn in (ONEDNN_LSTM, ONE_LAYER_LSTM) and not _IN_STEPS.get()
    own = own and runs_on_onednn([sequence, *chain(*hidden), *chain(*params)])
    sequence = sequence.transpose(0, 1) if batch_first else sequence
    if own:
        layer_fn, sequence = partial(onednn_lstm, (num_layers, bidirectional, batch_first)), sequence.contiguous()
    elif layer_fn is ONEDNN_LSTM:
        layer_fn = ONE_LAYER_LSTM
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
