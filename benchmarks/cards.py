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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers

from planner import InfeasibleBudgetError, plan
from planner.errors import gb


@dataclass(frozen=True)
class Case:
    """A Llama in bf16 with AdamW, one sequence of 8192 tokens on each card."""

    name: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    device: str
    shard: int = 1
    optimizer: str = "adamw"
    offload: str | None = None


CASES = (
    Case("Llama-3-8B", 32, 4096, 14336, 32, "h200"),
    Case("Llama-3-8B", 32, 4096, 14336, 32, "h100"),
    Case("Llama-3-8B", 32, 4096, 14336, 32, "h100", optimizer="adamw-fused"),
    Case("Llama-3-8B", 32, 4096, 14336, 32, "rtx4090", shard=8),
    Case("Llama-3-70B", 80, 8192, 28672, 64, "h200", shard=32),
    Case("Llama-3-70B", 80, 8192, 28672, 64, "h100", shard=32),
)


def measure(case: Case) -> dict[str, Any]:
    """Plan a case for all of its card's memory; the row says so where that is not enough."""
    torch.set_num_threads(1)
    config = transformers.LlamaConfig(  # type: ignore[call-arg]
        num_hidden_layers=case.layers, hidden_size=case.hidden, intermediate_size=case.intermediate,
        num_attention_heads=case.heads, num_key_value_heads=8, vocab_size=128256, max_position_embeddings=8192,
        use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16).train()
    ids = torch.zeros(1, 8192, dtype=torch.long)
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
            model, {"input_ids": ids, "labels": ids}, device=case.device, optimizer=case.optimizer, shard=case.shard,
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
    parser.add_argument("--offload", action="store_true", help='plan each case of one card with offload="cpu", too')
    parser.add_argument("--only", default="", help="plan the cases whose model and card contain this, as '8B on h100'")
    options = parser.parse_args()
    rows = []
    heads = ("peak", "with everything kept", "more time", "gap to the bound", "moved", "to plan", "memory to plan")
    print("|", " | ".join(("model", "card", "share", "optimizer", "offload", *heads)), "|")
    print(f"|{5 * '---|'}{len(heads) * '---:|'}", flush=True)
    context = multiprocessing.get_context("spawn")
    asked = [case for case in CASES if options.only in f"{case.name} on {case.device}"]
    ways = (None, "cpu") if options.offload else (None,)
    both = [replace(case, offload=to) for case in asked for to in ways if to is None or case.shard == 1]
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
