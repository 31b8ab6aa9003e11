"""How long planning takes, and how planned steps compare with eager ones: `python -m benchmarks.planning`."""

from __future__ import annotations

import argparse
import copy
import json
import platform
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn
from tqdm import tqdm

from planner import InfeasibleBudgetError, Plan, plan
from planner.devices.meter import record_allocations

from .workloads import WORKLOADS, Workload

ROOM_TO_SPARE = "100%"
BUDGETS = (1.0, 0.80, 0.60, 0.45)  # of the baseline peak; 1.0 stands for room to spare


@dataclass(frozen=True)
class Row:
    """One budget of one model.

    Attributes:
        budget: what was asked for, as a fraction of the baseline peak; 1.0 for room to spare.
        budget_bytes: what was planned for; more than asked for where less is infeasible.
        feasible: whether the budget asked for was feasible.
        baseline_bytes, predicted_bytes, measured_bytes: peaks: keeping everything, of the plan, of the planned step.
        planning_seconds, solver_seconds: of the whole `plan()`, and of the solver in it.
        overhead, gap: the plan's own estimates.
        eager_seconds, planned_seconds: median times of a step, run in alternating pairs.
        measured_overhead: median over the pairs of planned time over eager time, less one.
    """

    budget: float
    budget_bytes: int
    feasible: bool
    baseline_bytes: int
    predicted_bytes: int
    measured_bytes: int
    planning_seconds: float
    solver_seconds: float
    overhead: float
    gap: float
    eager_seconds: float
    planned_seconds: float
    measured_overhead: float


def benchmark(work: Workload, pairs: int) -> list[Row]:
    """Every budget of one model."""
    eager = copy.deepcopy(work.model)
    rows: list[Row] = []
    baseline = 0
    for fraction in tqdm(BUDGETS, desc="budgets", leave=False):
        budget = ROOM_TO_SPARE if fraction == 1.0 else fraction * baseline / 2**30
        p, feasible, seconds = _plan(work, budget)
        baseline = p.baseline_peak_bytes
        p.apply()
        ours, theirs = _alternate(work, work.model, eager, pairs)
        measured = p.resident_bytes + record_allocations(lambda: work.step(work.model)).peak()
        work.model.zero_grad(set_to_none=True)
        p.remove()
        rows.append(
            Row(
                budget=fraction,
                budget_bytes=p.budget_bytes,
                feasible=feasible,
                baseline_bytes=baseline,
                predicted_bytes=p.peak_bytes,
                measured_bytes=measured,
                planning_seconds=seconds,
                solver_seconds=p.solve_seconds,
                overhead=p.overhead,
                gap=p.gap,
                eager_seconds=statistics.median(theirs),
                planned_seconds=statistics.median(ours),
                measured_overhead=statistics.median(a / b for a, b in zip(ours, theirs, strict=True)) - 1,
            )
        )
    return rows


def _plan(work: Workload, budget_gb: float) -> tuple[Plan, bool, float]:
    """The plan, or the one at the smallest feasible budget; whether it was feasible; the seconds it took."""
    feasible = True
    while True:
        start = time.perf_counter()
        try:
            p = plan(work.model, work.batch, budget_gb=budget_gb, loss_fn=work.loss_fn, progress=False)
            return p, feasible, time.perf_counter() - start
        except InfeasibleBudgetError as e:
            budget_gb, feasible = e.minimum_gb, False


def _alternate(work: Workload, planned: nn.Module, eager: nn.Module, pairs: int) -> tuple[list[float], list[float]]:
    """Step times of both models, turn by turn, after two steps of each; which goes first alternates too."""
    times: dict[bool, list[float]] = {True: [], False: []}
    for i in tqdm(range(pairs + 2), desc="steps", leave=False):
        for ours in (True, False) if i % 2 else (False, True):
            model = planned if ours else eager
            start = time.perf_counter()
            work.step(model)
            times[ours].append(time.perf_counter() - start)
            model.zero_grad(set_to_none=True)
    return times[True][2:], times[False][2:]


def table(name: str, rows: list[Row]) -> str:
    """One model's rows as text."""
    first = rows[0]
    lines = [
        f"{name}: {first.baseline_bytes / 2**20:.1f} MB with everything kept; eager step {first.eager_seconds:.3f} s",
        f"{'budget':>8} {'MB':>8} {'predicted':>10} {'measured':>9} {'planning':>9} {'solver':>8} "
        f"{'overhead':>9} {'measured':>9} {'gap':>7}",
    ]
    for r in rows:
        asked = "spare" if r.budget == 1.0 else f"{r.budget:.0%}" if r.feasible else f"{r.budget:.0%} *"
        mb = "" if r.budget == 1.0 else f"{r.budget_bytes / 2**20:.1f}"
        lines.append(
            f"{asked:>8} {mb:>8} {r.predicted_bytes / 2**20:>10.1f} {r.measured_bytes / 2**20:>9.1f} "
            f"{r.planning_seconds:>7.1f} s {r.solver_seconds:>6.1f} s {r.overhead:>9.1%} {r.measured_overhead:>+9.1%} "
            f"{r.gap:>7.1%}"
        )
    if not all(r.feasible for r in rows):
        lines.append("   * infeasible; planned at the smallest budget that is not")
    return "\n".join(lines)


def main() -> None:
    """Run every model, print a table for each, and write JSON where asked."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planning", description=__doc__)
    parser.add_argument("--output", type=Path, help="write the rows as JSON")
    parser.add_argument("--pairs", type=int, default=9, help="pairs of steps that are timed at each budget")
    parser.add_argument("--model", choices=list(WORKLOADS), action="append", help="only this model; may be repeated")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, list[Row]] = {}
    for name in tqdm(options.model or list(WORKLOADS), desc="models"):
        torch.manual_seed(0)
        results[name] = benchmark(WORKLOADS[name](), options.pairs)
        tqdm.write(table(name, results[name]) + "\n")
        if options.output:
            _write(options.output, options.pairs, results)


def _write(path: Path, pairs: int, results: dict[str, list[Row]]) -> None:
    """The rows so far, as JSON."""
    report = {
        "device": "CPU, 1 thread",
        "platform": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        "torch": torch.__version__,
        "pairs": pairs,
        "models": {name: [asdict(r) for r in rows] for name, rows in results.items()},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
