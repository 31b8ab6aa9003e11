"""Several ranks: DDP and FSDP2 as they are, with `torch.utils.checkpoint` around every block, with plans at that peak.

Ranks are processes on gloo, on a CPU. Peaks are allocator events of `torch.profiler` of a third step, with what is
there before it: parameters or shards, DDP's buckets, and the batch. Gradients are compared with those of the first way
from the same seed, dropout included. Times are not measured: ranks share the cores.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from planner import applied_plan, plan
from planner.cli.demo import small_gpt2
from tests.measure import peak_of
from tests.processes import on_ranks

RESULTS = Path(__file__).parent / "results" / "ranks_cpu.json"
SEQUENCES, TOKENS = 8, 128


def ddp(model: nn.Module) -> nn.Module:
    """Every rank has the whole model."""
    return DistributedDataParallel(model)


def fsdp2(model: Any) -> nn.Module:
    """`fully_shard` of every block, and of the rest."""
    for block in model.transformer.h:
        fully_shard(block)
    return fully_shard(model)


ENGINES: dict[str, Callable[[Any], nn.Module]] = {"DDP": ddp, "FSDP2": fsdp2}


def main() -> None:
    """Measure, print a table, and write it down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    options = parser.parse_args()
    rows = [row for engine in ENGINES for ranks in options.ranks for row in measured(engine, ranks)]
    RESULTS.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1) + "\n")
    print("| | ranks | | peak of a rank | predicted | gradients differ by |\n|---|---:|---|---:|---:|---:|")
    for row in rows:
        predicted = "" if row["predicted"] is None else f"{row['predicted'] / 2**20:.2f} MB"
        peaks = " to ".join(f"{n / 2**20:.2f}" for n in sorted({min(row["peaks"]), max(row["peaks"])}))
        print(f"| {row['engine']} | {row['ranks']} | {row['way']} | {peaks} MB | {predicted} | {row['error']:.1g} |")


def measured(engine: str, ranks: int) -> list[dict[str, Any]]:
    """One engine, three ways."""
    found = on_ranks(ranks, on_rank, engine, limit=600)
    rows = []
    for way in found[0]:
        each = [rank[way] for rank in found]
        rows.append(
            {
                "engine": engine,
                "ranks": ranks,
                "way": way,
                "peaks": [one["peak"] for one in each],
                "predicted": each[0]["predicted"],
                "error": max(one["error"] for one in each),
            }
        )
    return rows


def on_rank(engine: str) -> dict[str, dict[str, Any]]:
    """What one rank measures."""
    torch.manual_seed(dist.get_rank())
    tokens = torch.randint(0, 1000, (SEQUENCES, TOKENS))
    usual, expected = step_of(engine, tokens)
    found = {"as it is": {"peak": usual, "predicted": None, "error": 0.0}}

    def checkpoint(model: Any) -> None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

    peak, gradients = step_of(engine, tokens, checkpoint)
    found["every block checkpointed"] = {"peak": peak, "predicted": None, "error": error(gradients, expected)}
    least = torch.tensor(peak)
    dist.all_reduce(least, dist.ReduceOp.MIN)
    kept: list[nn.Module] = []

    def planned(model: nn.Module) -> None:
        kept.append(plan(model, budget_gb=least.item() / 2**30, progress=False).apply())

    peak, gradients = step_of(engine, tokens, planned)
    made = applied_plan(kept[0])
    assert made is not None
    found["planned, at that peak"] = {
        "peak": peak,
        "predicted": made.peak_bytes,
        "error": error(gradients, expected),
        "overhead": made.overhead,
    }
    return found


def step_of(
    engine: str, tokens: torch.Tensor, prepare: Callable[[Any], None] = lambda model: None
) -> tuple[int, list[torch.Tensor]]:
    """Bytes at the peak of the third step, and its gradients."""
    torch.manual_seed(0)
    model, _ = small_gpt2()
    prepare(model)
    wrapped = ENGINES[engine](model)

    def step() -> Any:
        torch.manual_seed(1)
        output = wrapped(input_ids=tokens, labels=tokens)
        output.loss.backward()
        return output

    for _ in range(2):  # DDP makes its buckets anew in the second step
        step()
        wrapped.zero_grad()
    held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in map(local, wrapped.parameters())}
    buckets = sum(held.values()) if isinstance(wrapped, DistributedDataParallel) else 0
    with tempfile.TemporaryDirectory() as folder:
        peak = peak_of(step, Path(folder))
    before = sum(held.values()) + buckets + tokens.nbytes
    return peak + before, [local(p.grad).clone() for p in wrapped.parameters() if p.grad is not None]


def local(t: torch.Tensor) -> torch.Tensor:
    """What this rank has of a tensor."""
    return t.to_local() if isinstance(t, DTensor) else t


def error(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    """The largest difference of any gradient, relative to the largest entry of that gradient."""
    pairs = [(a, b) for a, b in zip(ours, theirs, strict=True) if a.numel()]
    return max(float((a - b).abs().max() / b.abs().max().clamp_min(1e-30)) for a, b in pairs)


if __name__ == "__main__":
    main()
