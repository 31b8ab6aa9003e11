"""The terminal: whether it shows colours, and the bars of its encoding."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from planner.report.words import shown

BARS, ASCII_BARS = "▁▂▃▄▅▆▇█", "_.-:=+*#"
_CODES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "blue": "34", "cyan": "36"}
Colour = Literal["bold", "dim", "red", "green", "yellow", "blue", "cyan"]


@dataclass(frozen=True, slots=True)
class Style:
    """How to write for a stream.

    Attributes:
        colour: whether to use ANSI colours.
        encoding: of the stream.
    """

    colour: bool = False
    encoding: str = "utf-8"

    @property
    def bars(self) -> str:
        """Eight bars, from the lowest to the highest."""
        try:
            BARS.encode(self.encoding)
        except UnicodeEncodeError:
            return ASCII_BARS
        return BARS

    def name(self, text: str) -> str:
        """A name from a model or a file, without characters that move the cursor."""
        return shown(text, self.encoding)

    def paint(self, text: str, colour: Colour) -> str:
        """Text in a colour; as it is where there are none."""
        return f"\x1b[{_CODES[colour]}m{text}\x1b[0m" if self.colour and text else text


def style_of(stream: Any = None, colour: bool | None = None) -> Style:
    """How to write to a stream.

    Args:
        stream: None for standard output.
        colour: None for where a terminal shows them and nobody minds.
    """
    stream = sys.stdout if stream is None else stream
    return Style(
        shows_colours(stream, os.environ) if colour is None else colour, getattr(stream, "encoding", None) or "utf-8"
    )


def shows_colours(stream: Any, environment: Mapping[str, str]) -> bool:
    """Whether to colour: never with NO_COLOR, always with FORCE_COLOR, else on a terminal that is not TERM=dumb.

    An empty variable counts as none (https://no-color.org, https://force-color.org).
    """
    if environment.get("NO_COLOR"):
        return False
    if environment.get("FORCE_COLOR"):
        return environment["FORCE_COLOR"] != "0"
    return environment.get("TERM") != "dumb" and bool(getattr(stream, "isatty", lambda: False)())
