"""Language models and others of `x_transformers`, with the options that its authors collect."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import x_transformers as x

from ..case import Case, images, tokens, uneven

SIZE = {"dim": 48, "depth": 2, "heads": 3, "attn_dim_head": 16}


def _language(layers: Any = x.Decoder, length: int = 64, **options: Any) -> Callable[[], Case]:
    def make() -> Case:
        model = x.TransformerWrapper(
            num_tokens=256, max_seq_len=length, attn_layers=layers(**SIZE, attn_dropout=0.1, ff_dropout=0.1, **options)
        )
        return Case(model.train(), tokens(4, length), uneven)

    return make


def _autoregressive(**options: Any) -> Callable[[], Case]:
    def make() -> Case:
        inner = x.TransformerWrapper(num_tokens=256, max_seq_len=64, attn_layers=x.Decoder(**SIZE, **options))
        return Case(x.AutoregressiveWrapper(inner).train(), tokens(4, 64))

    return make


def _translator() -> Case:
    half = {f"{side}_{k}": v for side in ("enc", "dec") for k, v in
            {"num_tokens": 256, "depth": 2, "heads": 3, "max_seq_len": 64, "attn_dim_head": 16}.items()}  # fmt: skip
    return Case(x.XTransformer(dim=48, **half).train(), {"src": tokens(4, 64), "tgt": tokens(4, 64)})


def _images() -> Case:
    model = x.ViTransformerWrapper(image_size=64, patch_size=8, num_classes=10, attn_layers=x.Encoder(**SIZE))
    return Case(model.train(), images(4, 64), uneven)


CASES = {
    "encoder": _language(x.Encoder),
    "decoder_with_rotary": _language(rotary_pos_emb=True, ff_swish=True, ff_glu=True, use_rmsnorm=True),
    "decoder_with_alibi": _language(alibi_pos_bias=True, attn_one_kv_head=True),
    "decoder_with_talking_heads": _language(attn_pre_talking_heads=True, attn_gate_values=True, rel_pos_bias=True),
    "decoder_with_sparse_attention": _language(attn_sparse_topk=8, ff_relu_squared=True),
    "decoder_with_memory": _language(attn_num_mem_kv=4, attn_qk_norm=True, macaron=True),
    "autoregressive": _autoregressive(attn_flash=True, rotary_pos_emb=True),
    "translator": _translator,
    "vision": _images,
}
