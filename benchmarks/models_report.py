"""The page that `benchmarks.models` writes, in Markdown."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

Rows = Sequence[Mapping[str, Any]]

TITLES = {
    "text": "Language, of `transformers`",
    "speech": "Speech, sound and time series, of `transformers`",
    "vision": "Images and video, also with text, of `transformers`",
    "diffusion": "Diffusion and its autoencoders, of `diffusers`",
    "plain": "Plain torch",
    "awkward": "Awkward steps",
}
INTRODUCTION = """# Models

What the planner does with {count} small models with random weights, as `python -m benchmarks.models` measured it:
{device}, torch {torch}, {platform}. Each is planned at 60% of the peak that `torch.profiler` measures without a plan
(parameters, buffers and batch included; no optimizer), or at the least that is feasible where that is less than what
would do (marked *). Each has dropout, drop path, BatchNorm and the like as its configuration trains. Rows are measured
again where a change is thought to touch them, so they stem from several versions of the planner.

- *peak*, *measured*: of eager's and of the planned step, by the profiler's allocator events; *predicted*: the plan's.
- *results*: loss, outputs, gradients, buffers, parameters and random state of two planned steps, against eager from
  the same seed. "equal": to the last bit. A number: the largest difference of a tensor relative to its largest entry,
  and in brackets what eager's own step differs by from float64's (or, where that draws other random numbers, what
  torch.compile's aot_eager differs by from eager); such a step equals, to the last bit, a planned one that keeps
  everything.
- *more time*: estimated / measured, as the median of {pairs} alternating pairs of steps in processor time. Steps of
  small models take milliseconds: the second has noise of several points, with what Python spends on a graph in it.
- *regions*: graphs that torch.compile made of the step, planned together; *planned in*: seconds on a busy core, with †
  where the search was cut short to get through more models.
"""
AWKWARD = """
Graph breaks, branches on values, buffers that are written over, hooks, custom autograd functions and the like. Here a
plan that holds and a refusal in words are both right; a wrong gradient, a silent loss of the plan or a crash never is.
"""


LIBRARIES = """# Models of libraries

What the planner does with {count} small models that {libraries} libraries ship, with random weights, as
`python -m benchmarks.models --libraries` measured it: {device}, torch {torch}, {platform}, {date}. {ran}
Each is planned at 70% of the peak that `torch.profiler` measures without a plan, or at the least that is feasible
(marked *); columns and verdicts are those of [the other survey](models.md). Where *planned in* is marked †, the
search was cut short to get through more models: such plans hold as much, and may take more time than they need to.
"""


def libraries_page(report: Mapping[str, Any]) -> str:
    """The page of the models that libraries ship."""
    rows: Rows = report["models"]
    versions: Mapping[str, str] = report["versions"]
    ran = "Versions: " + ", ".join(f"{name} {version}" for name, version in versions.items()) + "."
    for name, why in report["skipped"].items():
        ran += f" {name} was skipped ({_plain(why)}): its rows are of an earlier run."
    titles = {family: f"`{family}`" for family in dict.fromkeys(r["family"] for r in rows)}
    if missing := report.get("unmeasured"):
        left = Counter(name.partition("/")[0] for name in missing)
        words = ", ".join(f"{number} of `{family}`" for family, number in left.items())
        ran += f" Listed and not measured yet: {len(missing)} more, {words}."
    text = LIBRARIES.format(count=len(rows), libraries=len(titles), ran=ran, **report)
    return _written(text, rows, titles)


def page(report: Mapping[str, Any]) -> str:
    """All of it."""
    rows: Rows = report["models"]
    return _written(INTRODUCTION.format(count=len(rows), **report), rows, TITLES)


def _written(introduction: str, rows: Rows, titles: Mapping[str, str]) -> str:
    """An introduction, the counts, a table a family, and all refusals and failures in their words."""
    parts = [introduction, _summary(rows, titles)]
    for family, title in titles.items():
        mine = [r for r in rows if r["family"] == family]
        if mine:
            parts.append(f"## {title}\n{AWKWARD if family == 'awkward' else ''}\n{_table(mine)}")
    failed = [r for r in rows if r["verdict"] != "planned"]
    if failed:
        said = "\n".join(f"- **{r['name']}** ({r['verdict']}): {_plain(r['why'])}" for r in failed)
        parts.append(f"## Refusals and failures, in full\n\n{said}")
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _summary(rows: Rows, titles: Mapping[str, str]) -> str:
    lines = [
        "| | models | planned | refused | above budget | wrong | crashed | results equal to the last bit |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    groups = {title: [r for r in rows if r["family"] == family] for family, title in titles.items()}
    groups["all but the awkward" if "awkward" in titles else "all"] = [r for r in rows if r["family"] != "awkward"]
    for title, mine in groups.items():
        counts = [
            sum(r["verdict"] == v for r in mine) for v in ("planned", "refused", "above budget", "wrong", "crashed")
        ]
        equal = sum(bool(r["bitwise"]) for r in mine)
        lines.append(f"| {title} | {len(mine)} | " + " | ".join(map(str, counts)) + f" | {equal} |")
    return "\n".join(lines)


def _table(rows: Rows) -> str:
    lines = [
        "| | parameters | regions | peak, MB | budget | predicted | measured | results | more time | planned in |",
        "|---|---:|---:|---:|---:|---:|---:|---|---:|---:|",
    ]
    for r in rows:
        named = _named(r)
        size = "" if r["parameters"] is None else f"{r['parameters'] / 1e6:.2f} M"
        start = f"| {named} | {size} | {r['regions'] or ''} | {_mb(r['baseline_bytes'])}"
        if r["measured_bytes"] is None:
            lines.append(f"{start} | | | | **{r['verdict']}** | | |")
            continue
        star = "" if r["feasible"] else " *"
        quick = " †" if r.get("short") else ""
        verdict = "" if r["verdict"] == "planned" else f"**{r['verdict']}** "
        time = "" if r["measured_overhead"] is None else f"{r['overhead']:.1%} / {r['measured_overhead']:+.0%}"
        lines.append(
            f"{start} | {_mb(r['budget_bytes'])}{star} | {_mb(r['predicted_bytes'])} | {_mb(r['measured_bytes'])} "
            f"| {verdict}{_results(r)} | {time} | {r['plan_seconds']:.0f} s{quick} |"
        )
    return "\n".join(lines)


def _named(row: Mapping[str, Any]) -> str:
    name: str = row["name"].removeprefix(f"{row['family']}/")
    return name if row["family"] in ("plain", "awkward") or not row["model"] else f"{row['model']}<br>{name}"


def _results(row: Mapping[str, Any]) -> str:
    if row["bitwise"]:
        return "equal"
    if row["planned_error"] is None:
        return ""
    return f"{row['error']:.0e} ({row['own_error']:.0e})"


def _mb(size: int | None) -> str:
    return "" if size is None else f"{size / 2**20:.2f}"


def _plain(text: str) -> str:
    """On one line, safe in Markdown, with paths from where packages lie."""
    text = re.sub(r"/\S*/(?=site-packages/|benchmarks/)", "", " ".join(text.split()))
    return text.replace("<", "&lt;").replace("|", "\\|")
