"""Each constant of the solvers, changed alone, on published instances: `python -m benchmarks.ablation`.

Costs and bounds depend on counts of work, not on the machine; seconds are of processor time. The tables are Markdown.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks.solvers import INSTANCES
from solvers import Problem, SolverError, load
from solvers.bounds import cost, peak
from solvers.search import annealing, effort, lp_starts, policy, rounds, starts

TIGHT = ("un_11_6gb", "resnet50_184_5gb", "resnet50_184_6gb")
LOOSE = ("un_11_7gb", "un_11_8gb", "resnet50_184_7gb", "resnet50_184_8gb")  # some rounded relaxations fit
SHARE = 0.25  # of the default work, so that differences show
SEEDS = (0, 100, 200)
Variant = tuple[str, ModuleType, str, object]
Problems = dict[str, Problem]

SEARCH: tuple[Variant, ...] = (
    ("as it is", rounds, "SEED", 0),
    ("other random numbers", rounds, "SEED", 1000),
    ("work × 1/4", effort, "STEPS", effort.STEPS * SHARE / 4),
    ("work × 2", effort, "STEPS", effort.STEPS * SHARE * 2),
    ("`ROUNDS`: one", rounds, "ROUNDS", ((8, 0.01, 1.0),)),
    ("`ROUNDS`: two", rounds, "ROUNDS", ((8, 0.01, 0.5), (4, 0.003, 0.5))),
    ("`ROUNDS`: temperatures × 4", rounds, "ROUNDS", tuple((n, 4 * hot, part) for n, hot, part in rounds.ROUNDS)),
    ("`ROUNDS`: temperatures / 4", rounds, "ROUNDS", tuple((n, hot / 4, part) for n, hot, part in rounds.ROUNDS)),
    ("`COLDEST` 1e-1", rounds, "COLDEST", 1e-1),
    ("`COLDEST` 1e-5", rounds, "COLDEST", 1e-5),
    ("`POOL` 1", rounds, "POOL", 1),
    ("`WARMED` 0", rounds, "WARMED", 0),
    ("`WARMED` 200", rounds, "WARMED", 200),
    ("`OVER` 0.5", rounds, "OVER", 0.5),
    ("`OVER` 8", rounds, "OVER", 8.0),
    ("`STRICTER` 2", rounds, "STRICTER", 2.0),
    ("`STRICTER` 16", rounds, "STRICTER", 16.0),
    ("`TIED`: never", rounds, "TIED", (1, 1, 1, 1)),
    ("`LARGEST_MOVE` 16", annealing, "LARGEST_MOVE", 16),
    ("`STRETCH` 4", policy, "STRETCH", 4),
    ("`HOPS` 1", policy, "HOPS", 1),
    ("`HOPS` 8", policy, "HOPS", 8),
    ("`BY_SIZE` 0", policy, "BY_SIZE", 0.0),
    ("`BY_SIZE` 1", policy, "BY_SIZE", 1.0),
    ("no move `block`", policy, "ODDS", policy.ODDS._replace(block=0.0)),
    ("no move `spread`", policy, "ODDS", policy.ODDS._replace(spread=0.0)),
    ("neither", policy, "ODDS", policy.ODDS._replace(block=0.0, spread=0.0)),
    ("no move `pair`", policy, "ODDS", policy.ODDS._replace(pair=0.0)),
    ("no move `drop`", policy, "ODDS", policy.ODDS._replace(drop=0.0)),
    ("no move `make`", policy, "ODDS", policy.ODDS._replace(make=0.0)),
    ("no move `hold`", policy, "ODDS", policy.ODDS._replace(hold=0.0)),
)
BOUND: tuple[Variant, ...] = (
    ("as it is", cost, "POINTS", cost.POINTS),
    ("`POINTS` 6", cost, "POINTS", 6),
    ("`POINTS` 48", cost, "POINTS", 48),
    ("`WORK` / 4", cost, "WORK", cost.WORK / 4),
    ("`WORK` × 4", cost, "WORK", cost.WORK * 4),
    ("`GAIN` 1e-3", cost, "GAIN", 1e-3),
    ("`GAIN` 0", cost, "GAIN", 0.0),
    ("`SEARCHED` 0", cost, "SEARCHED", 0),
    ("`NODES` 10", cost, "NODES", 10),
    ("`NODES` 400", cost, "NODES", 400),
)
STARTS: tuple[Variant, ...] = (
    ("as it is", lp_starts, "SINGLE", lp_starts.SINGLE),
    ("`SHARES` (1,)", lp_starts, "SHARES", (1.0,)),
    ("`SINGLE` 0", lp_starts, "SINGLE", 0),
    ("`ROUNDING` (0.5,)", lp_starts, "ROUNDING", (0.5,)),
    ("`NODES` 0", lp_starts, "NODES", 0),
    ("`WORK` / 4", lp_starts, "WORK", lp_starts.WORK / 4),
)
PEAK: tuple[Variant, ...] = (
    ("as it is", peak, "LOOKS", peak.LOOKS),
    ("`LOOKS` 0", peak, "LOOKS", 0),
    ("`LOOKS` 4", peak, "LOOKS", 4),
    ("`LOOKS` 256", peak, "LOOKS", 256),
    ("`ALL_LOOKS` 1,000", peak, "ALL_LOOKS", 1_000),
)


@contextmanager
def changed(module: ModuleType, name: str, value: object) -> Iterator[None]:
    """While it is on, a module's constant has another value."""
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


def searched(problem: Problem, relaxed: dict[int, Any]) -> float:
    """Overhead in percent of the search's schedule, the mean of some seeds; relaxations are solved once for all."""
    if id(problem) not in relaxed:
        found = cost.relax(problem)
        relaxed[id(problem)] = found, list(lp_starts.lp_starts(problem, found))
    known, keeps = relaxed[id(problem)]
    first, overheads = rounds.SEED, []
    for seed in SEEDS:
        with (
            changed(rounds, "relax", lambda *_: known),
            changed(rounds, "lp_starts", lambda *_: iter(keeps)),
            changed(rounds, "SEED", first + seed),
        ):
            schedule = rounds.search(problem, progress=False).schedule
        overheads.append(100 * (sum(problem.ops[i].cost for i in schedule.steps) / problem.total_cost - 1))
    return statistics.mean(overheads)


def bounded(problem: Problem) -> float:
    """The bound of `relax`, in percent of overhead."""
    return 100 * cost.relax(problem).bound / problem.total_cost


def started(problem: Problem) -> float:
    """Overhead in percent of the cheapest rounded relaxation within the budget; NaN where none fits."""
    search = annealing.Search(problem, lambda _: None)
    keeps = lp_starts.lp_starts(problem, cost.relax(problem))
    found = starts.chained(search.keep_only(keep) for keep in keeps)
    extra = min((c.extra for c in found if c.peak <= (problem.budget or 0)), default=float("nan"))
    return 100 * extra / problem.total_cost


def leanest(problem: Problem) -> float:
    """The lower bound on the peak, in GB of 2**30 bytes."""
    return peak.minimum_peak_bound(problem) / 2**30


def table(title: str, problems: Problems, variants: Sequence[Variant], of: Callable[[Problem], float]) -> None:
    """Print a table: a row for each variant, a column for each problem, and the mean difference from the first row."""
    print(f"\n| {title} | {' | '.join(problems)} | mean change | seconds |\n| --- |{' --: |' * (len(problems) + 2)}")
    reference: list[float] = []
    for label, module, name, value in variants:
        began = time.process_time()
        with changed(module, name, value):
            values = [of(problem) for problem in problems.values()]
        seconds = time.process_time() - began
        reference = reference or values
        known = [a - b for a, b in zip(values, reference, strict=True) if math.isfinite(a - b)]
        cells = " | ".join(f"{v:.3f}" if math.isfinite(v) else "–" for v in values)
        print(f"| {label} | {cells} | {statistics.mean(known or [0.0]):+.3f} | {seconds:.1f} |", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Print all tables; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ablation", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=INSTANCES, help=f"default: {INSTANCES}")
    options = parser.parse_args(argv)
    try:
        tight, loose = ({n: load(options.folder / f"{n}.json") for n in names} for names in (TIGHT, LOOSE))
    except SolverError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    annealing.ready()
    table("bound on the cost, %", tight, BOUND, bounded)
    table("bound on the peak, GB", tight, PEAK, leanest)
    table("cheapest start, %", loose, STARTS, started)
    with changed(effort, "STEPS", SHARE * effort.STEPS), changed(effort, "STEPS_PER_OP", SHARE * effort.STEPS_PER_OP):
        table("overhead of the search, %", tight, SEARCH, partial(searched, relaxed={}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
