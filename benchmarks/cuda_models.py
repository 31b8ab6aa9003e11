"""Models with random weights, made on the device that they train on, in three sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

Size = Literal["full", "fast", "tiny"]


@dataclass(frozen=True)
class Work:
    """A model and its batch.

    Attributes:
        model: in training mode.
        batch: keyword arguments of its call.
        loss_fn: as in `plan()`.
        autocast: dtype of the autocast under which it is planned and trained; None for none.
    """

    model: nn.Module
    batch: dict[str, torch.Tensor]
    loss_fn: Callable[[Any], torch.Tensor] | None = None
    autocast: torch.dtype | None = None

    def casting(self) -> torch.autocast:
        """The autocast that it is planned and called under; its cached casts go with it, before `backward()`."""
        device = next(self.model.parameters()).device.type
        return torch.autocast(device, dtype=self.autocast, enabled=self.autocast is not None)

    def step(self) -> torch.Tensor:
        """One training step without the optimizer; returns the loss. The output is held to the end."""
        with self.casting():
            output = self.model(**self.batch)
            loss: torch.Tensor = output.loss if self.loss_fn is None else self.loss_fn(output)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()


def _pick(size: Size, full: int, fast: int, tiny: int) -> int:
    return {"full": full, "fast": fast, "tiny": tiny}[size]


def _tokens(vocabulary: int, batch: int, length: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, vocabulary, (batch, length))
    return {"input_ids": ids, "labels": ids}


def gpt2(size: Size) -> Work:
    """GPT-2 medium, dropout 0.1, 8 x 1024 tokens, bf16 autocast."""
    import transformers

    length, width = _pick(size, 1024, 1024, 64), _pick(size, 1024, 1024, 64)
    vocabulary = _pick(size, 50257, 50257, 500)
    config = transformers.GPT2Config(
        n_layer=_pick(size, 24, 8, 2), n_embd=width, n_head=width // 64 or 1, vocab_size=vocabulary, n_positions=length,
        use_cache=False, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config).train()
    return Work(model, _tokens(vocabulary, _pick(size, 8, 8, 2), length), autocast=torch.bfloat16)


def llama(size: Size) -> Work:
    """A Llama of 1.1e9 parameters in bf16, grouped-query attention, 4 x 2048 tokens."""
    import transformers

    length, width = _pick(size, 2048, 2048, 64), _pick(size, 2048, 2048, 128)
    vocabulary = _pick(size, 32000, 32000, 500)
    config = transformers.LlamaConfig(
        num_hidden_layers=_pick(size, 16, 6, 2), hidden_size=width, intermediate_size=4 * width,
        num_attention_heads=width // 64, num_key_value_heads=max(1, width // 256), vocab_size=vocabulary,
        max_position_embeddings=length, use_cache=False,
    )  # fmt: skip
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return Work(model.to(torch.bfloat16).train(), _tokens(vocabulary, _pick(size, 4, 4, 2), length))


def resnet(size: Size) -> Work:
    """ResNet-152 (ResNet-50 in the fast size), 128 images of 224 x 224, fp32."""
    import transformers

    depths = {"full": [3, 8, 36, 3], "fast": [3, 4, 6, 3], "tiny": [1, 1, 1, 1]}[size]
    config = transformers.ResNetConfig(depths=depths, num_labels=1000)  # type: ignore[call-arg]
    model = transformers.ResNetForImageClassification(config)
    batch, pixels = _pick(size, 128, 128, 2), _pick(size, 224, 224, 64)
    images = torch.randn(batch, 3, pixels, pixels)
    return Work(model.train(), {"pixel_values": images, "labels": torch.randint(0, 1000, (batch,))})


def vit(size: Size) -> Work:
    """ViT-L/16, 96 images of 224 x 224, bf16 autocast."""
    import transformers

    width, pixels = _pick(size, 1024, 1024, 64), _pick(size, 224, 224, 32)
    config = transformers.ViTConfig(  # type: ignore[call-arg]
        hidden_size=width, num_hidden_layers=_pick(size, 24, 8, 2), num_attention_heads=max(1, width // 64),
        intermediate_size=4 * width, image_size=pixels, patch_size=16, num_labels=1000,
    )  # fmt: skip
    batch = _pick(size, 96, 96, 2)
    model = transformers.ViTForImageClassification(config).train()
    images = torch.randn(batch, 3, pixels, pixels)
    labels = torch.randint(0, 1000, (batch,))
    return Work(model, {"pixel_values": images, "labels": labels}, autocast=torch.bfloat16)


def _square(output: Any) -> torch.Tensor:
    loss: torch.Tensor = output.sample.square().mean()
    return loss


def unet(size: Size) -> Work:
    """A diffusion UNet with attention at two levels, 64 images of 64 x 64, fp32."""
    import diffusers

    pixels, width = _pick(size, 64, 64, 16), _pick(size, 128, 128, 8)
    model: Any = diffusers.UNet2DModel(  # type: ignore[no-untyped-call]
        sample_size=pixels, in_channels=3, out_channels=3, layers_per_block=_pick(size, 2, 1, 1),
        block_out_channels=(width, 2 * width, 4 * width),
        down_block_types=("DownBlock2D", "AttnDownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "AttnUpBlock2D", "UpBlock2D"), norm_num_groups=8,
    )  # fmt: skip
    batch = _pick(size, 64, 64, 2)
    images = torch.randn(batch, 3, pixels, pixels)
    return Work(model.train(), {"sample": images, "timestep": torch.arange(batch)}, _square)


def bert(size: Size) -> Work:
    """BERT-large with dropout, 32 x 512 tokens, bf16 autocast."""
    import transformers

    length, width = _pick(size, 512, 512, 64), _pick(size, 1024, 1024, 64)
    vocabulary = _pick(size, 30522, 30522, 500)
    config = transformers.BertConfig(
        num_hidden_layers=_pick(size, 24, 8, 2), hidden_size=width, num_attention_heads=width // 64,
        intermediate_size=4 * width, vocab_size=vocabulary, max_position_embeddings=length,
    )  # fmt: skip
    model = transformers.BertForMaskedLM(config).train()
    return Work(model, _tokens(vocabulary, _pick(size, 32, 32, 2), length), autocast=torch.bfloat16)


def t5(size: Size) -> Work:
    """T5-large in bf16 with dropout, 16 x 512 tokens on either side."""
    import transformers

    length, width = _pick(size, 512, 512, 32), _pick(size, 1024, 1024, 64)
    vocabulary = _pick(size, 32128, 32128, 500)
    config = transformers.T5Config(
        num_layers=_pick(size, 24, 6, 2), d_model=width, d_kv=64, num_heads=width // 64, d_ff=4 * width,
        vocab_size=vocabulary, use_cache=False, decoder_start_token_id=0,
    )  # fmt: skip
    model: nn.Module = transformers.T5ForConditionalGeneration(config)
    return Work(model.to(torch.bfloat16).train(), _tokens(vocabulary, _pick(size, 16, 16, 2), length))


def convnext(size: Size) -> Work:
    """ConvNeXt-B, 96 images of 224 x 224, bf16 autocast."""
    import transformers

    depths = _pick(size, 1, 1, 0)
    config = transformers.ConvNextConfig(  # type: ignore[call-arg]
        depths=[3, 3, 27, 3] if depths else [1, 1, 1, 1], hidden_sizes=[128, 256, 512, 1024] if depths else [8] * 4,
        num_labels=1000,
    )  # fmt: skip
    batch, pixels = _pick(size, 96, 96, 2), _pick(size, 224, 224, 64)
    images, labels = torch.randn(batch, 3, pixels, pixels), torch.randint(0, 1000, (batch,))
    model = transformers.ConvNextForImageClassification(config).train()
    return Work(model, {"pixel_values": images, "labels": labels}, autocast=torch.bfloat16)


def llama3_8b(size: Size) -> Work:
    """Llama-3-8B in bf16, 1 x 4096 tokens: 30 GB of weights and gradients."""
    import transformers

    length, width = _pick(size, 4096, 4096, 64), _pick(size, 4096, 4096, 128)
    vocabulary = _pick(size, 128256, 128256, 500)
    config = transformers.LlamaConfig(
        num_hidden_layers=_pick(size, 32, 32, 2), hidden_size=width, intermediate_size=_pick(size, 14336, 14336, 256),
        num_attention_heads=_pick(size, 32, 32, 2), num_key_value_heads=_pick(size, 8, 8, 1), vocab_size=vocabulary,
        max_position_embeddings=length, use_cache=False,
    )  # fmt: skip
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)  # 32 GB of fp32 weights would come first
    try:
        model: nn.Module = transformers.LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    return Work(model.train(), _tokens(vocabulary, 1, length))


MODELS: dict[str, Callable[[Size], Work]] = {
    "gpt2": gpt2,
    "llama": llama,
    "resnet": resnet,
    "vit": vit,
    "unet": unet,
    "bert": bert,
    "t5": t5,
    "convnext": convnext,
    "llama3-8b": llama3_8b,
}


def build(name: str, device: torch.device, size: Size) -> Work:
    """A model of `MODELS`; on one device, always with the same weights and batch.

    Raises:
        ModuleNotFoundError: its package is not installed.
    """
    torch.manual_seed(0)
    with device:  # weights are drawn where they stay: a billion of them take seconds on a CPU
        return MODELS[name](size)
