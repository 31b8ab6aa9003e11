"""Numbers and names as text: durations, rates, widths in terminal cells, names without control characters."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable

COLUMNS = 80


def time_unit(seconds: float, micro: str = "us") -> tuple[str, float]:
    """The unit to write a time in, and its seconds; `micro` is how to spell microseconds, for ASCII terminals "us"."""
    units = (("s", 1.0), ("ms", 1e-3), (micro, 1e-6))
    return next(((unit, size) for unit, size in units if abs(seconds) >= size), ("ns", 1e-9))


def duration(seconds: float, micro: str = "us") -> str:
    """Seconds in words.

    Examples:
        >>> duration(0.00123), duration(2.5), duration(-4.2e-6), duration(0), duration(12345)
        ('1.23 ms', '2.5 s', '-4.2 us', '0 s', '12345 s')
    """
    if not seconds:
        return "0 s"
    unit, size = time_unit(seconds, micro)
    return f"{seconds / size:.3g} {unit}" if abs(seconds) < 1000 else f"{seconds:.0f} s"


def rate(seconds: float, nbytes: float) -> str:
    """Time for memory, in milliseconds for each MB of 2**20 bytes."""
    return f"{seconds / 1e-3 / (nbytes / 2**20):.2g} ms/MB" if nbytes else duration(seconds)


def shown(text: str, encoding: str = "utf-8") -> str:
    r"""Text with escapes for characters that move a terminal's cursor, that XML forbids, or that have no encoding.

    Examples:
        >>> shown("layer\x1b[31m\n"), shown("層", "ascii")
        ('layer\\x1b[31m\\n', '\\u5c64')
    """
    visible = "".join(
        c.encode("unicode_escape").decode() if unicodedata.category(c)[0] == "C" or c in "\u2028\u2029" else c
        for c in text
    )
    return visible.encode(encoding, "backslashreplace").decode(encoding)


def cells(text: str) -> int:
    """Columns that a terminal needs for a text: two for a wide character, none for a combining one.

    Examples:
        >>> cells("ab"), cells("層"), cells("e\u0301")
        (2, 2, 1)
    """
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in ("W", "F") else 1 for c in text
    )


def clip(text: str, width: float, measure: Callable[[str], float] = cells) -> str:
    """A text's end, where it is too wide: module paths differ there.

    Args:
        text: any.
        width: at most so many terminal cells, or whatever `measure` counts.
        measure: the width of a text, the sum of those of its characters.

    Examples:
        >>> clip("transformer.h.0.mlp", 10)
        '...h.0.mlp'
    """
    if measure(text) <= width:
        return text
    start, room = len(text), width - measure("...")
    while (room := room - measure(text[start - 1])) >= 0:
        start -= 1
    return "..." + text[start:]


def pad(text: str, width: int) -> str:
    """A text in a column of a table: clipped, or filled with spaces."""
    text = clip(text, width)
    return text + " " * (width - cells(text))


def wrapped(text: str, indent: str = "", first: str | None = None, width: int = COLUMNS) -> list[str]:
    """A paragraph as lines; words that are too long for one are broken.

    Examples:
        >>> wrapped("kept, as it draws", indent="  ", width=10)
        ['  kept, as', '  it draws']
    """
    lines: list[str] = []
    line = indent if first is None else first
    empty = True
    for word in _words(text, width - max(len(indent), cells(line))):
        if not empty and cells(line) + 1 + cells(word) > width:
            lines.append(line)
            line, empty = indent, True
        line += word if empty else f" {word}"
        empty = False
    return [*lines, line]


def _words(text: str, width: int) -> Iterable[str]:
    for word in text.split():
        start, taken, left = 0, 0, cells(word)
        for at, c in enumerate(word, 1):
            taken += cells(c)
            if left > width and taken >= width - 1:
                yield word[start:at]
                start, taken, left = at, 0, left - taken
        yield word[start:]
