"""Sizes that turn out to change from step to step: learnt from the shapes that come, and planned for together."""

from __future__ import annotations

import logging

from planner.core.maxima import Maxima
from planner.errors import InfeasibleBudgetError, warn
from planner.runtime.families import Shapes
from planner.runtime.together import MOST

SHAPES = 3  # of one kind of calls: the first, that of a smaller last batch, and the one that shows that sizes change
PARTS = 8  # of a power of two: sizes that grow from batch to batch are rounded up to multiples of one

Kind = tuple[object, ...]

log = logging.getLogger("planner")


class LearntShapes(Shapes):
    """Families of calls for the sizes that change, as the shapes that came show them.

    Args:
        limits: the largest of those that are known to change.
        tells: whether to write a log line when a plan for many sizes is made.

    Attributes:
        came: for calls that differ in sizes alone, the first shapes that came.
        several: the kinds of calls of which a step makes some of other sizes.
        growing: sizes of which three were seen: there may be larger ones.
        infeasible: sizes that exceed the budget, by the kind of calls.
    """

    def __init__(self, limits: Maxima, *, tells: bool) -> None:
        super().__init__(False, limits)
        self.tells = tells
        self.came: dict[Kind, list[Maxima]] = {}
        self.several: set[Kind] = set()
        self.growing: set[tuple[str, int]] = set()
        self.infeasible: list[tuple[Kind, Maxima]] = []

    def without_families(self) -> LearntShapes:
        new = super().without_families()
        assert isinstance(new, LearntShapes)
        assert self.free is not None
        new.free, new.growing = dict(self.free), set(self.growing)
        new.infeasible, new.several = list(self.infeasible), set(self.several)
        new.came = {kind: list(came) for kind, came in self.came.items()}
        return new

    def note(self, kind: Kind, sizes: Maxima, *, together: bool = False) -> None:
        came = self.came.setdefault(kind, [])
        if sizes in came:
            return
        if together:
            self.several.add(kind)
        most = MOST if together else SHAPES
        if len(came) < most:
            came.append(sizes)
        if len(came) < most:
            return
        assert self.free is not None
        for path, at in sizes.sizes.items():
            for d in at:
                seen = {shape.of(path)[d] for shape in (*came, sizes)}
                if len(seen) > 1:
                    self.free[path] = self.free.get(path, frozenset()) | {d}
                    self.limits[path, d] = max(*seen, self.limits.get((path, d), 0))
                if len(seen) > 2:
                    self.growing.add((path, d))

    def shrunk(self, kind: Kind, sizes: Maxima) -> bool:
        came = () if kind in self.several else self.came.get(kind, ())
        return any(shape.cover(sizes) and shape != sizes for shape in came)

    def limit(self, maxima: Maxima) -> None:
        for path, at in maxima.sizes.items():
            for d, n in at.items():
                self.limits[path, d] = max(n, self.limits.get((path, d), 0))

    def wanted(self, kind: Kind, own: Maxima) -> list[Maxima]:
        """The largest sizes that came, rounded up where they may go on growing; as they are; those of the call."""
        parts = max(PARTS >> len(self.families.get(kind, ())), 1)  # the more often sizes grew, the more room
        exact = Maxima(
            {path: {d: max(n, self.limits[path, d]) for d, n in at.items()} for path, at in own.sizes.items()}
        )
        rounded = {
            path: {d: _rounded(n, parts) if (path, d) in self.growing else n for d, n in at.items()}
            for path, at in exact.sizes.items()
        }
        wanted: list[Maxima] = []
        for maxima in (Maxima(rounded), exact):
            exceeds = any(of == kind and maxima.cover(less) for of, less in self.infeasible)
            if not exceeds and maxima not in (*wanted, own):
                wanted.append(maxima)
        return [*wanted, own]

    def planned(self, maxima: Maxima) -> None:
        if self.tells:
            log.info("shapes change: one plan and one compiled graph for all up to %s", _in_words(maxima))

    def differs(self, kind: Kind) -> None:
        super().differs(kind)
        if kind in self.apart:
            self._tell("the graph of each is another one")

    def refused(self, kind: Kind, maxima: Maxima, why: Exception, *, last: bool) -> None:
        if isinstance(why, InfeasibleBudgetError):
            if not last:  # another shape may do
                self.infeasible.append((kind, maxima))
        elif last:
            self.apart.add(kind)
            self._tell(str(why))

    def _tell(self, why: str) -> None:
        if not self.warned:
            self.warned = True
            warn(
                "the shapes of the batch change, and each is planned and compiled for itself, which takes seconds: "
                f"{why}. Pad batches to a few sizes, or plan with mode='eager', which compiles nothing"
            )


def _rounded(n: int, parts: int) -> int:
    """A size rounded up to a multiple of a part of the next power of two."""
    unit = max((1 << (n - 1).bit_length()) // parts, 1)
    return -(-n // unit) * unit


def _in_words(maxima: Maxima) -> str:
    tensors: dict[tuple[int, int], list[str]] = {}
    for path, at in maxima.sizes.items():
        for d, n in at.items():
            tensors.setdefault((n, d), []).append(f"batch{path[3:]}")
    return "; ".join(f"{n} in dimension {d} of {', '.join(of)}" for (n, d), of in tensors.items())
