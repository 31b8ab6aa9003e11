"""Attention as a card's kernels do it, in graphs that are traced where that card is not.

A GPU's fused kernels keep the output, a log-sum-exp for each row, and the seed and offset of the dropout. The CPU has
no such kernel for dropout: there, scores and masks are kept. The rules are those of `use_flash_attention` and
`use_mem_efficient_attention` in ATen/native/transformers/cuda/sdp_utils.cpp, torch 2.11 to 2.15.
cuDNN's kernel, preferred on some cards, keeps what flash attention keeps.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from planner.compat.layers import replace_attention
from planner.devices.specs import Device

_ATEN = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)
_WIDEST = 256  # of a head, for flash attention


@contextmanager
def attention_as_on(card: Device | None) -> Iterator[None]:
    """While it is on, this thread traces attention with dropout as a CUDA card runs it; None changes nothing."""
    if card is None or card.type != "cuda":
        yield
        return
    here = threading.get_ident()

    def instead(native: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return _attention(native, card, *args, **kwargs) if threading.get_ident() == here else native(*args, **kwargs)

    put_back = replace_attention(instead)
    try:
        yield
    finally:
        put_back()


def _attention(
    native: Callable[..., Any],
    card: Device,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *rest: Any,
    **named: Any,
) -> Any:
    """`scaled_dot_product_attention`, of (batch, heads, length, width) tensors."""
    given = {**dict(zip(("attn_mask", "dropout_p", "is_causal"), rest, strict=False)), **named}
    mask, dropout, causal = given.get("attn_mask"), given.get("dropout_p", 0.0), given.get("is_causal", False)
    if not dropout:  # the CPU has a fused kernel, too
        return native(query, key, value, *rest, **named)
    scale = given.get("scale")
    kernel = kernel_of(card, query, key, value, mask, causal, given.get("enable_gqa", False))
    if kernel == "flash":
        width = query.shape[-1]
        # its kernels take widths that are multiples of 8
        padded = [functional.pad(t, (0, -width % 8)) if width % 8 else t for t in (query, key, value)]
        scale = width**-0.5 if scale is None else scale
        return _ATEN._scaled_dot_product_flash_attention(*padded, dropout, causal, scale=scale)[0][..., :width]
    if kernel == "efficient":
        fused = _ATEN._scaled_dot_product_efficient_attention
        return fused(query, key, value, _bias(mask, query, key), True, dropout, causal, scale=scale)[0]
    return native(query, key, value, *rest, **named)


def kernel_of(
    card: Device,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None = None,
    is_causal: bool = False,
    grouped: bool = False,
) -> Literal["flash", "efficient", "native"]:
    """The kernel that a CUDA card takes for attention in training; "native" for the sum of plain ops."""
    given = (query, key, value)
    if any(t.dim() != 4 or not t.numel() or t.stride(-1) != 1 for t in given):
        return "native"
    heads_differ = query.shape[1] != key.shape[1] or query.shape[1] != value.shape[1]
    if heads_differ and not grouped:
        return "native"
    allowed: Any = torch.backends.cuda
    if allowed.flash_sdp_enabled() and mask is None and _flash_takes(card, query, key, value, is_causal):
        return "flash"
    dtypes = (*_HALF, torch.float32) if card.capability >= (8, 0) else (torch.float16, torch.float32)
    aligned = all(t.shape[-1] * t.element_size() % 16 == 0 for t in (query, value))
    fits = query.dtype in dtypes and query.shape[-1] == key.shape[-1] and aligned and not heads_differ
    return "efficient" if fits and allowed.mem_efficient_sdp_enabled() else "native"


def _flash_takes(card: Device, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool) -> bool:
    width = query.shape[-1]
    if query.dtype not in _HALF or card.capability < (8, 0) or not width == key.shape[-1] == value.shape[-1]:
        return False
    # 192 and wider heads with dropout have no backward kernel on Ada, consumer Ampere and Blackwell
    narrow = card.capability in ((8, 6), (8, 9), (12, 0), (12, 1))
    return width <= (192 if narrow else _WIDEST) and not (is_causal and query.shape[2] != key.shape[2])


def _bias(mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor | None:
    """A mask as the kernel reads it: added to the scores, of all heads."""
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, float("-inf"))
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


def eager_attention_as_on(card: Device | None) -> AbstractContextManager[object]:
    """The same for a step that is traced op by op, without torch.compile."""
    return nullcontext() if card is None or card.type != "cuda" else _InstalledAttention(card)


class _InstalledAttention(TorchFunctionMode):
    def __init__(self, card: Device) -> None:
        super().__init__()
        self.card = card

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.scaled_dot_product_attention:
            return _attention(func, self.card, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))
