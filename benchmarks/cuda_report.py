"""The results of `benchmarks.cuda` as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from planner.errors import gb

from .cuda_entry import GB

Row = dict[str, Any]


def line(row: Row) -> str:
    """One row in a line."""
    text = f"{row['label']:<28}"
    if "skipped" in row or "infeasible" in row or "allocated_bytes" not in row:
        least = f"infeasible: the least is {row['minimum_gb']:.2f} GB" if "minimum_gb" in row else ""
        skipped = f"skipped: {row['skipped']}" if "skipped" in row else ""
        return text + (skipped or row.get("error") or least or "no result")
    allocated, reserved = row["allocated_bytes"] / GB, row["reserved_bytes"] / GB
    text += f"{allocated:7.2f} GB, {reserved:6.2f} reserved, {row['step_seconds'] * 1e3:7.1f} ms"
    if "predicted_allocated_bytes" in row:
        off = row["allocated_bytes"] / row["predicted_allocated_bytes"] - 1
        text += f", predicted {row['predicted_allocated_bytes'] / GB:.2f} GB ({off:+.1%})"
    if "moved_bytes" in row:
        text += f", {gb(row['moved_bytes'])} moved"
    return (
        text + (", OUT OF MEMORY" if row.get("out_of_memory") else "") + (f", {row['error']}" if "error" in row else "")
    )


def table(rows: Sequence[Row]) -> str:
    """The rows of one model as a Markdown table."""
    eager = next((r.get("step_seconds") for r in rows if r["label"] == "eager"), None)
    head = "| | budget | predicted | allocated | reserved | out of memory | step | over eager | estimated | kernels |"
    lines = [f"{head} gradients differ by | planning |", "|---|" + "---:|" * 11]
    for r in rows:
        if "allocated_bytes" not in r:
            lines.append(f"| {' '.join(line(r).split())} |" + " |" * 11)
            continue
        planned = "predicted_bytes" in r
        cells = [
            r["label"],
            _gb(r.get("budget_bytes")),
            _gb(r.get("predicted_allocated_bytes")),
            _gb(r["allocated_bytes"]),
            _gb(r["reserved_bytes"]),
            "**yes**" if r.get("out_of_memory") else "no",
            f"{r['step_seconds'] * 1e3:.1f} ms",
            f"{r['step_seconds'] / eager - 1:+.1%}" if eager else "",
            f"{r['overhead']:+.1%}" if planned else "",
            f"{r['kernel_seconds'] * 1e3:.1f} ms" if "kernel_seconds" in r else "",
            f"{r['gradient_error']:.0e}" if "gradient_error" in r else "",
            f"{r['planning_seconds']:.1f} s" if planned else "",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _gb(size: float | None) -> str:
    return "" if size is None else gb(size)
