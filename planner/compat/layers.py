"""Helpers of torch's own layers that a compiler cannot capture as they are. Torch 2.11 to 2.15."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
import torch._decomp.decompositions as decompositions
import torch.nn.modules.transformer as transformer
from torch._C import DispatchKey
from torch._ops import OpOverload
from torch._subclasses.fake_impls import op_implementations_dict
from torch._subclasses.fake_tensor import FakeTensorMode

from planner.compat.tensors import no_dispatch

RNN_HELPER: Callable[..., Any] = decompositions._rnn_helper
ONE_LAYER_LSTM: Callable[..., Any] = decompositions.one_layer_lstm
ONEDNN_LSTM: Callable[..., Any] = decompositions.mkldnn_one_layer_lstm
_LSTM = 2  # of oneDNN's kinds of recurrent layers (ideep::rnn_kind)
_DETECT_IS_CAUSAL: Callable[..., Any] = transformer._detect_is_causal_mask

# beside those of `interpolate`, the ops that torch 2.13 decomposes where autograd could run their kernels
_OWN_KERNELS = ("hardshrink", "softshrink", "multi_margin_loss", "multilabel_margin_loss_forward")


def replace_helpers(detect_is_causal: Callable[..., Any], rnn_helper: Callable[..., Any]) -> None:
    """Have torch's layers use other helpers, in all threads (torch 2.11 to 2.15).

    Args:
        detect_is_causal: for `torch.nn.modules.transformer._detect_is_causal_mask`, by which `nn.Transformer*` layers
            decide whether a mask is causal.
        rnn_helper: for `torch._decomp.decompositions._rnn_helper`, which takes recurrent layers apart.
    """
    transformer._detect_is_causal_mask = detect_is_causal
    decompositions._rnn_helper = rnn_helper


def restore_helpers() -> None:
    """Put torch's own helpers back (torch 2.11 to 2.15)."""
    replace_helpers(_DETECT_IS_CAUSAL, RNN_HELPER)


def kind_of(layer: Callable[..., Any]) -> str | None:
    """The kind of a layer that torch's decompositions are about to take apart (torch 2.11 to 2.15): "gru", or "tanh" or
    "relu" for a plain recurrent one; None for others.
    """
    if not isinstance(layer, partial) or layer.func is not decompositions.one_layer_rnn:
        return None
    cell = layer.keywords["hidden_fn"]
    if cell is decompositions.gru_cell:
        return "gru"
    activations: dict[Any, str] = {torch.tanh: "tanh", torch.relu: "relu"}
    return activations.get(inspect.getclosurevars(cell).nonlocals.get("nonlinearity"))


def runs_on_onednn(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether eager mode has oneDNN run an LSTM with these: its input, states and parameters (`use_mkldnn`,
    RNN.cpp; `torch._C._get_mkldnn_enabled`, 2.11 to 2.15).

    One with a projection has states of two widths. Of the dtypes that oneDNN takes, float32 is the one whose backward
    pass gives gradients of the parameters' dtype.
    """
    sequence, hidden, cell = tensors[:3]
    plain = all(t.device.type == "cpu" and t.dtype == torch.float32 for t in tensors)
    concrete = all(isinstance(n, int) for n in sequence.shape) and sequence.numel() > 0
    return torch._C._get_mkldnn_enabled() and plain and concrete and hidden.shape == cell.shape


def onednn_lstm(
    options: tuple[int, bool, bool],
    sequence: torch.Tensor,
    hidden: tuple[torch.Tensor, torch.Tensor],
    params: Sequence[torch.Tensor],
    has_biases: bool,
    reverse: bool = False,
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """One direction of one layer of an LSTM, as eager mode calls it (`mkldnn_rnn`, RNN.cpp).

    Args:
        options: of the LSTM: layers, whether it goes both ways, whether the batch comes first.
        sequence: of shape (time, batch, features), contiguous.
        hidden: the states of hidden units and cells, of shape (batch, hidden) each.
        params: the two weights, and the two biases where it has any.
        has_biases: whether it has.
        reverse: whether it goes backwards in time.
    """
    layers, bidirectional, batch_first = options
    biases = params[2:4] if has_biases else [torch.zeros_like(w) for w in params[:2]]
    call = torch.ops.aten.mkldnn_rnn_layer.default
    states = [t.contiguous() for t in hidden]
    shape = hidden[0].shape[-1], layers, has_biases, bidirectional, batch_first
    result = call(sequence, *params[:2], *biases, *states, reverse, [], _LSTM, *shape, True)
    return result[0], (result[1], result[2])


@cache
def _saved_bytes(time: int, batch: int, features: int, hidden: int) -> int:
    """Bytes that a layer saves for its backward pass: oneDNN alone knows, and is asked."""
    with no_dispatch(), torch.inference_mode(False), torch.enable_grad():
        shapes = (time, batch, features), (4 * hidden, features), (4 * hidden, hidden), *[(4 * hidden,)] * 2
        tensors = [torch.zeros(shape) for shape in (*shapes, *[(batch, hidden)] * 2)]
        result = torch.ops.aten.mkldnn_rnn_layer.default(
            *tensors, False, [], _LSTM, hidden, 1, True, False, False, True
        )
        saved: torch.Tensor = result[3]
        return saved.nbytes


def _with_what_it_saves(mode: Any, op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Fake results of `aten.mkldnn_rnn_layer`, of which torch's own rule says that it saves nothing."""
    sequence, first, hidden, trains = args[0], args[1], args[5], args[15]
    if not trains or kwargs or any(t.dtype != torch.float32 for t in (sequence, first)):
        return NotImplemented
    nbytes = _saved_bytes(*map(int, sequence.shape), hidden.shape[-1])
    with mode:
        # eager mode says of a layer whether the batch came first, which it no longer does
        output = sequence.new_empty((*sequence.shape[:2], hidden.shape[-1]))
        states = [torch.empty_like(t) for t in args[5:7]]
        return output, *states, torch.empty(nbytes, dtype=torch.uint8, device=sequence.device)


def _with_each_bias(mode: Any, op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Fake results of `aten.mkldnn_rnn_layer_backward`, which torch's own rule gives one gradient for both biases."""
    sequence, first, second, bias, _, hidden, cell = args[:7]
    if any(t.dtype != torch.float32 for t in args[:7]):
        return NotImplemented
    with mode:
        like = sequence, first, second, bias[..., 0] if bias.dim() > 1 else bias
        made = [torch.empty(t.shape, device=t.device) for t in (*like, like[-1], hidden, cell)]
        return tuple(made)


@cache
def _reserved_bytes(
    device: torch.device, dtype: torch.dtype, shapes: tuple[tuple[int, ...] | None, ...], stride: int, options: Any
) -> int:
    """Bytes that recurrent layers save for their backward pass: cuDNN alone knows, and is asked.

    Args:
        device: of all tensors.
        dtype: of all tensors.
        shapes: of the sequence, the states (None for no cells) and the weights.
        stride: weights of each layer and direction.
        options: what `aten._cudnn_rnn` is given after the states.
    """
    with no_dispatch(), torch.inference_mode(False), torch.no_grad():
        sequence, hidden, cell, *weights = (
            None if shape is None else torch.zeros(shape, dtype=dtype, device=device) for shape in shapes
        )
        result = torch.ops.aten._cudnn_rnn.default(sequence, weights, stride, None, hidden, cell, *options, None)
        return int(result[3].nbytes)


def _with_what_cudnn_saves(mode: Any, op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Fake results of `aten._cudnn_rnn`, of which torch's own rule says that it saves nothing, and no weights."""
    sequence, weights, stride, _, hidden, cell, *options, lengths, dropout_state = args
    _, units, projected, *_, trains, both_ways = options
    if kwargs or not trains or lengths or dropout_state is not None or not torch.cuda.is_available():
        return NotImplemented
    shapes = tuple(None if t is None else tuple(map(int, t.shape)) for t in (sequence, hidden, cell, *weights))
    nbytes = _reserved_bytes(sequence.device, sequence.dtype, shapes, stride, (*options, ()))
    with mode:
        output = sequence.new_empty((*sequence.shape[:2], (projected or units) * (2 if both_ways else 1)))
        saved = torch.empty(nbytes, dtype=torch.uint8, device=sequence.device)
        # the weights lie in one storage already
        return output, *_like_states(sequence, hidden, cell), saved, sequence.new_empty(0)


def _with_gradients_in_one(mode: Any, op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Fake results of `aten._cudnn_rnn_backward`, for which torch has no rule: gradients of weights share a storage."""
    sequence, weights, _, _, hidden, cell = args[:6]
    with mode:
        every = sequence.new_empty(sum(w.numel() for w in weights))
        parts = every.split([w.numel() for w in weights])
        gradients = [part.view(w.shape) for part, w in zip(parts, weights, strict=True)]
        return torch.empty_like(sequence), *_like_states(sequence, hidden, cell), gradients


def _like_states(sequence: torch.Tensor, *states: torch.Tensor | None) -> list[torch.Tensor]:
    return [sequence.new_empty(0) if t is None else torch.empty_like(t) for t in states]


op_implementations_dict[torch.ops.aten._cudnn_rnn.default] = _with_what_cudnn_saves
op_implementations_dict[torch.ops.aten._cudnn_rnn_backward.default] = _with_gradients_in_one
op_implementations_dict[torch.ops.aten.mkldnn_rnn_layer.default] = _with_what_it_saves
op_implementations_dict[torch.ops.aten.mkldnn_rnn_layer_backward.default] = _with_each_bias
FakeTensorMode.cache_clear()  # of results by torch's own rules, under whatever was traced before


def replace_decompositions() -> Callable[[], None]:
    """Take away the Python decompositions of ops that have a kernel and a derivative of their own (torch 2.11 to 2.15).

    With them, AOTAutograd writes `interpolate` as arithmetic on indices (`OpOverload.py_kernels`): other rounding and
    several times the memory of the kernel that eager mode runs; and cuDNN's batch normalisation as torch's own.
    Returns a function that puts them back.
    """
    taken = [
        (op, key, op.py_kernels.pop(key))
        for op in _own_kernels()
        for key in (DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd)
        if key in op.py_kernels
    ]
    norm: OpOverload = torch.ops.aten.cudnn_batch_norm.default
    if (own := norm.py_kernels.get(DispatchKey.Autograd)) is not None:
        taken.append((norm, DispatchKey.Autograd, own))
        norm.py_kernels[DispatchKey.Autograd] = partial(_batch_norm, own)
    for op, _, _ in taken:
        op._dispatch_cache.clear()

    def put_back() -> None:
        for op, key, kernel in taken:
            op.py_kernels[key] = kernel
            op._dispatch_cache.clear()

    return put_back


def _batch_norm(own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`aten.cudnn_batch_norm`, whose schema does not say that it writes into running statistics, by the op whose does
    and that runs cuDNN's kernel where eager mode would (`_batch_norm_with_update_cuda`, Normalization.cu).
    """
    training = len(args) > 5 and args[5]
    if kwargs or not training or any(statistics is None for statistics in args[3:5]):
        return own(*args, **kwargs)
    return torch.ops.aten._batch_norm_with_update.default(*args[:5], *args[6:])


@cache
def _own_kernels() -> tuple[OpOverload, ...]:
    packets = [getattr(torch.ops.aten, name) for name in dir(torch.ops.aten) if "upsample_" in name]
    packets += [getattr(torch.ops.aten, name) for name in _OWN_KERNELS]
    return tuple(getattr(packet, overload) for packet in packets for overload in packet.overloads())


def replace_attention(instead: Callable[..., Any]) -> Callable[[], None]:
    """Have AOTAutograd trace `scaled_dot_product_attention` by another function (torch 2.11 to 2.15).

    Its own kernel (`CompositeImplicitAutograd`, in C++) chooses among fused kernels by the device of the tensors.
    Returns a function that puts things back.

    Args:
        instead: torch's own way, then the op's arguments -> the result.
    """
    op: OpOverload = torch.ops.aten.scaled_dot_product_attention.default
    key = DispatchKey.CompositeImplicitAutograd
    before = op.py_kernels.get(key)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        def native(*args: Any, **kwargs: Any) -> Any:
            return op._op_dk(key, *args, **kwargs)

        return instead(native if before is None else before, *args, **kwargs)

    op.py_kernels[key] = kernel
    op._dispatch_cache.clear()

    def put_back() -> None:
        if before is None:
            del op.py_kernels[key]
        else:
            op.py_kernels[key] = before
        op._dispatch_cache.clear()

    return put_back
