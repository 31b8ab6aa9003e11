"""A linear program in columns and rows, and the stages of a schedule whose variables it has."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Stage:
    """The variables of the time between two points.

    Attributes:
        begin: the last op whose first run lies before the stage; -1 for none.
        live: the columns of the values that may be live when it begins.
        again: the columns of the ops that may run again in it.
        needed: values from before the stage that its first runs read.
    """

    begin: int
    live: dict[int, int]
    again: dict[int, int]
    needed: set[int]

    def available(self, v: int, producer: int, again: dict[int, int] | None = None) -> list[tuple[int, float]]:
        """The terms of which one must be 1 for v to be available: live from the begin on, or recomputed."""
        runs = self.again if again is None else again
        return [(d[key], 1.0) for d, key in ((self.live, v), (runs, producer)) if key in d]


@dataclass
class Program:
    """Minimise `costs` x over x in [0, 1], each row between its limits.

    The rows follow one another in `columns` and `factors`, each from its entry in `starts` on.

    Where there is a link, `away` has for each point the columns of the values that are on the host only, and `spare`
    for each stage the column of the time that is neither a first run nor a re-run of the stage's.
    """

    costs: list[float] = field(default_factory=list)
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)
    starts: array[int] = field(default_factory=lambda: array("i", [0]))
    columns: array[int] = field(default_factory=lambda: array("i"))
    factors: array[float] = field(default_factory=lambda: array("d"))
    stages: list[Stage] = field(default_factory=list)
    away: list[dict[int, int]] = field(default_factory=list)
    spare: list[int] = field(default_factory=list)

    @property
    def work(self) -> float:
        """About how long the linear relaxation takes: it grows a little faster than the columns."""
        return float(len(self.costs) ** 1.5)

    def column(self, cost: float = 0.0) -> int:
        self.costs.append(cost)
        return len(self.costs) - 1

    def row(self, terms: Iterable[tuple[int, float]], low: float, high: float = math.inf) -> None:
        for column, factor in terms:
            self.columns.append(column)
            self.factors.append(factor)
        self.starts.append(len(self.columns))
        self.low.append(low)
        self.high.append(high)
