"""Solvers on published instances, beside the published answers: `python -m benchmarks.solvers`.

Every schedule is replayed by the folder's own `check_schedule.py`, which shares no code with the solvers.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

from tqdm import tqdm

from solvers import SOLVERS, InfeasibleError, SolverError, from_json, solve
from solvers.__main__ import seconds
from solvers.instances import read
from solvers.schedule import to_steps

INSTANCES = Path(__file__).parents[2] / "shared" / "instances"
CHECKER = "check_schedule.py"


@dataclass(frozen=True)
class Result:
    """One solver on one instance within one time limit. Percentages are of the cost of running every op once.

    Attributes:
        instance, ops: the instance's name and size.
        solver, time_limit: what ran, and the seconds it was given.
        seconds: what it took.
        overhead_percent, bound_percent: of its schedule, and what it proved that none can beat; None where infeasible.
        published_percent, published_bound_percent: the same of the published answer; None where not published.
        verdict: "ok", or what the checker (or the solver) says is wrong.
        note: the solver's own remarks.
    """

    instance: str
    ops: int
    solver: str
    time_limit: float
    seconds: float | None
    overhead_percent: float | None
    bound_percent: float | None
    published_percent: float | None
    published_bound_percent: float | None
    verdict: str
    note: str = ""

    @property
    def difference(self) -> float | None:
        """Percentage points above the published overhead; negative is better."""
        if self.overhead_percent is None or self.published_percent is None:
            return None
        return self.overhead_percent - self.published_percent


def measure(path: Path, solver: str, time_limit: float) -> Result:
    """Run one solver on one instance and have its schedule checked."""
    data = read(path)
    problem = from_json(data, path)
    published = data.get("published", {})
    known = published.get("overhead_percent"), published.get("proven_bound_percent")
    about = (path.stem, len(problem.ops), solver, time_limit)
    try:
        found = solve(problem, solver, time_limit=time_limit, progress=False)
    except InfeasibleError as e:
        return Result(*about, None, None, None, *known, f"infeasible: {e}")
    overhead, bound = (100 * (cost / problem.total_cost - 1) for cost in (found.timeline.cost, found.bound))
    verdict = check(path, to_steps(problem, found.schedule), overhead)
    if verdict == "ok" and known[0] is not None and bound > known[0] + 0.001:
        verdict = "the bound is above the published answer, so it is wrong"
    return Result(*about, found.seconds, overhead, bound, *known, verdict, found.note)


def check(path: Path, schedule: list[list[object]], overhead: float) -> str:
    """What the checker beside the instance says of a schedule: "ok", or what is wrong."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "schedule.json"
        answer.write_text(json.dumps({"steps": schedule}))
        command = [sys.executable, str(path.parent / CHECKER), str(path), str(answer)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        return f"the checker failed: {' '.join(done.stderr.split())[-200:]}"
    if done.returncode or not said["valid"]:
        return said.get("why") or f"valid: {said['valid']}, fits: {said.get('fits')}"
    if abs(said["overhead_percent"] - overhead) > 0.001:
        return f"the checker finds {said['overhead_percent']} % overhead, the solver {overhead:.3f} %"
    return "ok"


def table(results: Sequence[Result]) -> str:
    """The results as Markdown: a row for each instance, a group of columns for each solver and time limit."""
    runs = list(dict.fromkeys((r.solver, r.time_limit) for r in results))
    rows: dict[str, dict[tuple[str, float], Result]] = {}
    for r in results:
        rows.setdefault(r.instance, {})[r.solver, r.time_limit] = r
    head = ["instance", "ops", "published %", "its bound %"]
    for solver, limit in runs:
        head += [f"{solver} {limit:g} s: %", "points", "bound %", "seconds", "checker"]
    lines = [head, ["---", *["--:"] * (len(head) - 1)]]
    for name, row in rows.items():
        first = next(iter(row.values()))
        cells = [name, str(first.ops), _number(first.published_percent), _number(first.published_bound_percent)]
        for run in runs:
            if (found := row.get(run)) is None:  # stopped before it
                cells += [""] * 5
                continue
            cells += [_number(found.overhead_percent), _number(found.difference, "+.3f"), _number(found.bound_percent)]
            cells += [_number(found.seconds, ".1f"), found.verdict.replace("|", "/")]
        lines.append(cells)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def summary(results: Sequence[Result]) -> str:
    """For each solver and time limit, on how many instances it is at least as good as what was published."""
    lines = []
    for solver, limit in dict.fromkeys((r.solver, r.time_limit) for r in results):
        of_run = [r for r in results if (r.solver, r.time_limit) == (solver, limit)]
        points = [r.difference for r in of_run if r.verdict == "ok" and r.difference is not None]
        text = f"{solver}, {limit:g} s: {len(points)} of {len(of_run)} checked and comparable"
        if points:
            good = sum(p < 0.0015 for p in points)  # both are rounded to 0.001
            text += f"; {good} as good as published or better; mean {sum(points) / len(points):+.3f} points, "
            text += f"worst {max(points):+.3f}"
        lines.append(text)
    return "\n".join(lines)


def _number(x: float | None, form: str = ".3f") -> str:
    return "–" if x is None else f"{x:{form}}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run every solver on every instance; returns the exit status: 1 where an answer did not pass its check."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.solvers", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=INSTANCES, help=f"default: {INSTANCES}")
    parser.add_argument("--time-limit", nargs="+", type=seconds, default=[60.0], metavar="SECONDS", help="default: 60")
    parser.add_argument("--solver", nargs="+", choices=list(SOLVERS), default=["auto"], help="default: auto")
    parser.add_argument("--output", type=Path, help="write the results as JSON")
    options = parser.parse_args(argv)
    paths = sorted(p for p in options.folder.glob("*.json") if (options.folder / CHECKER).is_file())
    if not paths:
        print(f"error: {options.folder} is no folder of instances (*.json) with their {CHECKER}", file=sys.stderr)
        return 2
    results: list[Result] = []
    runs = list(product(sorted(paths, key=_by_size), options.solver, options.time_limit))
    try:
        for path, solver, limit in tqdm(runs, desc="instances"):
            results.append(measure(path, solver, limit))
            if options.output:
                _write(options.output, results)
    except (SolverError, OSError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    finally:
        if results:  # also what was found before an interruption
            print(f"{table(results)}\n\n{summary(results)}")
    return int(any(r.verdict != "ok" for r in results))


def _by_size(path: Path) -> list[tuple[int, str]]:
    """Sort key: digits as numbers, so that 10gb comes after 9gb."""
    parts = path.stem.replace("gb", "").split("_")
    return [(int(part), "") if part.isdigit() else (-1, part) for part in parts]


def _write(path: Path, results: Sequence[Result]) -> None:
    """The results so far, as JSON."""
    report = {
        "platform": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        "results": [asdict(r) | {"difference_points": r.difference} for r in results],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
