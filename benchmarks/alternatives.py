"""Torch's own ways to save memory, and plans at the same peaks, on the demo's model.

Each runs in a process of its own, beside an eager copy of the model. Peaks come from the allocator events of
`torch.profiler`; so do FLOPs (under a `FlopCounterMode`, torch.compile steps aside). Times come
from steps that alternate with eager's. Gradients are compared with eager's from the same seed, dropout included.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from tqdm import tqdm

from planner import InfeasibleBudgetError, plan
from planner.cli.demo import small_gpt2

from . import measure

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


def flops(model: nn.Module, batch: Batch) -> int:
    """Of one step, as the profiler counts them: matrix products, additions and multiplications."""
    with profile(activities=[ProfilerActivity.CPU], with_flops=True) as profiler:
        step(model, batch)
    model.zero_grad(set_to_none=True)
    return sum(e.flops for e in profiler.events() if e.flops)


def measure_one(name: str, pairs: int) -> dict[str, float]:
    """Put one alternative on the model and measure it, beside an eager copy."""
    torch.manual_seed(0)
    model, batch = small_gpt2()
    plain = copy.deepcopy(model)
    _parse(name)(model, batch)
    run = partial(step, batch=batch)
    ratio = measure.time_ratio(run, model, plain, pairs)
    error = measure.gradient_error(run, model, plain)
    return {
        "peak_bytes": measure.held_bytes(model, batch) + measure.step_peak(run, model),
        "flops": flops(model, batch) / flops(plain, batch) - 1,
        "time": ratio - 1,
        "gradient_error": error,
    }


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
    options = parser.parse_args()
    rows: dict[str, dict[str, float]] = {}
    for name in tqdm(["eager", "checkpoint", "budget 0.7", "budget 0.5", "budget 0.3", "budget 0.0"]):
        rows[name] = measure.in_own_process(measure_one, name, options.pairs)
        if name != "eager":
            same = f"planned {rows[name]['peak_bytes'] / 2**20:.1f}"
            rows[same] = measure.in_own_process(measure_one, same, options.pairs)
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
