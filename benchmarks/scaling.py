"""How the time to solve grows with the number of repeated layers: `python -m benchmarks.scaling`."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
import transformers

from planner import plan

LAYERS = (5, 10, 20, 40, 80)
SHARE = 0.4  # of the way from what is resident to the peak with everything kept


def decoder(layers: int) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """A narrow Llama, whose graph is that of a wide one."""
    config = transformers.LlamaConfig(
        num_hidden_layers=layers, hidden_size=64, intermediate_size=192, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=200, max_position_embeddings=64, use_cache=False,
    )  # fmt: skip
    ids = torch.zeros(2, 64, dtype=torch.long)
    return transformers.LlamaForCausalLM(config).train(), {"input_ids": ids, "labels": ids}


def measure(layers: int) -> dict[str, float]:
    """Plan a decoder. Nodes are those of the graphs that keep everything."""
    model, batch = decoder(layers)
    whole = plan(model, batch, budget_gb="100%", progress=False)
    nodes = sum(len(m.graph.nodes) for pair in whole.graph_modules for m in (pair.forward, pair.backward))
    budget = whole.resident_bytes + SHARE * (whole.baseline_peak_bytes - whole.resident_bytes)
    start = time.perf_counter()
    p = plan(model, batch, budget_gb=budget / 2**30, progress=False)
    return {
        "layers": layers,
        "nodes": nodes,
        "ops": len(whole.timeline),
        "planning_seconds": time.perf_counter() - start,
        "solver_seconds": p.solve_seconds,
        "overhead": p.overhead,
        "gap": p.gap,
    }


def main() -> None:
    """Measure every size; print a Markdown table, and write JSON where asked."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling", description=__doc__)
    parser.add_argument("--layers", type=int, nargs="+", default=LAYERS)
    parser.add_argument("--output", type=Path, help="write the rows as JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    print("| layers | nodes | ops | plan() | solver | solver a layer | overhead | gap |\n" + "|---:" * 8 + "|")
    for layers in options.layers:
        rows.append(r := measure(layers))
        print(
            f"| {layers} | {r['nodes']} | {r['ops']} | {r['planning_seconds']:.1f} s | {r['solver_seconds']:.1f} s "
            f"| {r['solver_seconds'] / layers:.3f} s | {r['overhead']:.2%} | {r['gap']:.2%} |",
            flush=True,
        )
    if options.output:
        report = {"device": "CPU, 1 thread", "torch": torch.__version__, "share": SHARE, "rows": rows}
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
