"""Steps compiled by Inductor: torch.compile with and without memory budgets, checkpointed blocks, and our three modes.

Each way has a process of its own, beside an eager copy of the model from the same seed. Peaks are what a step takes
beyond parameters, buffers and batch, by torch's profiler; times are medians over alternating pairs with the eager copy,
of processor time; gradients are compared with that copy's (a model with dropout draws other masks under Inductor: there
they say nothing). "First step" is the time of planning and of the first step, which compiles.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config as functorch_config
import transformers
from torch import nn

from planner import plan
from tests.real_models import CASES, Case, gpt2, resnet50

from . import measure
from .blocks import checkpoint_blocks
from .peers import t5, vit
from .zoo.plain import mlp

Row = dict[str, Any]


def convnext() -> Case:
    """A ConvNeXt of four small stages."""
    config = transformers.ConvNextConfig(hidden_sizes=[32, 64, 128, 256], depths=[1, 1, 2, 1], num_labels=10)
    pixels = torch.randn(4, 3, 96, 96, generator=torch.Generator().manual_seed(0))
    model = transformers.ConvNextForImageClassification(config).train()
    return Case(model, {"pixel_values": pixels, "labels": torch.arange(4) % 10})


def _square(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


class Perceptron(nn.Module):
    """Layers of a perceptron in a class of its own: `compile()` skips frames of torch, as nn.Sequential's is."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp(rate=0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layers(x)
        return found


def small_mlp() -> Case:
    """Four layers of a perceptron."""
    inputs = torch.randn(2048, 128, generator=torch.Generator().manual_seed(0))
    return Case(Perceptron(), {"x": inputs}, _square)


SMALL: dict[str, Callable[[], Case]] = {  # a few minutes each, for a look at all ways
    "small_gpt2": lambda: gpt2(layers=2),
    "small_mlp": small_mlp,
    "small_resnet": lambda: resnet50(depths=(1, 1, 1, 1)),
}
MODELS: dict[str, Callable[[], Case]] = {**CASES, "t5": t5, "vit": vit, "convnext": convnext}
PLANNED = {"aten": "aten", "inductor": "inductor", "modules": "eager"}  # the name of a way -> its mode
BUDGETS = tuple(f"budget {n / 10}" for n in range(7, 0, -1))
SHARES = (0.8, 0.6, 0.45)  # of the peak under torch.compile


def make(name: str) -> Case:
    """A model, always with the same weights."""
    transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    torch.manual_seed(0)
    return {**MODELS, **SMALL}[name]()


def put(case: Case, way: str, budget: int) -> nn.Module:
    """The model, to be run in a way: by torch.compile, or by a plan of so many bytes beyond what is held anyway."""
    kind, _, detail = way.partition(" ")
    if kind == "blocks":
        checkpoint_blocks(case.model)
    if kind in ("compile", "blocks", "budget"):
        if kind == "budget":
            functorch_config.activation_memory_budget = float(detail)
        case.model.compile()
    elif kind != "eager":
        held = measure.held_bytes(case.model, case.batch)
        gb = (held + budget) / 2**30
        p = plan(case.model, case.batch, budget_gb=gb, loss_fn=case.loss_fn, mode=PLANNED[kind], progress=False)  # type: ignore[arg-type]
        print(f"  {way}: predicted {(p.peak_bytes - held) / 2**20:.2f} MiB of {budget / 2**20:.2f}", flush=True)
        p.apply()
    return case.model


def measure_way(name: str, way: str, budget: int, pairs: int) -> Row:
    """One way, against an eager copy."""
    case = make(name)
    plain = copy.deepcopy(case.model)

    def step(model: nn.Module) -> None:
        case.loss(model(**case.batch)).backward()  # type: ignore[no-untyped-call]

    start = time.perf_counter()
    model = put(case, way, budget)
    step(model)
    first = time.perf_counter() - start
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        step(model)
    model.zero_grad(set_to_none=True)
    return {
        "way": way,
        "peak": measure.step_peak(step, model),
        "time": measure.time_ratio(step, model, plain, pairs, clock=time.process_time),
        "gradients": measure.gradient_error(step, model, plain),
        "first step": first,
    }


def compare(name: str, ways: Sequence[str], shares: Sequence[float], pairs: int, limit: float) -> list[Row]:
    """Every way on one model: torch's own, then plans at shares of torch.compile's peak."""
    rows = []
    base = 0
    for way in ("eager", "compile", *ways, *(f"{way} {share}" for share in shares for way in PLANNED)):
        share = float(way.split()[1]) if way.split()[0] in PLANNED else 0.0
        try:
            row = measure.in_own_process(measure_way, name, way, round(share * base), pairs, time_limit=limit)
        except RuntimeError as e:
            row = {"way": way, "error": str(e)[:300]}
        base = row["peak"] if way == "compile" and "peak" in row else base
        rows.append(row)
        print(line(row), flush=True)
    return rows


def line(row: Row) -> str:
    """A row of the table."""
    if "error" in row:
        return f"| {row['way']} | {row['error']} |"
    return (
        f"| {row['way']} | {row['peak'] / 2**20:.2f} | {row['time']:.2f} | {row['gradients']:.1e} | "
        f"{row['first step']:.0f} s |"
    )


def main() -> None:
    """Write a table, and the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "models", nargs="*", default=list(MODELS), help=f"default: {', '.join(MODELS)}; {', '.join(SMALL)}"
    )
    parser.add_argument("--ways", nargs="*", default=["blocks", *BUDGETS])
    parser.add_argument("--shares", nargs="*", type=float, default=list(SHARES))
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--limit", type=float, default=1800, help="seconds for one way")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/compiled.json"))
    given = parser.parse_args()
    found = {}
    for name in given.models:
        print(
            f"\n{name}\n\n| way | peak MiB | time / eager | gradients off by | first step |\n|---|---:|---:|---:|---:|"
        )
        found[name] = compare(name, given.ways, given.shares, given.pairs, given.limit)
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
