"""HTML that reports share: headings and tables, which need neither a style sheet nor a script."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from planner.report.svg import escape

SMALL = "font-size:90%;opacity:.8"


def heading(words: str) -> str:
    """The heading of a part of a report."""
    return f"<h4 style='margin:20px 0 6px;font-size:14px;font-weight:600'>{escape(words)}</h4>"


def table(rows: Iterable[str]) -> str:
    """Rows as `cells` writes them; on a narrow page the table scrolls, and the page does not."""
    style = "border-collapse:collapse;font-size:13px;font-variant-numeric:tabular-nums;width:100%;margin:0"
    return f"<div style='overflow-x:auto'><table style='{style}'>{''.join(rows)}</table></div>"


def cells(row: Sequence[str], left: int, more: str = "", tag: str = "td") -> str:
    """A row.

    Args:
        row: HTML of each cell.
        left: so many of the first cells are set to the left, the others, numbers, to the right.
        more: attributes of the row.
        tag: "th" for a heading.
    """
    parts = []
    for at, cell in enumerate(row):
        side = "left" if at < left else "right"
        attribute, style = (" nowrap", ";white-space:nowrap") if at else ("", ";min-width:110px")
        parts.append(
            f"<{tag} align='{side}'{attribute} style='text-align:{side};padding:3px 10px 3px 0{style}'>{cell}</{tag}>"
        )
    return f"<tr{more} valign='top' style='border-bottom:1px solid rgba(128,128,128,.3)'>{''.join(parts)}</tr>"
