"""The time to the first training step: eager, torch.compile, and planned: `python -m benchmarks.first_step [names]`.

Each way is a process of its own, timed from its start; the model is built before, and unpickled at no charge.
torch.compile runs its backend "aot_eager", which plans nothing and generates no code, as a plan's graphs are run. A
plan that is made at the first step, and the first one that is made before it, have empty caches, as on a new machine;
the second one finds what the first has measured and compiled.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from planner import plan
from planner.cli.demo import small_gpt2
from solvers import InfeasibleError, solve
from tests.real_models import Case

from .peers import MODELS as PEERS
from .zoo import build

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks/results/first_step_cpu.json"
WAYS = ("eager", "torch.compile", "at the first step", "first plan", "plan", "known plan")
MODEL = "(the model)"  # the stage that is not counted
SHARE = 0.6  # of what the step allocates when everything is kept: the budget beside what is resident, where feasible

Seconds = dict[str, list[float]]  # wall and processor time by stage


def swin() -> Case:
    """A Swin transformer of the survey."""
    case = build("vision", "swin")
    return Case(case.model, case.batch, case.loss_fn)


MODELS: dict[str, Callable[[], Case]] = {
    "demo": lambda: Case(*small_gpt2()),
    **{name: PEERS[name] for name in ("gpt2_dropout", "llama", "resnet50", "unet", "t5", "vit")},
    "swin": swin,
}


def measure(name: str, ways: tuple[str, ...]) -> dict[str, Seconds]:
    """The seconds of each way to a model's first step."""
    torch.manual_seed(0)
    case = MODELS[name]()
    p = plan(case.model, case.batch, budget_gb="100%", loss_fn=case.loss_fn, progress=False)
    budget = (p.resident_bytes + SHARE * (p.baseline_peak_bytes - p.resident_bytes)) / 2**30
    try:
        solve(p.record.problem.with_budget(int(budget * 2**30)), time_limit=1, progress=False)
    except InfeasibleError as e:
        budget = e.minimum / 2**30
    with tempfile.TemporaryDirectory() as folder:
        pickled, file = Path(folder) / "case.pt", Path(folder) / "plan.json"
        torch.save(case, pickled)
        found = {}
        for way in tqdm(ways, desc=name, leave=False):
            own = f"{folder}/{'before' if way == 'at the first step' else 'after'}"
            caches = {
                "CHECKPOINT_PLANNER_CACHE": f"{own}/costs",
                "NUMBA_CACHE_DIR": f"{own}/numba",
                "KINETO_LOG_LEVEL": "6",
            }
            kind = "plan" if way == "first plan" else way
            command = [sys.executable, "-m", "benchmarks.first_step_process", kind, pickled, str(budget), file]
            ran = subprocess.run(command, cwd=ROOT, env=os.environ | caches, capture_output=True, text=True)
            if ran.returncode:
                raise RuntimeError(f"{name}, {way}: {ran.stderr[-2000:]}")
            found[way] = json.loads(ran.stdout.splitlines()[-1])
        return found


def total(seconds: Seconds, clock: int) -> float:
    """Seconds to the end of the first step without the model's construction: wall (0) or processor (1) time."""
    return sum(spent[clock] for stage, spent in seconds.items() if stage != MODEL)


def table(results: Mapping[str, Mapping[str, Seconds]]) -> str:
    """Markdown: seconds of processor time to the end of the first step, wall time in parentheses."""
    lines = [f"| | {' | '.join(WAYS)} |", f"|---|{'---:|' * len(WAYS)}"]
    for name, ways in results.items():
        cells = (f"{total(ways[w], 1):.1f} ({total(ways[w], 0):.1f})" if w in ways else "" for w in WAYS)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def stages(ways: Mapping[str, Seconds]) -> str:
    """One model's stages as text, seconds of processor time."""
    rows = dict.fromkeys(stage for seconds in ways.values() for stage in seconds)
    lines = [f"{'':26}" + "".join(f"{way:>15}" for way in ways)]
    for stage in rows:
        cells = (f"{seconds[stage][1]:>15.2f}" if stage in seconds else f"{'':>15}" for seconds in ways.values())
        lines.append(f"{stage:26}" + "".join(cells))
    return "\n".join(lines)


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.first_step", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="name", help=f"of {', '.join(MODELS)}; none for all")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--output", type=Path, default=RESULTS, help="the JSON file; other models in it stay")
    options = parser.parse_args()
    if unknown := set(options.names) - set(MODELS):
        parser.error(f"no such model: {', '.join(sorted(unknown))}")
    torch.set_num_threads(1)
    results: dict[str, Any] = json.loads(options.output.read_text())["models"] if options.output.exists() else {}
    for name in tqdm(options.names or MODELS, desc="models"):
        results[name] = measure(name, tuple(w for w in WAYS if w in options.ways))
        tqdm.write(f"{name}\n{stages(results[name])}\n")
        report = {
            "device": "CPU, 1 thread",
            "platform": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
            "torch": torch.__version__,
            "models": {name: results[name] for name in MODELS if name in results},
        }
        options.output.write_text(json.dumps(report, indent=1) + "\n")
    print(table({name: results[name] for name in options.names or MODELS}))


if __name__ == "__main__":
    main()
