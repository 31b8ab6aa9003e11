"""A survey of models, each planned at 60 or 70 % of its peak and compared with eager: `python -m benchmarks.models`.

One process a model; what was found is written after each, to benchmarks/results/models_cpu.json and docs/models.md;
with `--libraries`, of the models that libraries ship, to benchmarks/results/libraries_cpu.json and docs/libraries.md.
A library that is not here is skipped and named. `--missing` goes on where a run was stopped. `--short` is for many
models in little time: searches are short, so that plans may cost more time than they need to; such rows are marked.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from .measure import PRELOAD, in_own_process, software
from .models_report import libraries_page, page
from .survey import PAIRS, Row, survey
from .zoo import FAMILIES, LIBRARIES, cases, module_of

ROOT = Path(__file__).parent.parent
TIME_LIMIT = 600.0  # seconds a model may take
DISTRIBUTIONS = {"nnunet": "dynamic-network-architectures"}  # where the name is not that of the family
Rows = dict[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Survey:
    """What is measured together: the families, the file of the results, and the page that is made from it."""

    families: tuple[str, ...]
    results: Path
    page: Path
    written: Callable[[Mapping[str, Any]], str]


MODELS = Survey(FAMILIES, ROOT / "benchmarks/results/models_cpu.json", ROOT / "docs/models.md", page)
OF_LIBRARIES = Survey(
    LIBRARIES, ROOT / "benchmarks/results/libraries_cpu.json", ROOT / "docs/libraries.md", libraries_page
)


def attempt(family: str, name: str, short: bool) -> Row:
    """The row of one model, from a process of its own; `short` as in `survey`."""
    try:
        row: Row = in_own_process(survey, family, name, short, time_limit=TIME_LIMIT)
    except RuntimeError as e:
        row = Row(name, family, "", "crashed", short=short, why=str(e))
    return row


def listed(families: Sequence[str]) -> tuple[list[tuple[str, str]], dict[str, str]]:
    """Family and name of each model, one family after the other in turn; and why some families are not here."""
    found: list[list[tuple[str, str]]] = []
    absent = {}
    for family in families:
        try:
            found.append([(family, name) for name in cases(family)])
        except (ImportError, RuntimeError) as e:  # torchaudio raises the second for a torch that is not its own
            absent[family] = f"{type(e).__name__}: {e}"
    return [each for turn in zip_longest(*found) for each in turn if each is not None], absent


def versions(families: Sequence[str]) -> dict[str, str]:
    """The installed version of each family that is a library."""
    found = {}
    for family in families:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[family] = importlib.metadata.version(DISTRIBUTIONS.get(family, family))
    return found


def write(survey_of: Survey, rows: Rows, skipped: Mapping[str, str]) -> None:
    """The rows as JSON, by family, and what was skipped, whose rows and version are those of an earlier run."""
    before = json.loads(survey_of.results.read_text())["versions"] if survey_of.results.exists() else {}
    here = versions(survey_of.families) | {name: version for name, version in before.items() if name in skipped}
    report = {
        "device": "CPU, 1 thread",
        "platform": software(),
        "torch": torch.__version__,
        "date": f"{datetime.date.today():%Y-%m-%d}",
        "pairs": PAIRS,
        "versions": {name: here[name] for name in survey_of.families if name in here},
        "skipped": dict(skipped),
        "unmeasured": [name for _, name in listed(survey_of.families)[0] if name not in rows],
        "models": sorted(rows.values(), key=lambda row: survey_of.families.index(row["family"])),
    }
    survey_of.results.parent.mkdir(parents=True, exist_ok=True)
    survey_of.results.write_text(json.dumps(report, indent=1) + "\n")


def measure(
    survey_of: Survey, todo: Sequence[tuple[str, str]], rows: Rows, jobs: int, absent: dict[str, str], short: bool
) -> None:
    """Each model that is to do, in a process of its own; its row is written as soon as it is known."""
    with ThreadPoolExecutor(jobs) as pool:
        running = {pool.submit(attempt, *each, short): each[1] for each in todo}
        for done in tqdm(as_completed(running), total=len(running), desc="models"):
            row = done.result()
            rows[running[done]] = asdict(row)
            tqdm.write(f"{row.name}: {row.verdict} {row.why}")
            write(survey_of, rows, absent)


def main() -> None:
    """Measure, write, and make the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.models", description=__doc__)
    parser.add_argument("--libraries", action="store_true", help="the models that libraries ship")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only these models or families; other rows stay")
    parser.add_argument("--missing", action="store_true", help="only models that have no row yet")
    parser.add_argument("--short", action="store_true", help="short searches: quicker, and plans that cost more time")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--report", action="store_true", help="measure nothing; make the page from the JSON file")
    options = parser.parse_args()
    survey_of = OF_LIBRARIES if options.libraries else MODELS
    if not options.report:
        before = json.loads(survey_of.results.read_text())["models"] if survey_of.results.exists() else []
        todo, absent = listed(survey_of.families)
        known = {name for _, name in todo}
        rows: Rows = {row["name"]: row for row in before if row["name"] in known or row["family"] in absent}
        if options.only:
            unknown = set(options.only) - known - set(survey_of.families)
            if unknown:
                parser.error(f"no such model or family: {', '.join(sorted(unknown))}")
            todo = [each for each in todo if not set(options.only).isdisjoint(each)]
        if options.missing:
            todo = [each for each in todo if each[1] not in rows]
        PRELOAD.extend(module_of(family) for family in survey_of.families if family not in absent)
        measure(survey_of, todo, rows, options.jobs, absent, options.short)
    survey_of.page.write_text(survey_of.written(json.loads(survey_of.results.read_text())))


if __name__ == "__main__":
    main()
