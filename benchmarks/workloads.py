"""Real models with random weights for the benchmarks; each step takes a fraction of a second on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import diffusers
import torch
import transformers
from torch import nn

from planner.cli.demo import small_gpt2


@dataclass(frozen=True)
class Workload:
    """A model, its batch, and how its loss is taken; None: the output holds it."""

    model: nn.Module
    batch: dict[str, torch.Tensor]
    loss_fn: Callable[[Any], torch.Tensor] | None = None

    def step(self, model: nn.Module) -> None:
        """One training step without the optimizer; the output is held to the end, as a training loop holds it."""
        output = model(**self.batch)
        loss = output.loss if self.loss_fn is None else self.loss_fn(output)
        loss.backward()


def _tokens(vocabulary: int, batch: int, length: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, vocabulary, (batch, length), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


def gpt2() -> Workload:
    """GPT-2 with 8 layers of width 256 and dropout 0.1; 4 x 256 tokens."""
    config = transformers.GPT2Config(
        n_layer=8, n_embd=256, n_head=8, vocab_size=2000, n_positions=256, use_cache=False,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return Workload(transformers.GPT2LMHeadModel(config).train(), _tokens(2000, 4, 256))


def llama() -> Workload:
    """Llama with 8 layers of width 256 and grouped-query attention; 4 x 256 tokens."""
    config = transformers.LlamaConfig(
        num_hidden_layers=8, hidden_size=256, intermediate_size=688, num_attention_heads=8,
        num_key_value_heads=4, vocab_size=2000, max_position_embeddings=256, use_cache=False,
    )  # fmt: skip
    return Workload(transformers.LlamaForCausalLM(config).train(), _tokens(2000, 4, 256))


def resnet50() -> Workload:
    """ResNet-50; 4 images of 128 x 128."""
    model = transformers.ResNetForImageClassification(transformers.ResNetConfig(num_labels=10))
    pixels = torch.randn(4, 3, 128, 128, generator=torch.Generator().manual_seed(0))
    return Workload(model.train(), {"pixel_values": pixels, "labels": torch.arange(4) % 10})


def _square(output: Any) -> torch.Tensor:
    return output.sample.square().mean()


def unet() -> Workload:
    """A diffusion UNet with attention at two levels; 2 images of 48 x 48."""
    model = diffusers.UNet2DModel(
        sample_size=48, in_channels=3, out_channels=3, layers_per_block=2, block_out_channels=(32, 64, 128),
        down_block_types=("DownBlock2D", "AttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "AttnUpBlock2D", "UpBlock2D"), norm_num_groups=8,
    )  # fmt: skip
    sample = torch.randn(2, 3, 48, 48, generator=torch.Generator().manual_seed(0))
    return Workload(model.train(), {"sample": sample, "timestep": torch.arange(2)}, _square)


def demo() -> Workload:
    """The model of `python -m planner demo`."""
    return Workload(*small_gpt2())


WORKLOADS: dict[str, Callable[[], Workload]] = {
    "demo GPT-2": demo,
    "GPT-2": gpt2,
    "Llama": llama,
    "ResNet-50": resnet50,
    "UNet2DModel": unet,
}
