"""What `benchmarks.peers` shows: Markdown tables, a summary, and a plot in plain SVG for light and dark pages."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from .panels import axes, picture, placing

MARKS = {"groups": "M-4,4 L4,4 L0,-4 Z", "block": "M-4,-4 H4 V4 H-4 Z", "chen": "M-5,0 L0,-5 L5,0 L0,5 Z"}
CROSS = "M-4,-4 L4,4 M-4,4 L4,-4"
NAMES = {
    "auto": "auto",
    "torch": "torch's activation_memory_budget",
    "block": "every block",
    "groups": "checkpoint_sequential",
    "chen": "chen",
    "ilp": "ilp",
}
STYLE = (
    "svg{font:11px sans-serif;color:#1f2328;--auto:#0969da;--torch:#bc4c00;--block:#1a7f37;--groups:#8250df;"
    "--chen:#6e7781;--ilp:#cf222e}@media(prefers-color-scheme:dark){svg{color:#d1d7e0;--auto:#58a6ff;--torch:#f0883e;"
    "--block:#3fb950;--groups:#bc8cff;--chen:#9198a1;--ilp:#ff7b72}}text{fill:currentColor}"
    ".axis{stroke:currentColor;stroke-opacity:.35;fill:none}.grid{stroke:currentColor;stroke-opacity:.1}"
    ".line{fill:none;stroke-width:1.5}"
)

Rows = Sequence[Mapping[str, Any]]


def table(rows: Rows) -> str:
    """Markdown."""
    eager = rows[0]["step_peak"]
    lines = ["| | step peak | of eager's | total | FLOPs | roofline | time | gradients differ by |"]
    lines.append("|---|---:|---:|---:|---:|---:|---:|---:|")
    for r in rows:
        if "why_not" in r:
            lines.append(f"| {r['name']} | {r['why_not']} | | | | | | |")
            continue
        over = " (over its budget)" if r["total_peak"] > r.get("budget", r["total_peak"]) else ""
        lines.append(
            f"| {r['name']} | {r['step_peak'] / 2**20:.2f} MB | {r['step_peak'] / eager:.0%} "
            f"| {r['total_peak'] / 2**20:.2f} MB{over} | {r['flops']:+.1%} | {r['roofline']:+.1%} | {r['time']:+.0%} "
            f"| {r['gradient_error']:.0e} |"
        )
    return "\n".join(lines)


def summary(models: Mapping[str, Rows]) -> str:
    """The ratios to per-block checkpointing, and where torch's budget pays less than `auto` at its measured peak."""
    lines: list[str] = []
    for label, goal in (("auto at block's peak", 0.6), ("auto at 1.25x", 0.45)):
        for unit in ("flops", "roofline"):
            ratios = {}
            for name, rows in models.items():
                of = {r["name"]: r for r in rows}
                if unit in of[label] and unit in of["every block"]:
                    ratios[name] = of[label][unit] / of["every block"][unit]
            lines.append(f"{label}, {unit} over every block's: {_ratios(ratios)} (goal: mean <= {goal})")
    lows = {}
    for name, rows in models.items():
        of = {r["name"]: r for r in rows}
        if "step_peak" in of["auto, lowest"]:
            lows[name] = of["auto, lowest"]["step_peak"] / of["every block"]["step_peak"]
    lines.append(f"auto's lowest step peak over every block's: {_ratios(lows)} (goal: mean <= 0.9)")
    for unit, slack in (("flops", 0.0005), ("roofline", 0.0005), ("time", 0.03)):
        worse = []
        for name, rows in models.items():
            of = {r["name"]: r for r in rows}
            for r in rows:
                if r["kind"] == "torch" and unit in r and "auto" in r:
                    ours = of[r["auto"]]
                    paid = "infeasible" if unit not in ours else f"{ours[unit]:.1%}"
                    if unit not in ours or ours[unit] > r[unit] + slack:
                        wrong = ", its gradients wrong" if r["gradient_error"] > 1e-3 else ""
                        worse.append(f"{name} {r['name']} ({r[unit]:.1%}; auto {paid}{wrong})")
        lines.append(f"torch's settings that spend less {unit} than auto at their peak: {'; '.join(worse) or 'none'}")
    return "\n".join(f"- {line}" for line in lines)


def _ratios(found: Mapping[str, float]) -> str:
    each = ", ".join(f"{name} {x:.2f}" for name, x in found.items())
    return f"{each}; mean {statistics.mean(found.values()):.2f}" if found else "none"


def draw(models: Mapping[str, Rows]) -> str:
    """Measured step peak as a share of eager's, against FLOPs spent again, for each model's rows."""
    panels = [_panel(model, rows) for model, rows in models.items()]
    label = "FLOPs recomputed against measured peak, for each model and alternative"
    return picture(label, STYLE, NAMES, _mark, panels)


def _panel(model: str, rows: Rows) -> str:
    eager = next(r["step_peak"] for r in rows if r["kind"] == "eager")
    points = [(r["kind"], 100 * r["step_peak"] / eager, 100 * r["flops"]) for r in rows if r.get("step_peak")]
    most = max(10.0, *(y for _, _, y in points))
    widest = max(100.0, *(x for _, x, _ in points))
    tall = -(-most // 10) * 10
    wide = -(-widest // 25) * 25

    across = [(x, f"{x}%") for x in range(0, int(wide) + 1, 25 if wide <= 100 else 50)]
    up = [(y, f"{y}%") for y in range(0, int(tall) + 1, 10 if tall <= 50 else 20)]
    ends = wide, 0.0, tall
    parts, place = axes(model, ("peak, of eager's", "FLOPs again"), ends, across, up), placing(*ends)
    points = [(kind, x, max(0.0, y)) for kind, x, y in points]
    line = sorted((x, y) for kind, x, y in points if kind == "auto")  # torch's peak rises again: no line
    if line:
        path = " L".join("{:.1f},{:.1f}".format(*place(*p)) for p in line)
        parts.append(f"<path class='line' stroke='var(--auto)' d='M{path}'/>")
    parts += [_mark(kind, *place(x, y)) for kind, x, y in points if kind in NAMES]
    return "".join(parts)


def _mark(kind: str, x: float, y: float) -> str:
    if kind in MARKS:
        shape = f"<path d='{MARKS[kind]}' fill='var(--{kind})'/>"
    elif kind == "ilp":
        shape = f"<path d='{CROSS}' stroke='var(--ilp)' stroke-width='2' fill='none'/>"
    elif kind == "torch":
        shape = "<circle r='3' stroke='var(--torch)' stroke-width='1.5' fill='none'/>"
    else:
        shape = "<circle r='3' fill='var(--auto)'/>"
    return f"<g transform='translate({x:.1f},{y:.1f})'>{shape}</g>"
