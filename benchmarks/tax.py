"""What a plan with room to spare costs beside eager, whole step against whole step: `python -m benchmarks.tax [names]`.

One process a model; what was found is written after each, to benchmarks/results/tax_cpu.json and docs/tax.md.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from planner import plan

from . import tax_graphs
from .measure import held_bytes, in_own_process, in_turns, software
from .step_bytes import step_bytes
from .survey import fresh
from .tax_report import page
from .zoo import build
from .zoo.case import Case, noise, square

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks/results/tax_cpu.json"
PAGE = ROOT / "docs/tax.md"
PAIRS = 31  # of steps that are timed
WARM = 33  # steps before
TIME_LIMIT = 600.0  # seconds a model may take
LAYERS = (2, 12)  # of the transformers of tiny tensors, whose steps are host time alone
ZOO = {
    "text": ("bert", "t5", "gpt2", "llama", "mixtral", "qwen3_moe", "mamba", "rwkv"),
    "speech": ("wav2vec2", "whisper"),
    "vision": ("vit", "swin", "convnext_v2", "resnet", "efficientnet", "segformer", "upernet", "detr"),
    "diffusion": ("unet_2d", "dit", "autoencoder_kl"),
    "plain": ("perceptron", "densenet", "unet", "transformer_encoder", "mixer", "lstm", "graph_attention"),
}
QUICK = ("gpt2", "segformer", "unet_2d", "transformer_encoder")


@dataclass(frozen=True)
class Row:
    """What was found for one model: planned over eager, and eager's own figures in seconds and bytes.

    `captured` is the time of the step under `torch.compile(backend="aot_eager")` over eager's; None where that fails.
    """

    name: str
    family: str
    seconds: float = 0.0
    time: float = 0.0
    captured: float | None = None
    peak_bytes: int = 0
    peak: float = 0.0
    moved_bytes: int = 0
    moved: float = 0.0
    why: str = ""


@dataclass(frozen=True)
class Host:
    """Seconds of processor time of one step of a transformer of tiny tensors, and what its backward graph calls."""

    layers: int
    dropout: float
    eager_forward: float
    eager_backward: float
    forward: float
    backward: float
    ratio: float
    nodes: int
    kernels: int


def stepping(case: Case, model: nn.Module) -> Callable[[], None]:
    """One training step, as a training loop has it."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        loss = case.loss(case.call(model, fresh(case.batch)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _cases(family: str, name: str) -> tuple[Case, Case]:
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        made.append(build(family, name))
    return made[0], made[1]


def row(family: str, name: str) -> Row:
    """Measure one model of the zoo."""
    planned, eager = _cases(family, name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plan(planned.model, planned.batch, budget_gb=64, loss_fn=planned.loss_fn, progress=False).apply()
        steps = [stepping(planned, planned.model), stepping(eager, eager.model)]
        compiled = _compiled(family, name)
        timed = steps if compiled is None else [*steps, compiled]
        in_turns(timed, WARM)  # memory is asked for, and the planner sees the loop
        times = in_turns(timed, PAIRS)
        ratios = [_median([t / e for t, e in zip(each, times[1], strict=True)]) for each in times]
        # the planner looks at some steps, in which autograd adds out of place: at no two in a row by now
        (peak, moved), (eager_peak, eager_moved) = (min(step_bytes(step) for _ in range(2)) for step in steps)
    batch = planned.batch if isinstance(planned.batch, dict) else {}
    held = held_bytes(eager.model, {k: t for k, t in batch.items() if isinstance(t, torch.Tensor)})
    total = held + eager_peak
    captured = None if compiled is None else ratios[2]
    ratio = (held + peak) / total
    return Row(name, family, _median(times[1]), ratios[0], captured, total, ratio, eager_moved, moved / eager_moved)


def _compiled(family: str, name: str) -> Callable[[], None] | None:
    """Steps of the model under torch.compile with nothing planned, and eager's ops; None where that fails."""
    case, _ = _cases(family, name)
    step = stepping(case, torch.compile(case.model, backend="aot_eager"))
    try:
        step()
    except Exception:  # torch.compile cannot, or gives what has no backward pass
        return None
    return step


def host(layers: int, dropout: float) -> Host:
    """Host time of a transformer encoder on tensors of 16 rows, in pairs of steps."""

    def make() -> Case:
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=dropout, batch_first=True)
        model = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False).train()
        return Case(model, noise(2, 8, 16), square)

    planned, eager = make(), make()
    p = plan(planned.model, planned.batch, budget_gb=64, loss_fn=square, progress=False)
    calls = [n for graphs in p.graph_modules for n in graphs.backward.graph.nodes if n.op == "call_function"]
    kernels = [n for n in calls if getattr(n.target, "is_view", False) is False and "getitem" not in n.name]
    p.apply()
    seconds: dict[str, list[float]] = {"forward": [], "backward": [], "eager_forward": [], "eager_backward": []}
    for i in range(10 * PAIRS + 10):
        for prefix, case in (("", planned), ("eager_", eager)) if i % 2 else (("eager_", eager), ("", planned)):
            start = time.process_time()
            loss = case.loss(case.model(case.batch))
            middle = time.process_time()
            loss.backward()
            end = time.process_time()
            case.model.zero_grad()
            if i >= 10:
                seconds[f"{prefix}forward"].append(middle - start)
                seconds[f"{prefix}backward"].append(end - middle)
    ratios = [
        (a + b) / (c + d)
        for a, b, c, d in zip(
            *(seconds[k] for k in ("forward", "backward", "eager_forward", "eager_backward")), strict=True
        )
    ]
    return Host(layers, dropout, ratio=_median(ratios), nodes=len(calls), kernels=len(kernels),
                **{k: _median(v) for k, v in seconds.items()})  # fmt: skip


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def attempt(measure: Callable[..., Any], *given: Any) -> Any:
    """What a function finds in a process of its own; for a model that fails, a row that says why."""
    try:
        return in_own_process(measure, *given, time_limit=TIME_LIMIT)
    except RuntimeError as e:
        if measure is not row:
            raise
        return Row(given[1], given[0], why=str(e))


def write(rows: Mapping[str, Any], hosts: list[Any], graphs: list[Any]) -> None:
    """The rows as JSON, in the order above, and the page."""
    names = [name for family in ZOO.values() for name in family]
    report = {
        "device": "CPU, 1 thread",
        "platform": software(),
        "torch": torch.__version__,
        "pairs": PAIRS,
        "models": [rows[name] for name in names if name in rows],
        "host": hosts,
        "graphs": graphs,
    }
    RESULTS.write_text(json.dumps(report, indent=1) + "\n")
    PAGE.write_text(page(report))


def main() -> None:
    """Measure, write, and make the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tax", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these models; other rows stay")
    parser.add_argument("--quick", action="store_true", help=f"only {', '.join(QUICK)}")
    parser.add_argument("--graphs", action="store_true", help="only host time and nodes of emitted graphs")
    parser.add_argument("--report", action="store_true", help="measure nothing; make the page from the JSON file")
    options = parser.parse_args()
    before = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"models": [], "host": []}
    todo = {name: family for family, names in ZOO.items() for name in names}
    wanted = options.names or (QUICK if options.quick else list(todo))
    if unknown := set(wanted) - todo.keys():
        parser.error(f"no such model: {', '.join(sorted(unknown))}")
    rows = {r["name"]: r for r in before["models"]}
    hosts, graphs = before["host"], before.get("graphs", [])
    if options.graphs:
        graphs = [asdict(attempt(tax_graphs.measure, name)) for name in tax_graphs.MODELS]
    elif not options.report:
        if not options.names:
            hosts = [asdict(attempt(host, layers, rate)) for rate in (0.0, 0.1) for layers in LAYERS]
        for name in tqdm(wanted, desc="models"):
            rows[name] = asdict(attempt(row, todo[name], name))
            write(rows, hosts, graphs)
    write(rows, hosts, graphs)


if __name__ == "__main__":
    main()
