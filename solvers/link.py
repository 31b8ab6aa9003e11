"""The link between the device and the host, over which values may leave for a while."""

from __future__ import annotations

import math
from dataclasses import dataclass

from solvers.errors import ProblemError


@dataclass(frozen=True, slots=True)
class Link:
    """Two copy engines, one a direction; each does one copy at a time, in the order of the schedule's moves.

    Attributes:
        out: bytes that leave the device in one unit of cost.
        back: bytes that come back in one unit of cost.
        both: share of each rate while both directions run; at least 0.5, as less would be slower than turns.
        latency: cost of each copy, whatever its size.
        host: the most bytes that may be away at once; None for no limit.
        least: bytes of the smallest value that is worth moving; solvers move no smaller one.
    """

    out: float
    back: float
    both: float = 1.0
    latency: float = 0.0
    host: int | None = None
    least: int = 2**20


def check_link(link: Link) -> None:
    """Raise ProblemError where a field of a link is out of its range."""
    if not isinstance(link, Link):
        raise ProblemError(f"link must be a Link or None, not {link!r:.60}")
    for name in ("out", "back"):
        if not (_number(rate := getattr(link, name)) and rate > 0):
            raise ProblemError(f"link has {name} {rate!r:.60}, not bytes per unit of cost > 0")
    if not (_number(link.both) and 0.5 <= link.both <= 1):
        raise ProblemError(f"link has both {link.both!r:.60}, not a share from 0.5 to 1")
    if not (_number(link.latency) and link.latency >= 0):
        raise ProblemError(f"link has latency {link.latency!r:.60}, not a cost >= 0")
    for name, size in (("host", link.host), ("least", link.least)):
        if not ((name == "host" and size is None) or (type(size) is int and size >= 0)):
            raise ProblemError(f"link has {name} {size!r:.60}, not a whole number of bytes >= 0")


def _number(x: object) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool) and math.isfinite(x)
