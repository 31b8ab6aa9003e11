"""Steps compiled by Inductor: torch.compile with and without memory budgets, checkpointed blocks, and our three modes.

`python -m benchmarks.compiled` writes benchmarks/results/compiled_cpu.json, docs/compiled.md and docs/compiled.svg.

Each model has a process of its own, with copies from one seed: an eager one, one by torch.compile, and one for each way
that is compared; two or three of them take turns. Peaks are what a step takes beyond parameters, buffers and batch, by
torch's profiler; times are medians, over the rounds, of processor time over that of another model in the same round.
Plans are made for the peaks that torch's own ways reach with right gradients, and for shares of torch.compile's.
Gradients are compared, from one seed, with torch.compile's, which keeps everything: Inductor draws other dropout
masks than eager mode. Where they are neither those nor eager mode's, finite differences of the loss along them judge.
How long a model takes to compile is measured apart, each way with caches of its own that are empty.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch._dynamo.config as dynamo_config
import torch._functorch.config as functorch_config
import transformers
from torch import nn
from torch._inductor.compile_fx import compile_fx

from planner import Plan, PlannerError, applied_plan, plan
from planner.compat.dispatch import lasting_modes_off
from tests.real_models import CASES, Case, gpt2, resnet50

from . import measure
from .blocks import NotApplicableError, checkpoint_blocks
from .compiled_report import WRONG, draw, off_by, page, wrong
from .peers import t5, vit
from .zoo.plain import mlp

Row = dict[str, Any]
Step = Callable[[nn.Module], None]


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
WARM = 36  # steps of a planned model before any is timed: the loop is looked at in the first ones, and seldom later
SAME = 1.002  # peaks this close are planned for once, at the lower one
COMPILED_AT = 0.6  # of torch.compile's peak: the plan whose time of compiling is taken
RESULTS = Path("benchmarks/results/compiled_cpu.json")
PAGE, PLOT = Path("docs/compiled.md"), Path("docs/compiled.svg")


def make(name: str) -> Case:
    """A model, always with the same weights."""
    transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    torch.manual_seed(0)
    return {**MODELS, **SMALL}[name]()


def put(case: Case, way: str, budget: int) -> None:
    """Run the model in a way: by torch.compile, or by a plan of so many bytes beyond what is held anyway."""
    kind, _, detail = way.partition(" ")
    if kind == "blocks":
        checkpoint_blocks(case.model)
    functorch_config.activation_memory_budget = float(detail) if kind == "budget" else 1.0
    if kind in PLANNED:
        planned(case, kind, budget).apply()
    elif kind != "eager":
        # a backend of its own: else a model runs what another one of its class was compiled to
        case.model.compile(backend=lambda graph, inputs: compile_fx(graph, inputs))


def planned(case: Case, kind: str, budget: int) -> Plan:
    """A plan of so many bytes beyond what is held anyway."""
    gb = (measure.held_bytes(case.model, case.batch) + budget) / 2**30
    mode: Any = PLANNED[kind]
    return plan(case.model, case.batch, budget_gb=gb, loss_fn=case.loss_fn, mode=mode, progress=False)


def stepper(case: Case) -> Step:
    """One training step of such a model, its output held to the end."""

    def step(model: nn.Module) -> None:
        output = model(**case.batch)
        case.loss(output).backward()  # type: ignore[no-untyped-call]

    return step


def measure_model(name: str, ways: Sequence[str], shares: Sequence[float], pairs: int) -> Row:
    """Every way on one model: torch's own, plans at the peaks that these reach, and at shares of torch.compile's.

    Args:
        name: of the model.
        ways: of torch's, as for `put()`.
        shares: of torch.compile's peak, for plans.
        pairs: rounds that are timed.
    """
    measure.keep_freed_memory()
    dynamo_config.recompile_limit, dynamo_config.fail_on_recompile_limit_hit = 64, True
    models: dict[str, nn.Module] = {}
    rows: dict[str, Row] = {}
    step = stepper(make(name))
    for way in dict.fromkeys(("eager", "compile", *ways)):
        rows[way] = add(name, way, way, 0, step, models)
    base = rows["compile"]["peak"]
    last = 0
    for peak, way in sorted((rows[way]["peak"], way) for way in ways if right(rows[way])):
        if last * SAME < peak < base:
            rows[f"inductor at {way}"] = add(name, "inductor", f"inductor at {way}", peak, step, models)
            last = peak
    for share in shares:
        for kind in ("aten", "inductor"):
            label = f"{kind} at {share:.0%}"
            rows[label] = add(name, kind, label, int(share * base), step, models)
    for label in models:
        # two or three others at a time take turns with it
        beside = {"eager", "compile", label.partition(" at ")[2], label.replace("inductor", "aten"), label}
        rows[label]["time"] = _times(label, step, {way: models[way] for way in models if way in beside}, pairs)
        now, row = applied_plan(models[label]), rows[label]
        if now is not None and now.peak_bytes != row["held"] + row["predicted"]:
            raise RuntimeError(f"{label}: a plan made anew was timed, of {now.peak_bytes} bytes: {row}")
        print(line(label, rows[label]), flush=True)
    return rows


@lasting_modes_off()  # the models that were planned before are not to learn what this one's steps take
def add(name: str, way: str, label: str, budget: int, step: Step, models: dict[str, nn.Module]) -> Row:
    """A way's peak and gradients; the model that runs in it is added to `models` by its label."""
    case = make(name)
    start = time.perf_counter()
    try:
        put(case, way, budget)
        for _ in range(3):  # the first compiles and shows the loop, for which the second may be planned anew
            step(case.model)
            case.model.zero_grad(set_to_none=True)
    except (PlannerError, NotApplicableError) as e:
        print(f"  {label}: {e}", flush=True)
        return {"error": f"{type(e).__name__}: {e}"[:300]}
    models[label] = case.model
    row: Row = {"peak": measure.step_peak(step, case.model)}
    if (p := applied_plan(case.model)) is not None:
        held = measure.held_bytes(case.model, case.batch)
        row |= {"budget": budget, "predicted": p.peak_bytes - held, "held": held, "overhead": p.overhead}
        row |= {"mode": p.options.mode, "note": p.note}
    for _ in range(WARM if p is not None else 0):
        step(case.model)
        case.model.zero_grad(set_to_none=True)
    row["gradients"] = measure.gradient_error(step, case.model, models.get("compile", case.model))
    row["of eager's"] = measure.gradient_error(step, case.model, models["eager"])
    if off_by(row) > WRONG:
        slopes = [
            measure.slope(step, model, lambda model=model: float(case.loss(model(**case.batch))))
            for model in (case.model, models["eager"])
        ]
        row["slope"] = slopes[0] / slopes[1]
    held_now = f", predicted {row['predicted'] / 2**20:.3f}" if p is not None else ""
    seconds = time.perf_counter() - start
    print(f"  {label}: {row['peak'] / 2**20:.3f} MiB{held_now}; {seconds:.0f} s", flush=True)
    return row


def _times(label: str, step: Step, models: dict[str, nn.Module], pairs: int) -> dict[str, float]:
    """A way's processor time over each one's: medians over rounds."""
    taken = dict(zip(models, measure.model_times(step, list(models.values()), pairs), strict=True))
    return {
        other: statistics.median(a / b for a, b in zip(taken[label], theirs, strict=True))
        for other, theirs in taken.items()
    }


def compiling(name: str, way: str, budget: int, path: str) -> float:
    """Seconds until a way's first step has ended: compiled from nothing; for a plan, planned and compared, too.

    Args:
        name: of the model.
        way: "compile", "inductor", or "known": a plan from the file that "inductor" wrote.
        budget: of the plan.
        path: of the file, in a folder of its own, where costs of ops and what was compared are kept, too.
    """
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"TORCHINDUCTOR_CACHE_DIR": folder, "CHECKPOINT_PLANNER_CACHE": f"{Path(path).parent}/costs"}
        torch.compile(lambda x: (x @ x).sin().sum())(torch.randn(8, 8, requires_grad=True)).backward()  # type: ignore[no-untyped-call]
        make(name)
        case = make(name)
        step = stepper(case)
        start = time.perf_counter()
        if way == "known":
            Plan.load(path).apply(case.model)
        elif way == "inductor":
            p = planned(case, way, budget)
            p.save(path)
            p.apply()
        else:
            put(case, way, budget)
        step(case.model)
        return time.perf_counter() - start


def compile_times(name: str, base: int, limit: float) -> Row:
    """Seconds of `compiling()` for each of its ways, each in a process of its own; in words where one fails."""
    found: Row = {}
    with tempfile.TemporaryDirectory() as folder:
        for way in ("compile", "inductor", "known"):
            given = (name, way, int(COMPILED_AT * base), f"{folder}/plan.json")
            try:
                found[way] = measure.in_own_process(compiling, *given, time_limit=limit)
            except RuntimeError as e:
                found[way] = str(e)[:300]
    print(f"  until the first step has ended: {found}", flush=True)
    return found


def right(row: Row) -> bool:
    """Whether a way ran, with torch.compile's gradients or others that are right."""
    return "peak" in row and not wrong(row)


def line(label: str, row: Row) -> str:
    """What is printed of a way."""
    time = row["time"]
    times = f"time {time['eager']:.3f} of eager, {time['compile']:.3f} of compile"
    return f"  {label}: {times}; gradients off by {off_by(row):.1e}"


def main() -> None:
    """Measure, and write the figures, the page and the plot."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compiled", description=__doc__)
    parser.add_argument("models", nargs="*", help=f"default: {', '.join(MODELS)}; also {', '.join(SMALL)}")
    parser.add_argument("--ways", nargs="*", default=["blocks", *BUDGETS])
    parser.add_argument("--shares", nargs="*", type=float, default=list(SHARES))
    parser.add_argument("--pairs", type=int, default=15, help="rounds that are timed")
    parser.add_argument("--limit", type=float, default=1800, help="seconds for one comparison")
    parser.add_argument("--out", type=Path, default=RESULTS, help="JSON; models that are not measured stay in it")
    parser.add_argument("--only", choices=("steps", "compiling"), help="of the two, what to measure; the other stays")
    parser.add_argument("--report", action="store_true", help="measure nothing; make the page from the JSON file")
    given = parser.parse_args()
    report = json.loads(given.out.read_text()) if given.out.exists() else {"models": {}}
    for name in () if given.report else given.models or MODELS:
        print(name, flush=True)
        found = {"compiling": {}, **report["models"].get(name, {})}
        if given.only != "compiling":
            asked = (name, given.ways, given.shares, given.pairs)
            try:
                found["rows"] = measure.in_own_process(measure_model, *asked, time_limit=given.limit)
            except RuntimeError as e:
                print(f"  {e}", flush=True)
                continue
            found["pairs"] = given.pairs
        elif "rows" not in found:
            print("  its steps were not measured yet", flush=True)
            continue
        if given.only != "steps":
            found["compiling"] = compile_times(name, found["rows"]["compile"]["peak"], given.limit)
        report["models"][name] = found
        report |= {"device": "CPU, 1 thread", "platform": measure.software(), "torch": torch.__version__}
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps(report, indent=1) + "\n")
    if given.out == RESULTS:
        PAGE.write_text(page(report))
        PLOT.write_text(draw(report))


if __name__ == "__main__":
    main()
