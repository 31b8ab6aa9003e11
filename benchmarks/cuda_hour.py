"""The first hour on a card: `python -m benchmarks.cuda --hour`, most valuable first; begun again, it goes on.

What is known is written after every part: JSON for machines, and beside it a page (.md) for people. Packages that are
missing are installed from the folder of wheels, if there is one (`make wheels`): the machine needs no network.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .cuda_report import line, table

if TYPE_CHECKING:
    from .cuda import Run

Row = dict[str, Any]
NAMES = ("gpt2", "llama", "resnet", "vit", "unet", "bert", "t5", "convnext")
ON_CPU = ("gpt2",)  # tiny: to try the program
LLAMA, LLAMA_BUDGETS = "llama3-8b", (40.0, 60.0, 80.0)
WHEELS = Path(__file__).parents[1] / ".wheels"
# module -> package, and what pydantic needs: each is installed by itself
NEEDED = {
    "highspy": "highspy", "pulp": "pulp", "diffusers": "diffusers", "importlib_metadata": "importlib_metadata",
    "networkx": "networkx", "pydantic": "pydantic", "pydantic_core": "pydantic_core",
    "annotated_types": "annotated-types", "typing_inspection": "typing-inspection",
}  # fmt: skip
TESTS = "tests/cuda"
TEST_SECONDS = 900.0


def install_wheels() -> list[str]:
    """Install what is missing from the folder of wheels; returns the names of what still is."""
    missing = [package for module, package in NEEDED.items() if importlib.util.find_spec(module) is None]
    if missing and WHEELS.is_dir():
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-index",
            "--no-deps",
            f"--find-links={WHEELS}",
        ]
        for package in missing:
            subprocess.run([*command, package], check=False)
        importlib.invalidate_caches()
    return [package for module, package in NEEDED.items() if importlib.util.find_spec(module) is None]


def phases(run: Run, measured: Callable[[Sequence[str]], object], compiled: Callable[[Sequence[str]], object]) -> None:
    """Every part, in the order of its worth.

    Args:
        run: whose rows are added to.
        measured: plans, eager mode and per-block checkpointing of models: peaks, gradients, times.
        compiled: torch.compile with and without its budget, of models.
    """
    cpu = run.options.device == "cpu"
    names = tuple(run.options.only or (ON_CPU if cpu else NAMES))
    parts: list[Callable[[], object]] = [
        lambda: run.do(run.entry("device", "constants", "constants", alone=True)),
        partial(measured, names[:2]),
        partial(pytest_row, run),
        partial(measured, names[2:]),
        lambda: [run.do(_llama(run, budget)) for budget in LLAMA_BUDGETS[: 1 if cpu else None]],
        lambda: [run.do(run.entry(name, "costs", "costs", first=True)) for name in names],
        partial(compiled, names),
    ]
    for part in parts:
        part()
        page_path(run.path()).write_text(page(run.device, run.rows))


def _llama(run: Run, budget: float) -> Any:
    """Llama-3-8B; a budget above the card's memory shows what is said of it."""
    tiny = run.options.size == "tiny"  # which takes 2 MB
    return run.entry(LLAMA, "plan", f"plan, {budget:g} GB", budget=budget * 2**-10 / 23 if tiny else budget)


def pytest_row(run: Run) -> None:
    """The row of the tests that need a card: which failed, and how."""
    if any(r["model"] == "tests" and r.get("done") for r in run.rows):
        return
    row: Row = {"model": "tests", "label": TESTS, "way": "tests"}
    with run.lock:
        run.rows = [r for r in run.rows if r["model"] != "tests"] + [row]
    start, report = time.monotonic(), run.scratch / "tests.xml"
    command = [sys.executable, "-m", "pytest", TESTS, "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
    limit = max(10.0, min(TEST_SECONDS, run.deadline - start))
    try:
        subprocess.run(command, timeout=limit, check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        row["error"] = f"stopped after {limit:.0f} s"
    if report.exists():
        row.update(outcomes(report))
        row["done"] = "error" not in row
    row["seconds"] = time.monotonic() - start
    run.write()


def outcomes(report: Path) -> Row:
    """Counts of a JUnit report, and its failures: name -> first line."""
    cases = list(ET.parse(report).iter("testcase"))
    failed: dict[str, str] = {}
    skipped = 0
    for case in cases:
        for bad in (*case.findall("failure"), *case.findall("error")):
            failed[case.get("name", "")] = (bad.get("message") or "").partition("\n")[0][:300]
        skipped += case.find("skipped") is not None
    return {"tests": len(cases), "failed": failed, "skipped_tests": skipped}


def page_path(path: Path) -> Path:
    """The page beside a report."""
    return path.with_suffix(".md")


def page(device: Mapping[str, Any], rows: Sequence[Row]) -> str:
    """All that is known, as Markdown: first whether the promise held."""
    shown = [f"{key} {value}" for key, value in device.items() if value]
    text = [f"# The first hour on {device.get('name', 'a device')}", "", ", ".join(shown), "", *promise(rows), ""]
    for row in rows:
        if row["way"] == "constants":
            text += ["## Constants", "", "| | |", "|---|---:|"]
            text += [f"| {name.replace('_', ' ')} | {_shown(name, value)} |" for name, value in _said(row).items()]
        if row["way"] == "tests":
            text += ["", f"## {TESTS}", "", tests_line(row)]
            text += [f"- {name}: {why}" for name, why in row.get("failed", {}).items()]
    ways = ("eager", "plan", "blocks", "compile")
    for name in dict.fromkeys(r["model"] for r in rows if r["way"] in ways):
        text += ["", f"## {name}", "", table([r for r in rows if r["model"] == name and r["way"] in ways])]
    if costs := [r for r in rows if r["way"] == "costs" and "measured_seconds" in r]:
        text += [
            "",
            "## Roofline and measured costs",
            "",
            "| | roofline | measured ops | one step |",
            "|---|---:|---:|---:|",
        ]
        text += [_costs(r) for r in costs]
    return "\n".join([*text, ""])


def promise(rows: Sequence[Row]) -> list[str]:
    """Whether plans stayed within their budgets, and predictions were right."""
    plans = [r for r in rows if r["way"] == "plan" and "allocated_bytes" in r]
    if not plans:
        return ["No plan has been measured yet."]
    ended = [r for r in plans if r.get("out_of_memory")]
    off = {f"{r['model']} ({r['label']})": asked(r) / r["predicted_allocated_bytes"] - 1 for r in plans}
    worst = max(off, key=lambda name: abs(off[name]))
    lines = [
        f"{len(plans)} plans ran, {len(ended)} of them out of memory in processes held to their budgets; "
        f"measured over predicted peak: {min(off.values()):+.1%} to {max(off.values()):+.1%}, furthest off {worst}."
    ]
    failed = [r for r in rows if "error" in r]
    return lines + [
        f"- {r['model']}, {' '.join(line(r).split())}" for r in (*ended, *(f for f in failed if f not in ended))
    ]


def asked(row: Row) -> int:
    """The peak of what was asked of the allocator; of what it handed out, where no other is known."""
    return int(row.get("requested_bytes") or row["allocated_bytes"])


def tests_line(row: Row) -> str:
    """The outcome of the tests in a line."""
    if "tests" not in row:
        return str(row.get("error", "not run"))
    failed, skipped = len(row["failed"]), row["skipped_tests"]
    return f"{row['tests'] - failed - skipped} passed, {failed} failed, {skipped} skipped in {row['seconds']:.0f} s."


def _said(row: Row) -> Row:
    return {k: v for k, v in row.items() if k not in ("model", "label", "way", "done", "seconds", "device")}


def _shown(name: str, value: Any) -> str:
    if name.endswith("_bytes") and isinstance(value, int):
        return f"{value / 2**20:.2f} MB"
    return str(value)


def _costs(row: Row) -> str:
    step = row.get("step_seconds")
    cells = [row["model"], *(f"{row[k] * 1e3:.1f} ms" for k in ("roofline_seconds", "measured_seconds"))]
    return f"| {' | '.join([*cells, f'{step * 1e3:.1f} ms' if step else ''])} |"
