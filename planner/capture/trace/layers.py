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
from torch.nn.utils.parametrize import is_parametrized

from planner.capture.regions.region import Region
from planner.capture.trace.recurrent import can_run, recurrent_layer
from planner.capture.trace.switch import Switch
from planner.compat.layers import (
    ONE_LAYER_LSTM,
    ONEDNN_LSTM,
    RNN_HELPER,
    kind_of,
    onednn_lstm,
    replace_decompositions,
    replace_helpers,
    restore_helpers,
    runs_on_onednn,
)
from planner.errors import CaptureError


def _own_helpers() -> Callable[[], None]:
    replace_helpers(_causal_if_told, partial(_layer_by_layer, RNN_HELPER))
    return restore_helpers


_Way = Literal["whole", "in parts", "LSTMs in steps", "in steps"]
_TRACED: ContextVar[_Way] = ContextVar("how recurrent layers are traced", default="whole")
_helpers, _decompositions = Switch(_own_helpers), Switch(replace_decompositions)


def helpers() -> AbstractContextManager[None]:
    """While it is on, in any thread, torch's layers call the helpers with which they were captured.

    Attention is not asked whether its mask is causal, which would stop compiling. Taking a recurrent layer apart keeps
    its dropout, which torch's `_rnn_helper` (2.13) leaves out. An LSTM that oneDNN's kernel runs in eager mode runs by
    that kernel, in the way that saves what its backward pass needs; torch would do so without gradients alone. Other
    recurrent layers on a CPU run by `recurrent_layer`.
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
def rnns_in_steps(*, lstms_alone: bool = False) -> Iterator[None]:
    """Meanwhile recurrent layers are traced as steps of plain ops, whatever kernel runs them here: for another device.

    Args:
        lstms_alone: only LSTMs are: for Inductor, whose forward pass runs without gradients, in which oneDNN's kernel
            leaves nothing for a backward pass.
    """
    with _traced("LSTMs in steps" if lstms_alone else "in steps"):
        yield


@contextmanager
def rnns_in_parts(*, on: bool = True) -> Iterator[None]:
    """Meanwhile, where it is on, a recurrent layer is traced as one call for each part of its sequence: what each saves
    for its backward pass is kept, or made again, by itself.
    """
    with _traced("in parts" if on else _TRACED.get()):
        yield


@contextmanager
def _traced(way: _Way) -> Iterator[None]:
    before = _TRACED.set(way)
    try:
        yield
    finally:
        _TRACED.reset(before)


def rnns_traced() -> str:
    """How recurrent layers are traced now."""
    return _TRACED.get()


def has_whole_rnn(region: Region) -> bool:
    """Whether one call runs a recurrent layer of a region for its whole sequence, which could be in parts."""
    targets = torch.ops.aten.mkldnn_rnn_layer.default, torch.ops.planner.recurrent_layer.default
    found = (region.joint.graph.find_nodes(op="call_function", target=target) for target in targets)
    return not region.rnns_in_parts and any(found)


def refuse_parametrized_rnns(model: torch.nn.Module) -> None:
    """Raise CaptureError where a recurrent layer has weights of `torch.nn.utils.parametrize`.

    Its `forward` asks with `hasattr()` for each, which has Dynamo make them while it traces, on the real module: a
    spectral norm's vectors would be updated more often than in eager mode.
    """
    for path, module in model.named_modules():
        if isinstance(module, torch.nn.RNNBase) and is_parametrized(module):
            raise CaptureError(
                f"{path or type(module).__name__} is a recurrent layer with parametrized weights (weight_norm, "
                "spectral_norm), which torch.compile makes more often than the loop does: plan with mode='eager', or a "
                "submodule without it"
            )


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
    sequence = sequence.transpose(0, 1) if batch_first else sequence
    if (own := _as_one_call(layer_fn, sequence, hidden, params, (num_layers, bidirectional, batch_first))) is not None:
        sequence = sequence.contiguous() if kind_of(layer_fn) is None else sequence  # as eager mode does for oneDNN
        layer_fn = partial(_part_by_part, own) if _TRACED.get() == "in parts" else own
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


def _as_one_call(
    layer_fn: Callable[..., Any],
    sequence: torch.Tensor,
    hidden: Sequence[Any],
    params: Sequence[Any],
    options: tuple[int, bool, bool],
) -> Callable[..., Any] | None:
    """What runs one direction of one layer in one call, as eager mode would; None where it is to run in steps."""
    way, kind = _TRACED.get(), kind_of(layer_fn)
    if kind is not None and way != "in steps" and can_run([sequence, *hidden, *chain(*params)]):
        return partial(recurrent_layer, kind)
    lstm = layer_fn in (ONEDNN_LSTM, ONE_LAYER_LSTM) and way in ("whole", "in parts")
    return partial(onednn_lstm, options) if lstm and runs_on_onednn([sequence, *chain(*hidden, *params)]) else None


def _part_by_part(
    layer: Callable[..., Any],
    sequence: torch.Tensor,
    state: Any,
    params: Sequence[torch.Tensor],
    has_biases: bool,
    reverse: bool = False,
) -> tuple[torch.Tensor, Any]:
    """A recurrent layer, called for one part of the sequence after the other.

    The more parts there are, the less each saves, and the more states lie between them: their number and their length
    are about equal.
    """
    if not isinstance(sequence.shape[0], int):
        return layer(sequence, state, params, has_biases, reverse=reverse)
    parts = torch.split(sequence, max(1, isqrt(len(sequence) // 2)))
    outputs = []
    for part in reversed(parts) if reverse else parts:
        output, state = layer(part, state, params, has_biases, reverse=reverse)
        outputs.append(output)
    return torch.cat(outputs[::-1] if reverse else outputs), state
