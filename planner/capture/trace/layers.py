"""Layers of torch.nn that torch.compile does not capture as they are: other helpers while a planned model compiles."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import partial
from itertools import chain
from math import isqrt
from typing import Any, Literal

import torch

from planner.capture.regions.region import Region
from planner.capture.trace.switch import Switch
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


def _own_helpers() -> Callable[[], None]:
    replace_helpers(_causal_if_told, partial(_layer_by_layer, RNN_HELPER))
    return restore_helpers


_LSTMS: ContextVar[Literal["whole", "in parts", "in steps"]] = ContextVar("how LSTMs are traced", default="whole")
_helpers, _decompositions = Switch(_own_helpers), Switch(replace_decompositions)


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
    before = _LSTMS.set("in steps")
    try:
        yield
    finally:
        _LSTMS.reset(before)


@contextmanager
def lstms_in_parts(*, on: bool = True) -> Iterator[None]:
    """Meanwhile, where it is on, oneDNN's kernel is traced as one call for each part of an LSTM's sequence: what each
    saves for its backward pass is kept, or made again, by itself.
    """
    before = _LSTMS.set("in parts" if on else _LSTMS.get())
    try:
        yield
    finally:
        _LSTMS.reset(before)


def lstms_traced() -> str:
    """How LSTMs are traced now: "whole", "in parts" or "in steps"."""
    return _LSTMS.get()


def has_whole_lstm(region: Region) -> bool:
    """Whether oneDNN's kernel runs an LSTM of a region for its whole sequence, which could be in parts."""
    target = torch.ops.aten.mkldnn_rnn_layer.default
    return not region.lstms_in_parts and bool(region.joint.graph.find_nodes(op="call_function", target=target))


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
    own = layer_fn in (ONEDNN_LSTM, ONE_LAYER_LSTM) and _LSTMS.get() != "in steps"
    own = own and runs_on_onednn([sequence, *chain(*hidden), *chain(*params)])
    sequence = sequence.transpose(0, 1) if batch_first else sequence
    if own:
        layer_fn, sequence = partial(onednn_lstm, (num_layers, bidirectional, batch_first)), sequence.contiguous()
        layer_fn = partial(_part_by_part, layer_fn) if _LSTMS.get() == "in parts" else layer_fn
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


def _part_by_part(
    layer: Callable[..., Any],
    sequence: torch.Tensor,
    state: Any,
    params: Sequence[torch.Tensor],
    has_biases: bool,
    reverse: bool = False,
) -> tuple[torch.Tensor, Any]:
    """A layer of an LSTM, called for one part of the sequence after the other.

    The more parts there are, the less each saves, and the more states lie between them: their number and their length
    are about equal.
    """
    parts = torch.split(sequence, max(1, isqrt(len(sequence) // 2)))
    outputs = []
    for part in reversed(parts) if reverse else parts:
        output, state = layer(part, state, params, has_biases, reverse=reverse)
        outputs.append(output)
    return torch.cat(outputs[::-1] if reverse else outputs), state
