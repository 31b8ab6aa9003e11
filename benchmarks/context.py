"""The longest sequence, or the largest batch, that a budget lets train: `python -m benchmarks.context`.

Each is looked for with every op whole, with ops in pieces, and with the optimizer inside the backward pass. Nothing is
trained: what fits is what has a plan.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from planner import InfeasibleBudgetError, plan

STEPS = 2  # bisections after the last power of two that fits: sizes are exact to a quarter of it
WAYS: Mapping[str, Mapping[str, Any]] = {
    "whole ops": {},
    "in pieces": {"pieces": "auto"},
    "optimizer in the backward pass": {"step_in_backward": True},
}


@dataclass(frozen=True)
class Case:
    """A model and the size that grows.

    Attributes:
        name: of the model.
        size: what grows.
        first: the smallest size that is tried.
        budgets: in MB.
        make: a size -> the model and its batch.
    """

    name: str
    size: str
    first: int
    budgets: tuple[int, ...]
    make: Callable[[int], tuple[torch.nn.Module, dict[str, torch.Tensor]]]


def llama(length: int) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """A narrow Llama with a large vocabulary, and one sequence of tokens."""
    config = transformers.LlamaConfig(  # type: ignore[call-arg]
        num_hidden_layers=2, hidden_size=32, intermediate_size=96, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=16000, max_position_embeddings=length, use_cache=False,
    )  # fmt: skip
    ids = torch.zeros(1, length, dtype=torch.long)
    return transformers.LlamaForCausalLM(config).train(), {"input_ids": ids, "labels": ids}


def vit(batch: int) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """A narrow ViT, and images with labels."""
    config = transformers.ViTConfig(
        num_hidden_layers=2, hidden_size=64, intermediate_size=256, num_attention_heads=4, image_size=32, patch_size=4,
        num_labels=10, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    images, labels = torch.zeros(batch, 3, 32, 32), torch.zeros(batch, dtype=torch.long)
    return transformers.ViTForImageClassification(config).train(), {"pixel_values": images, "labels": labels}


CASES = (
    Case("Llama, vocabulary of 16,000", "tokens", 128, (64, 128), llama),
    Case("ViT", "images", 8, (16, 32), vit),
)


def fits(case: Case, size: int, budget: int, options: Mapping[str, Any]) -> bool:
    """Whether a size has a plan within the budget, with SGD."""
    model, batch = case.make(size)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        plan(model, batch, budget_gb=f"{budget} MB", optimizer=optimizer, progress=False, **options)
    except InfeasibleBudgetError:
        return False
    return True


def largest(case: Case, budget: int, options: Mapping[str, Any]) -> int:
    """The largest size that fits, of the powers of two times the first and of what bisects them; 0 for none."""
    size = case.first
    if not fits(case, size, budget, options):
        return 0
    while fits(case, 2 * size, budget, options):
        size *= 2
    low, high = size, 2 * size
    for _ in range(STEPS):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(case, middle, budget, options) else (low, middle)
    return low


def main() -> None:
    """Look for every largest size; print a Markdown table, and write JSON where asked."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.context", description=__doc__)
    parser.add_argument("--output", type=Path, help="write the rows as JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    print(f"| model | budget | | {' | '.join(WAYS)} |\n|---|---:|---|{'---:|' * len(WAYS)}")
    for case in CASES:
        for budget in case.budgets:
            found = {way: largest(case, budget, given) for way, given in WAYS.items()}
            rows.append({"model": case.name, "budget_mb": budget, "size": case.size, **found})
            sizes = " | ".join(str(n or "none") for n in found.values())
            print(f"| {case.name} | {budget} MB | {case.size} | {sizes} |", flush=True)
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
