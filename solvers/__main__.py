"""Schedule one training graph within a memory budget: `python -m solvers INSTANCE.json`.

SCHEDULE.json is `{"steps": [["compute", op], ["free", value], ...]}`. A published instance has one value per op with
the op's own number, so that both are op numbers. In the project's own format an op may write several values or none:
"compute" then names an op and writes all of its values, "free" names one value. Where an op writes a value of which a
copy is still live, the old copy is freed first. Where the problem has a link, ["send", value] and ["fetch", value] move
values, and a "free" after a "send" waits for the copy.

Exit status: 0 solved, 1 no schedule within the budget, 2 bad input, 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from solvers.errors import ProblemError, SolverError
from solvers.instances import from_json, read
from solvers.problem import Problem
from solvers.protocol import Solution
from solvers.schedule import InfeasibleError, to_steps
from solvers.solve import SOLVERS, solve

UNITS = {"": 1, "B": 1, "KB": 2**10, "MB": 2**20, "GB": 2**30, "TB": 2**40}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ProblemError(message)  # argparse would print its usage too: an error is one line here


def main(argv: Sequence[str] | None = None) -> int:
    """Solve one instance, print a report and write the schedule where asked; returns the exit status."""
    try:
        return _run(argv)
    except InfeasibleError as e:
        return _complain("infeasible", e, 1)
    except (SolverError, OSError) as e:
        return _complain("error", e, 2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _complain(kind: str, why: object, status: int) -> int:
    print(" ".join(f"{kind}: {why}".split()), file=sys.stderr)  # one line, whatever is in it
    return status


def _run(argv: Sequence[str] | None) -> int:
    parser = _Parser(prog="python -m solvers", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "instance", type=Path, metavar="INSTANCE", help="a published instance, or a problem in the project's own format"
    )
    parser.add_argument("--solver", choices=list(SOLVERS), default="auto", help="default: auto")
    parser.add_argument(
        "--time-limit", type=seconds, default=60.0, metavar="SECONDS", help="seconds the search may take (default: 60)"
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the schedule as JSON")
    parser.add_argument(
        "--budget", type=size, metavar="BYTES", help="instead of the instance's; also as 5GB (GB of 2**30 bytes)"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    options = parser.parse_args(argv)
    data = read(options.instance)
    problem = from_json(data, options.instance)
    published = data.get("published")
    if options.budget is not None:
        published = published if options.budget == problem.budget else None  # what is published is of that budget
        problem = problem.with_budget(options.budget)
    target = None if options.output is None else _target(options.output, options.instance)
    progress = False if options.quiet else None
    solution = solve(problem, options.solver, time_limit=options.time_limit, progress=progress)
    print(report(problem, solution, options.instance.stem, published if isinstance(published, dict) else {}))
    if target is not None:
        _write(target, {"name": problem.name, "steps": to_steps(problem, solution.schedule)})
    return 0


def seconds(text: str) -> float:
    """A time limit as a number; for argparse."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of seconds")
    return value


def size(text: str) -> int:
    """Bytes from `5053251584`, `5GB`, `4.7 gib`; units are powers of 1024, as everywhere in this project."""
    match = re.fullmatch(r"(\d+|\d*\.\d+|\d+\.)\s*([KMGT]?I?B|)", text.strip().upper(), re.ASCII)
    if not match or len(text) > 100:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size: give bytes, or a number with KB, MB, GB or TB")
    number, unit = match[1], UNITS[match[2].replace("I", "")]
    return int(number) * unit if number.isdigit() else int(float(number) * unit)


def report(problem: Problem, solution: Solution, name: str, published: dict[str, Any]) -> str:
    """The report on a solution, as text.

    Args:
        problem: with the budget that it was solved for.
        solution: its answer.
        name: what to call a problem that has no name.
        published: `overhead_percent` and `proven_bound_percent` of an answer to compare with, where there is one.
    """
    timeline, total = solution.timeline, problem.total_cost
    overhead, least = (100 * (cost / total - 1) if total else 0.0 for cost in (timeline.cost, solution.bound))
    name = problem.name or name
    budget = "none" if problem.budget is None else _bytes(problem.budget)
    share = f", {100 * timeline.peak / problem.budget:.2f} % of the budget" if problem.budget else ""
    rows = {
        "solver": f"{solution.solver}, {solution.seconds:.1f} s",
        "budget": budget,
        "peak": _bytes(timeline.peak) + share,
        "overhead": f"{overhead:.3f} %" + _beside(published, "overhead_percent"),
        "cost": f"{timeline.cost:,.10g}; {total:,.10g} with every op once",
        "bound": f"{max(0.0, least):.3f} % at least" + _beside(published, "proven_bound_percent"),
        "gap": f"{100 * solution.gap:.3f} % between bound and cost",
        "re-runs": f"{len(solution.schedule.steps) - len(problem.ops):,}",
        "moved": f"{_bytes(timeline.moved)}, {timeline.stall:,.10g} of the cost waiting" if timeline.moved else "",
        "note": solution.note,
    }
    title = name if name.isascii() and name.isprintable() else ascii(name)
    head = f"{title}: {len(problem.ops):,} ops, {problem.boundary:,} of them forward"
    return "\n".join([head, "", *(f"  {key:<10}{text}" for key, text in rows.items() if text)])


def _beside(published: dict[str, Any], key: str) -> str:
    value = published.get(key)
    known = isinstance(value, (int, float)) and not isinstance(value, bool)
    return f"   (published: {value} %)" if known else ""


def _bytes(n: int) -> str:
    unit = max((u for u in UNITS if UNITS[u] <= max(n, 1)), key=lambda u: UNITS[u])
    return f"{n:,} bytes" if UNITS[unit] == 1 else f"{n / UNITS[unit]:.2f} {unit} ({n:,} bytes)"


def _target(path: Path, instance: Path) -> Path:
    """Where the schedule goes, links followed. Fails now where it would fail after a long search."""
    target = Path(os.path.realpath(path))
    try:
        if target.exists() and (not target.is_file() or target.samefile(instance) or not os.access(target, os.W_OK)):
            raise ProblemError(f"--output {path}: it is the instance itself, read-only, or no regular file")
        with tempfile.TemporaryFile(dir=target.parent):
            return target
    except OSError as e:
        raise ProblemError(f"--output {path}: {e.strerror or e}") from e


def _write(target: Path, data: object) -> None:
    """All of the file or nothing of it."""
    draft = target.with_name(f".schedule-{os.getpid()}.tmp")
    try:
        draft.write_text(json.dumps(data) + "\n")
        os.replace(draft, target)
    finally:
        draft.unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main())
