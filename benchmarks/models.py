"""A survey of models, each planned at 60 % of its peak and compared with eager: `python -m benchmarks.models`.

One process a model; what was found is written after each, to benchmarks/results/models_cpu.json and docs/models.md.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from .measure import in_own_process, software
from .models_report import page
from .survey import PAIRS, Row, survey
from .zoo import FAMILIES, cases

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks/results/models_cpu.json"
PAGE = ROOT / "docs/models.md"
TIME_LIMIT = 600.0  # seconds a model may take


def attempt(family: str, name: str) -> Row:
    """The row of one model, from a process of its own."""
    try:
        row: Row = in_own_process(survey, family, name, time_limit=TIME_LIMIT)
    except RuntimeError as e:
        row = Row(name, family, "", "crashed", why=str(e))
    return row


def write(rows: Mapping[str, Mapping[str, Any]]) -> None:
    """The rows as JSON, in the order of the zoo."""
    names = [name for family in FAMILIES for name in cases(family)]
    report = {
        "device": "CPU, 1 thread",
        "platform": software(),
        "torch": torch.__version__,
        "pairs": PAIRS,
        "models": [rows[name] for name in names if name in rows],
    }
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps(report, indent=1) + "\n")


def main() -> None:
    """Measure, write, and make the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.models", description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only these models or families; other rows stay")
    parser.add_argument("--missing", action="store_true", help="only models that have no row yet")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--report", action="store_true", help="measure nothing; make the page from the JSON file")
    options = parser.parse_args()
    before = json.loads(RESULTS.read_text())["models"] if RESULTS.exists() else []
    todo = [(family, name) for family in FAMILIES for name in cases(family)]
    known = {name for _, name in todo}
    rows: dict[str, Mapping[str, Any]] = {row["name"]: row for row in before if row["name"] in known}
    if options.only:
        unknown = set(options.only) - known - set(FAMILIES)
        if unknown:
            parser.error(f"no such model or family: {', '.join(sorted(unknown))}")
        todo = [each for each in todo if not set(options.only).isdisjoint(each)]
    if options.missing:
        todo = [each for each in todo if each[1] not in rows]
    if not options.report:
        with ThreadPoolExecutor(options.jobs) as pool:
            running = {pool.submit(attempt, *each): each[1] for each in todo}
            for done in tqdm(as_completed(running), total=len(running), desc="models"):
                row = done.result()
                rows[running[done]] = asdict(row)
                tqdm.write(f"{row.name}: {row.verdict} {row.why}")
                write(rows)
    PAGE.write_text(page(json.loads(RESULTS.read_text())))


if __name__ == "__main__":
    main()
