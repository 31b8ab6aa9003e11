"""Plots of several panels in plain SVG, for light and dark pages: what is drawn again, or gained, against memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape

COLUMNS, WIDTH, HEIGHT = 4, 232, 190
LEFT, RIGHT, TOP, BOTTOM = 44, 18, 26, 34  # of a panel, around its axes
LEGEND = 30

Mark = Callable[[str, float, float], str]
Labels = Iterable[tuple[float, str]]
Place = Callable[[float, float], tuple[float, float]]


def picture(label: str, style: str, names: Mapping[str, str], mark: Mark, panels: Sequence[str]) -> str:
    """The panels side by side, under a legend.

    Args:
        label: what it shows, for those who do not see it.
        style: of the page.
        names: of the kinds of marks.
        mark: of a kind, at a place.
        panels: as `axes()` begins them.
    """
    legend, x = [], 14.0
    for kind, name in names.items():
        legend.append(f"{mark(kind, x, 14)}<text x='{x + 9:.0f}' y='18'>{escape(name)}</text>")
        x += 32 + 6.1 * len(name)
    width = max(round(x), min(COLUMNS, len(panels)) * WIDTH)
    height = -(-len(panels) // COLUMNS) * HEIGHT + LEGEND
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' width='{width}' height='{height}' "
        f"role='img' aria-label='{escape(label)}'>\n<style>{style}</style>",
        *legend,
    ]
    for at, panel in enumerate(panels):
        left, top = at % COLUMNS * WIDTH, at // COLUMNS * HEIGHT + LEGEND
        parts.append(f"<g transform='translate({left},{top})'>{panel}</g>")
    return "\n".join([*parts, "</svg>"]) + "\n"


def placing(wide: float, low: float, high: float) -> Place:
    """Where a panel has a point, whose axes go from 0 to `wide` and from `low` to `high`."""

    def place(x: float, y: float) -> tuple[float, float]:
        across = LEFT + x / wide * (WIDTH - LEFT - RIGHT)
        return across, HEIGHT - BOTTOM - (y - low) / (high - low) * (HEIGHT - TOP - BOTTOM)

    return place


def axes(
    title: str,
    names: tuple[str, str],
    ends: tuple[float, float, float],
    columns: Labels,
    rows: Labels,
) -> list[str]:
    """The title and the axes of a panel.

    Args:
        title: of the panel.
        names: of the horizontal and of the vertical axis.
        ends: as for `placing()`.
        columns: where the horizontal axis has labels, and which.
        rows: the same of the vertical one.
    """
    place, (wide, low, high) = placing(*ends), ends
    parts = [f"<text x='{LEFT}' y='16' font-weight='bold'>{escape(title)}</text>"]
    for y, text in rows:
        (x0, at), (x1, _) = place(0, y), place(wide, y)
        parts.append(f"<path class='grid' d='M{x0:.1f},{at:.1f} H{x1:.1f}'/>")
        parts.append(f"<text x='{x0 - 4:.1f}' y='{at + 4:.1f}' text-anchor='end'>{text}</text>")
    for x, text in columns:
        across, bottom = place(x, low)
        parts.append(f"<text x='{across:.1f}' y='{bottom + 14:.1f}' text-anchor='middle'>{text}</text>")
    (x0, y0), (x1, y1) = place(0, low), place(wide, high)
    parts.append(f"<path class='axis' d='M{x0:.1f},{y1:.1f} V{y0:.1f} H{x1:.1f}'/>")
    where = f"x='{(x0 + x1) / 2:.0f}' y='{HEIGHT - 6}' text-anchor='middle' font-size='10'"
    parts.append(f"<text {where}>{names[0]}</text>")
    turned = f"translate(10,{(y0 + y1) / 2:.0f}) rotate(-90)"
    return [*parts, f"<text transform='{turned}' text-anchor='middle' font-size='10'>{names[1]}</text>"]
