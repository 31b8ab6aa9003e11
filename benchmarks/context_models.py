"""Language models on `meta` that return their loss alone, as training for a long context calls them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import transformers
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

ATTENTION = (
    "causal"  # scaled_dot_product_attention without a mask: compiled, transformers makes one of length by length
)
RANK = 16
MODELS: Mapping[str, Any] = {
    "Llama-3-8B": lambda length: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(  # type: ignore[call-arg]
            num_hidden_layers=32, hidden_size=4096, intermediate_size=14336, num_attention_heads=32,
            num_key_value_heads=8, vocab_size=128256, max_position_embeddings=length, use_cache=False,
            attn_implementation=ATTENTION,
        )
    ),
    "Qwen3-8B": lambda length: transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(  # type: ignore[call-arg]
            num_hidden_layers=36, hidden_size=4096, intermediate_size=12288, num_attention_heads=32,
            num_key_value_heads=8, head_dim=128, vocab_size=151936, max_position_embeddings=length, use_cache=False,
            attn_implementation=ATTENTION,
        )
    ),
}  # fmt: skip
transformers.AttentionInterface.register(ATTENTION, sdpa_attention_forward)


class Loss(nn.Module):
    """A language model whose logits nobody gets."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """The loss of the next tokens."""
        loss: torch.Tensor = self.model(input_ids=ids, labels=ids).loss
        return loss


class Adapted(nn.Module):
    """A frozen linear layer with a trained update of low rank."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        like: dict[str, Any] = {"bias": False, "device": base.weight.device, "dtype": base.weight.dtype}
        self.down = nn.Linear(base.in_features, RANK, **like)
        self.up = nn.Linear(RANK, base.out_features, **like)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The layer's output and twice the update's."""
        y: torch.Tensor = self.base(x) + 2 * self.up(self.down(x))
        return y


def make(name: str, kind: str, length: int) -> tuple[nn.Module, torch.Tensor]:
    """A model in bf16 on `meta`, trained whole or by LoRA on every projection, and one sequence of tokens."""
    with torch.device("meta"):
        model: nn.Module = MODELS[name](length).to(torch.bfloat16).train()
        if kind == "LoRA":
            model.requires_grad_(False)
            for parent in list(model.modules()):
                for child, module in list(parent.named_children()):
                    if isinstance(module, nn.Linear) and child.endswith("_proj"):
                        setattr(parent, child, Adapted(module))
        return Loss(model), torch.zeros(1, length, dtype=torch.long)
