"""Which calls of a model are looked at again, though what the loop does around them is known."""

from __future__ import annotations

from math import isqrt

IN_A_ROW = 8  # calls of a round that are looked at


class Rounds:
    """The rounds of a loop, each of which ends as an optimizer of the model steps.

    A loop may call the model several times in a step, each for an end of its own, and what a step holds may change
    later (weights are averaged from some step on, another loss is added): the first calls of the 1st, 2nd, 3rd, 5th,
    8th, ... round are looked at, and those that follow one which has shown something new.

    Attributes:
        calls: of the present round.
        chosen: whether the latest call is one to look at.
    """

    def __init__(self) -> None:
        self._number, self.calls, self.chosen = 1, 0, True

    def call_begins(self, *, optimizer_seen: bool) -> None:
        """A call begins; where no optimizer tells, each is a round of its own after some."""
        if not optimizer_seen and self.calls and (self._number > 1 or self.calls >= IN_A_ROW):
            self.end()
        self.calls += 1
        self.chosen = self.calls <= IN_A_ROW and _is_fibonacci(self._number)

    def end(self) -> None:
        """The present round has ended."""
        self._number, self.calls = self._number + 1, 0


def _is_fibonacci(number: int) -> bool:
    return any(isqrt(n) ** 2 == n for n in (5 * number**2 - 4, 5 * number**2 + 4))
