"""What plans count ahead of a loop that holds more from step to step, as one that keeps its predictions in a list."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from planner.core.loop import Loop, same_facts
from planner.runtime.signature import Role

LITTLE = 100  # growth up to this part of the budget is that of something which the loop adds to
AHEAD = 128  # the part of the budget that plans count ahead at most, until the loop has grown OFTEN
STEPS = 4  # for which they do
OFTEN = 4  # times: from then on plans count as much again as it has grown by, so that ever fewer are made


@dataclass(slots=True)
class _Grown:
    """How a loop has grown around calls in one role: how often, by how many bytes, and those counted ahead of it; and
    by how many less than was seen its other planned models are taken to need.
    """

    times: int = 0
    nbytes: int = 0
    ahead: int = 0
    leaner: int = 0


class Growth:
    """How a loop has grown since its first step, by role."""

    def __init__(self) -> None:
        self._grown: dict[Role, _Grown] = {}

    def counted(self, role: Role, seen: Loop, before: Loop) -> Loop:
        """The loop, with what plans count ahead of it where that suffices.

        Args:
            role: of the calls.
            seen: the loop, as it was seen.
            before: the one that plans are for.
        """
        grown = self._grown.get(role)
        if grown is None:
            return seen
        if grown.leaner and seen.loss is not None and before.loss is not None:  # they need not have been planned anew
            more = max(0, seen.loss.others - before.loss.others)
            seen = seen.with_leaner_others(min(grown.leaner, more)) or seen
        spare = before.more_than(seen)
        return replace(seen, around=seen.around + spare) if 0 <= spare <= grown.ahead else seen

    def foreseen(self, role: Role, seen: Loop, before: Loop, budget: int) -> Loop:
        """The loop to make plans for, which `before` do not suffice for: one that only holds somewhat more than before
        will hold more still.
        """
        grown = self._grown.setdefault(role, _Grown())
        more, grown.ahead = seen.more_than(before) + grown.ahead, 0
        little = 0 < more <= budget // LITTLE + grown.nbytes
        if not little or not same_facts(seen, before, abs(seen.more_than(before))):
            return seen
        grown.times, grown.nbytes = grown.times + 1, grown.nbytes + more
        if grown.times > 1:  # once may be all
            grown.ahead = grown.nbytes if grown.times >= OFTEN else min(STEPS * more, budget // AHEAD)
        return replace(seen, around=seen.around + grown.ahead)

    def lesser(self, role: Role, loop: Loop, over: int) -> Iterator[Loop]:
        """Loops that hold less than one for which every plan is over the budget, by so many bytes.

        As it is now, if more is counted ahead: if that is taken, nothing is any more. And with less of what other
        planned models take, whose plans are made for what is held beside them.
        """
        grown = self._grown.setdefault(role, _Grown())
        if ahead := grown.ahead:
            grown.ahead = 0
            yield replace(loop, around=loop.around - ahead)
            grown.ahead = ahead
        if (leaner := loop.with_leaner_others(over)) is not None:
            before, grown.leaner = grown.leaner, over
            yield leaner
            grown.leaner = before
