"""The drawings share colours, escaping, and axes in human units.

Drawings must survive pages that drop style sheets and scripts: presentation attributes alone, text in `currentColor`,
fills of a lightness that reads on white and on dark grey.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence

from planner.report.words import clip, shown, time_unit

WIDTH = 760
FONT = "font-family='system-ui,-apple-system,&quot;Segoe UI&quot;,Helvetica,Arial,sans-serif' font-size='12'"

# name -> colour, and its words in a legend; in the order in which they are stacked. The colours differ for the
# colour-blind, too (`tests/test_picture.py`)
KINDS = {
    "parameters": ("#6a6055", "parameters"),
    "optimizer": ("#ba8498", "optimizer state"),
    "other": ("#a386cd", "batch and other"),
    "gradients": ("#38a562", "gradients"),
    "kept": ("#4f86ff", "kept activations"),
    "passing": ("#4f6286", "temporary activations"),
    "recomputed": ("#ff5017", "recomputed activations"),
    "backward": ("#8d26ff", "gradients of activations"),
    "waiting": ("#77a024", "other microbatches"),
    "workspace": ("#a80abc", "workspace of the op"),
}
ACTIONS = {
    "keep": ("#4f86ff", "kept"),
    "recompute": ("#ff5017", "recomputed"),
    "offload": ("#38a562", "offloaded"),
    "": ("#7a828e", "temporary, or not needed again"),
}
BUDGET = "#d62728"
MICRO = "µs"


def escape(text: object) -> str:
    r"""Text for HTML and XML alike, attributes included; characters that XML does not allow are shown as escapes.

    Examples:
        >>> escape("a<b\x00")
        'a&lt;b\\x00'
    """
    return html.escape(shown(str(text)))


def width_of(text: str) -> float:
    """About how wide a text is drawn, rather too much."""
    widths = (
        1.05 if ord(c) > 0x2E7F else 0.34 if c in "iljtf.,:;|' ()" else 0.86 if c in "mwMW%" else 0.59 for c in text
    )
    return 12 * sum(widths)


def number(x: float) -> str:
    """A coordinate: one decimal, no more characters than that needs."""
    return f"{x:.1f}".removesuffix(".0")


def text(x: float, y: float, words: str, *, anchor: str = "start", size: float = 12, more: str = "") -> str:
    """A line of text in the page's own colour."""
    own = "" if anchor == "start" else f" text-anchor='{anchor}'"
    own += "" if size == 12 else f" font-size='{number(size)}'"
    return f"<text x='{number(x)}' y='{number(y)}' fill='currentColor'{own}{more}>{escape(words)}</text>"


def line(x1: float, y1: float, x2: float, y2: float, more: str = "stroke-opacity='0.25'") -> str:
    return (
        f"<line x1='{number(x1)}' y1='{number(y1)}' x2='{number(x2)}' y2='{number(y2)}' stroke='currentColor' {more}/>"
    )


def svg(height: float, label: str, parts: Iterable[str], *, width: float = WIDTH, more: str = "") -> str:
    """A drawing that is as wide as there is room, up to its own width."""
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {number(width)} {number(height)}' width='100%' "
        f"style='max-width:{number(width)}px;height:auto;display:block' role='img' aria-label='{escape(label)}' "
        f"{FONT}{more}>{''.join(parts)}</svg>"
    )


def steps(top: float, count: int = 5) -> list[float]:
    """Round numbers from 0 up to `top`, about so many.

    Examples:
        >>> steps(9.3, 5)
        [0.0, 2.0, 4.0, 6.0, 8.0]
    """
    rough = max(top, 1e-12) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= rough * 0.999)
    return [step * i for i in range(int(top / step * 1.0001) + 1)]


def byte_unit(top: float) -> tuple[str, int]:
    """The unit for an axis of bytes, and how many there are in it."""
    return next(
        ((u, s) for u, s in (("TB", 2**40), ("GB", 2**30), ("MB", 2**20), ("kB", 2**10)) if top >= s), ("bytes", 1)
    )


def byte_ticks(top: float, count: int = 5, bottom: float = 0) -> list[tuple[float, str]]:
    """Places and words for an axis of bytes, about so many from `bottom` to `top`.

    Examples:
        >>> byte_ticks(3 * 2**20, 3, bottom=2**20)
        [(1048576.0, '1 MB'), (2097152.0, '2 MB'), (3145728.0, '3 MB')]
    """
    unit, size = byte_unit(top)
    step = steps((top - bottom) / size, count)[1]
    first, last = math.ceil(bottom / size / step - 1e-9), math.floor(top / size / step + 1e-9)
    return [(n * size, f"{n:g} {unit}" if n else "0") for n in (round(i * step, 9) for i in range(first, last + 1))]


def time_ticks(top: float) -> list[tuple[float, str]]:
    """Places and words for an axis of seconds."""
    unit, size = time_unit(top, MICRO)
    return [(n * size, f"{n:g} {unit}" if n else "0") for n in (round(x, 9) for x in steps(top / size, 6))]


def legend(entries: Sequence[tuple[str, str]], x: float, y: float, width: float = WIDTH) -> tuple[list[str], float]:
    """Marks with words, in columns; entries are (a mark drawn around 0,0 in a box of 16, words). Also the next y."""
    widest = max((width_of(words) for _, words in entries), default=0) + 40
    columns = max(1, int((width - x) / widest))
    step = (width - x) / columns
    parts = []
    for at, (mark, words) in enumerate(entries):
        left, base = x + at % columns * step, y + at // columns * 20
        parts.append(f"<g transform='translate({number(left + 8)},{number(base - 4)})'>{mark}</g>")
        parts.append(text(left + 22, base, clip(words, 100)))
    return parts, y + -(-len(entries) // columns) * 20


def swatch(colour: str) -> str:
    return f"<rect x='-6' y='-6' width='12' height='12' rx='2' fill='{colour}'/>"
