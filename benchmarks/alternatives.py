"""Torch's own ways to save memory, and plans at the same peaks, on the demo's model.

Each runs in a process of its own, beside an eager copy of the model. Peaks come from the allocator events of
`torch.profiler`; so do FLOPs (under a `FlopCounterMode`, torch.compile steps aside). Times come
from steps that alternate with eager's. Gradients are compared with eager's from the same seed, dropout included.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from tqdm import tqdm

from planner import InfeasibleBudgetError, plan
from planner.demo import small_gpt2

Batch = dict[str, torch.Tensor]


def eager(model: nn.Module, batch: Batch) -> None:
    """Nothing."""


def checkpoint_blocks(model: nn.Module, batch: Batch) -> None:
    """`torch.utils.checkpoint` around every block, as transformers does it."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})  # type: ignore[operator]


def activation_memory_budget(ratio: float) -> Callable[[nn.Module, Batch], None]:
    """torch.compile's own budget, without Inductor so that only recomputation differs."""

    def put(model: nn.Module, batch: Batch) -> None:
        import torch._functorch.config as config

        config.activation_memory_budget = ratio
        model.compile(backend="aot_eager")

    return put


def planned(megabytes: float) -> Callable[[nn.Module, Batch], None]:
    """A plan at a peak, or at the smallest that is feasible."""

    def put(model: nn.Module, batch: Batch) -> None:
        budget = megabytes / 2**10
        try:
            plan(model, batch, budget_gb=budget, progress=False).apply()
        except InfeasibleBudgetError as e:
            plan(model, batch, budget_gb=e.minimum_gb, progress=False).apply()

    return put


def step(model: nn.Module, batch: Batch) -> None:
    """One step; the output is held to its end."""
    output = model(**batch)
    output.loss.backward()


def peak_bytes(model: nn.Module, batch: Batch) -> int:
    """Parameters, buffers and batch, by storage, and the most that the step holds beside them."""
    everything = [*model.parameters(), *model.buffers(), *batch.values()]
    held = sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in everything}.values())
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step(model, batch)
    model.zero_grad(set_to_none=True)
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events = [e for e in json.loads(trace.read_text())["traceEvents"] if e["name"] == "[memory]"]
    events.sort(key=lambda e: (e["ts"], e["args"]["Ev Idx"]))
    return held + max(accumulate(e["args"]["Bytes"] for e in events))


def flops(model: nn.Module, batch: Batch) -> int:
    """Of one step, as the profiler counts them: matrix products, additions and multiplications."""
    with profile(activities=[ProfilerActivity.CPU], with_flops=True) as profiler:
        step(model, batch)
    model.zero_grad(set_to_none=True)
    return sum(e.flops for e in profiler.events() if e.flops)


def gradients(model: nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
    """Of one step from a fixed seed."""
    torch.manual_seed(1)
    step(model, batch)
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def measure(put: Callable[[nn.Module, Batch], None], pairs: int) -> dict[str, float]:
    """Put one alternative on the model and measure it, beside an eager copy."""
    torch.manual_seed(0)
    model, batch = small_gpt2()
    plain = copy.deepcopy(model)
    put(model, batch)
    ratios = []
    for i in range(pairs + 2):
        seconds = {}
        for m in (model, plain) if i % 2 else (plain, model):
            start = time.perf_counter()
            step(m, batch)
            seconds[m] = time.perf_counter() - start
            m.zero_grad(set_to_none=True)
        ratios.append(seconds[model] / seconds[plain])
    ours, theirs = gradients(model, batch), gradients(plain, batch)
    error = max(float((ours[n] - g).abs().max() / g.abs().max()) for n, g in theirs.items())
    del ours, theirs
    return {
        "peak_bytes": peak_bytes(model, batch),
        "flops": flops(model, batch) / flops(plain, batch) - 1,
        "time": statistics.median(ratios[2:]) - 1,
        "gradient_error": error,
    }


def _in_a_process(name: str, pairs: int) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.alternatives", "--one", name, "--pairs", str(pairs)]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(f"{name}: {result.stderr}")
    found: dict[str, float] = json.loads(result.stdout.splitlines()[-1])
    return found


def _parse(name: str) -> Callable[[nn.Module, Batch], None]:
    kind, _, number = name.partition(" ")
    if kind == "eager":
        return eager
    if kind == "checkpoint":
        return checkpoint_blocks
    return planned(float(number)) if kind == "planned" else activation_memory_budget(float(number))


def main() -> None:
    """Measure each alternative, and plans at their peaks; print a Markdown table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.alternatives", description=__doc__)
    parser.add_argument("--output", type=Path, help="write the rows as JSON")
    parser.add_argument("--pairs", type=int, default=9, help="pairs of steps that are timed")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.one:
        print(json.dumps(measure(_parse(options.one), options.pairs)))
        return
    rows: dict[str, dict[str, float]] = {}
    for name in tqdm(["eager", "checkpoint", "budget 0.7", "budget 0.5", "budget 0.3", "budget 0.0"]):
        rows[name] = _in_a_process(name, options.pairs)
        if name != "eager":
            same = f"planned {rows[name]['peak_bytes'] / 2**20:.1f}"
            rows[same] = _in_a_process(same, options.pairs)
    print("|  | measured peak | FLOPs | time | gradients: largest relative difference |\n|---|---:|---:|---:|---:|")
    for name, row in rows.items():
        print(
            f"| {name} | {row['peak_bytes'] / 2**20:.1f} MB | {row['flops']:+.1%} | {row['time']:+.1%} "
            f"| {row['gradient_error']:.0e} |"
        )
    if options.output:
        report = {"device": "CPU, 1 thread", "torch": torch.__version__, "pairs": options.pairs, "rows": rows}
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
