"""Helpers of torch's own layers that a compiler cannot capture as they are. Torch 2.11 to 2.13."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch._decomp.decompositions as decompositions
import torch.nn.modules.transformer as transformer

RNN_HELPER: Callable[..., Any] = decompositions._rnn_helper
_DETECT_IS_CAUSAL: Callable[..., Any] = transformer._detect_is_causal_mask


def replace_helpers(detect_is_causal: Callable[..., Any], rnn_helper: Callable[..., Any]) -> None:
    """Have torch's layers use other helpers, in all threads (torch 2.11 to 2.13).

    Args:
        detect_is_causal: for `torch.nn.modules.transformer._detect_is_causal_mask`, by which `nn.Transformer*` layers
            decide whether a mask is causal.
        rnn_helper: for `torch._decomp.decompositions._rnn_helper`, which takes recurrent layers apart.
    """
    transformer._detect_is_causal_mask = detect_is_causal
    decompositions._rnn_helper = rnn_helper


def restore_helpers() -> None:
    """Put torch's own helpers back (torch 2.11 to 2.13)."""
    replace_helpers(_DETECT_IS_CAUSAL, RNN_HELPER)
