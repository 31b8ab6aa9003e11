"""Real models with random weights, a few seconds each on a CPU."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers


@dataclass
class Case:
    model: torch.nn.Module
    batch: dict[str, torch.Tensor]
    loss_fn: Callable[[Any], torch.Tensor] | None = field(default=None)

    def loss(self, output: Any) -> torch.Tensor:
        return output.loss if self.loss_fn is None else self.loss_fn(output)


def tokens(vocabulary: int, *shape: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, vocabulary, shape, generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


def gpt2(
    dropout: float = 0.0, batch: int = 4, layers: int = 4, heads: int = 4, width: int = 128, vocabulary: int = 500
) -> Case:
    config = transformers.GPT2Config(
        n_layer=layers, n_embd=width, n_head=heads, vocab_size=vocabulary, n_positions=128, use_cache=False,
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return Case(transformers.GPT2LMHeadModel(config).train(), tokens(vocabulary, batch, 128))


def llama(batch: int = 4, layers: int = 4) -> Case:
    config = transformers.LlamaConfig(
        num_hidden_layers=layers, hidden_size=128, intermediate_size=384, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=500, max_position_embeddings=128, use_cache=False,
    )  # fmt: skip
    return Case(transformers.LlamaForCausalLM(config).train(), tokens(500, batch, 128))


def resnet50(batch: int = 4, depths: tuple[int, ...] = (3, 4, 6, 3)) -> Case:
    """Of one stage for each count of blocks; each begins with a projection as its shortcut."""
    widths = [256, 512, 1024, 2048][: len(depths)]
    config = transformers.ResNetConfig(num_labels=10, depths=list(depths), hidden_sizes=widths)
    model = transformers.ResNetForImageClassification(config)
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randn(batch, 3, 96, 96, generator=generator)
    return Case(model.train(), {"pixel_values": pixels, "labels": torch.arange(batch) % 10})


def _square(output: Any) -> torch.Tensor:
    return output.sample.square().mean()


def unet(batch: int = 2, channels: tuple[int, ...] = (32, 64, 64), middle: bool = True) -> Case:
    """Of one block for each count of channels, the second with attention, and a block with attention in the middle."""
    import diffusers

    kinds = ["Attn" if level == 1 else "" for level in range(len(channels))]
    model = diffusers.UNet2DModel(
        sample_size=32, in_channels=3, out_channels=3, layers_per_block=1, block_out_channels=channels,
        down_block_types=tuple(f"{kind}DownBlock2D" for kind in kinds),
        up_block_types=tuple(f"{kind}UpBlock2D" for kind in reversed(kinds)), norm_num_groups=8,
        mid_block_type="UNetMidBlock2D" if middle else None,
    )  # fmt: skip
    sample = torch.randn(batch, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    return Case(model.train(), {"sample": sample, "timestep": torch.arange(batch)}, _square)


CASES: dict[str, Callable[[], Case]] = {
    "gpt2_dropout": lambda: gpt2(dropout=0.1),
    "unet": unet,
    "gpt2": gpt2,
    "llama": llama,
    "resnet50": resnet50,
}

# the same of two layers, or two stages of a block: what holds for every schedule holds or does not at any depth
SMALL: dict[str, Callable[[], Case]] = {
    "gpt2_dropout": lambda: gpt2(dropout=0.1, layers=2),
    "unet": lambda: unet(channels=(32, 64), middle=False),
    "gpt2": lambda: gpt2(layers=2),
    "llama": lambda: llama(layers=2),
    "resnet50": lambda: resnet50(depths=(1, 1)),
}
