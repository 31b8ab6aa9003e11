"""Helpers of torch's own layers that a compiler cannot capture as they are. Torch 2.11 to 2.15."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch._decomp.decompositions as decompositions
import torch.nn.modules.transformer as transformer
from torch._C import DispatchKey
from torch._ops import OpOverload

RNN_HELPER: Callable[..., Any] = decompositions._rnn_helper
ONE_LAYER_LSTM: Callable[..., Any] = decompositions.one_layer_lstm
ONEDNN_LSTM: Callable[..., Any] = decompositions.mkldnn_one_layer_lstm
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


def replace_decompositions() -> Callable[[], None]:
    """Take away the Python decompositions of ops that have a kernel and a derivative of their own (torch 2.11 to 2.15).

    With them, AOTAutograd writes `interpolate` as arithmetic on indices (`OpOverload.py_kernels`): other rounding and
    several times the memory of the kernel that eager mode runs. Returns a function that puts them back.
    """
    taken = [
        (op, key, op.py_kernels.pop(key))
        for op in _own_kernels()
        for key in (DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd)
        if key in op.py_kernels
    ]
    for op, _, _ in taken:
        op._dispatch_cache.clear()

    def put_back() -> None:
        for op, key, kernel in taken:
            op.py_kernels[key] = kernel
            op._dispatch_cache.clear()

    return put_back


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
