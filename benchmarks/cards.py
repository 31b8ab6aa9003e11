"""Plans of large models for cards that are not here, from models without weights: `python -m benchmarks.cards`.

Each plan has a process of its own, so that its memory is its own. As for training, PYTORCH_ALLOC_CONF says what
allocator to plan for.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers

from planner import InfeasibleBudgetError, plan
from planner.errors import gb


@dataclass(frozen=True)
class Case:
    """A model in bf16 on a card, or a share of it on each of several.

    Attributes:
        name: of the model, in `MODELS`.
        device: the card.
        shard: how many cards share parameters, gradients and optimizer state.
        optimizer: by name.
        offload: as for `plan()`.
    """

    name: str
    device: str
    shard: int = 1
    optimizer: str = "adamw"
    offload: str | None = None


Built = tuple[torch.nn.Module, dict[str, torch.Tensor], Callable[[Any], torch.Tensor] | None]


def language_model(kind: str, layers: int, hidden: int, intermediate: int, heads: int, vocabulary: int) -> Built:
    """A language model of transformers, and one sequence of 8192 tokens."""
    config = transformers.AutoConfig.for_model(
        kind, num_hidden_layers=layers, hidden_size=hidden, intermediate_size=intermediate, num_attention_heads=heads,
        num_key_value_heads=8, vocab_size=vocabulary, max_position_embeddings=8192, use_cache=False,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config)
    ids = torch.zeros(1, 8192, dtype=torch.long, device="cpu")
    return model, {"input_ids": ids, "labels": ids}, None


def diffusion_transformer(images: int) -> Built:
    """The transformer of Stable Diffusion 3 (2 billion parameters), and latents of images of 1024 x 1024 pixels."""
    model = diffusers.SD3Transformer2DModel(
        sample_size=128, in_channels=16, num_layers=24, num_attention_heads=24, attention_head_dim=64,
        joint_attention_dim=4096, caption_projection_dim=1536, pooled_projection_dim=2048, out_channels=16,
        pos_embed_max_size=192,
    )  # fmt: skip
    batch = {
        "hidden_states": torch.empty(images, 16, 128, 128, dtype=torch.bfloat16),
        "encoder_hidden_states": torch.empty(images, 333, 4096, dtype=torch.bfloat16),
        "pooled_projections": torch.empty(images, 2048, dtype=torch.bfloat16),
        "timestep": torch.empty(images, dtype=torch.bfloat16),
    }
    return model, batch, lambda output: output.sample.float().square().mean()


MODELS = {
    "Llama-3-8B": partial(language_model, "llama", 32, 4096, 14336, 32, 128256),
    "Llama-3-70B": partial(language_model, "llama", 80, 8192, 28672, 64, 128256),
    "Qwen3-8B": partial(language_model, "qwen3", 36, 4096, 12288, 32, 151936),
    "SD3, 8 images": partial(diffusion_transformer, 8),
    "SD3, 32 images": partial(diffusion_transformer, 32),
}
CASES = (
    Case("Llama-3-8B", "h200"),
    Case("Llama-3-8B", "h100"),
    Case("Llama-3-8B", "h100", optimizer="adamw-fused"),
    Case("Llama-3-8B", "rtx4090", shard=8),
    Case("Qwen3-8B", "h200"),
    Case("Qwen3-8B", "h100", optimizer="adamw-fused"),
    Case("Qwen3-8B", "rtx4090", shard=8),
    Case("SD3, 8 images", "rtx4090", optimizer="adamw-fused"),
    Case("SD3, 32 images", "h100"),
    Case("Llama-3-70B", "h200", shard=32),
    Case("Llama-3-70B", "h100", shard=32),
)


def measure(case: Case) -> dict[str, Any]:
    """Plan a case for all of its card's memory; the row says so where that is not enough."""
    torch.set_num_threads(1)
    with torch.device("meta"):
        model, batch, loss_fn = MODELS[case.name]()
    model = model.to(torch.bfloat16).train()
    start = time.perf_counter()
    row: dict[str, Any] = {
        "model": case.name,
        "device": case.device,
        "shard": case.shard,
        "optimizer": case.optimizer,
        "offload": case.offload,
    }
    try:
        p = plan(
            model, batch, loss_fn=loss_fn, device=case.device, optimizer=case.optimizer, shard=case.shard,
            offload=case.offload, progress=False,
        )  # fmt: skip
    except InfeasibleBudgetError as e:
        row |= {"minimum_bytes": e.minimum_gb * 2**30, "account": e.takes}
    else:
        row |= {
            "budget_bytes": p.budget_bytes,
            "note": p.note,
            "peak_bytes": p.peak_bytes,
            "baseline_peak_bytes": p.baseline_peak_bytes,
            "overhead": p.overhead,
            "gap": p.gap,
            "moved_bytes": p.moved_bytes,
            "host_peak_bytes": p.host_peak_bytes,
            "stall_seconds": p.stall_seconds,
            "account": dict(p.account),
            "phases": p.phase_peaks,
        }
    row["seconds"] = time.perf_counter() - start
    row["planner_memory_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return row


def line(row: dict[str, Any]) -> str:
    """A row of the table."""
    head = f"| {row['model']} | {row['device']} | 1/{row['shard']} | {row['optimizer']} | {row['offload'] or ''} |"
    cost = f" {row['seconds']:.0f} s | {gb(row['planner_memory_bytes'])} |"
    if "minimum_bytes" in row:
        return f"{head} does not fit; {gb(row['minimum_bytes'])} would do | | | | |{cost}"
    return (
        f"{head} {gb(row['peak_bytes'])} of {gb(row['budget_bytes'])} | {gb(row['baseline_peak_bytes'])} "
        f"| {row['overhead']:+.1%} | {row['gap']:.1%} | {gb(row['moved_bytes'])} |{cost}"
    )


def main() -> None:
    """Plan the cases; print a Markdown table and the accounts, and write JSON where asked."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cards", description=__doc__)
    parser.add_argument("--output", type=Path, help="write the rows as JSON")
    parser.add_argument("--offload", action="store_true", help='plan each case with offload="cpu", too')
    parser.add_argument("--only", default="", help="plan the cases whose model and card contain this, as '8B on h100'")
    options = parser.parse_args()
    rows = []
    heads = ("peak", "with everything kept", "more time", "gap to the bound", "moved", "to plan", "memory to plan")
    print("|", " | ".join(("model", "card", "share", "optimizer", "offload", *heads)), "|")
    print(f"|{5 * '---|'}{len(heads) * '---:|'}", flush=True)
    context = multiprocessing.get_context("spawn")
    asked = [case for case in CASES if options.only in f"{case.name} on {case.device}"]
    ways = (None, "cpu") if options.offload else (None,)
    both = [replace(case, offload=to) for case in asked for to in ways]
    for case in both:
        with context.Pool(1) as pool:
            rows.append(row := pool.apply(measure, (case,)))
        print(line(row), flush=True)
    for row in rows:
        how = f"{row['optimizer']}, offload={row['offload']!r}"
        print(f"\n{row['model']} on {row['device']}, 1/{row['shard']} of it, {how}:")
        print("\n".join(f"  {name:<60.60} {gb(size):>12}" for name, size in row["account"].items() if size))
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        allocator = os.environ.get("PYTORCH_ALLOC_CONF", "")
        report = {"torch": torch.__version__, "allocator": allocator, "rows": rows}
        options.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
