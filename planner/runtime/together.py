"""The calls that a loop makes of a model in one step, before one backward pass through all of them."""

from __future__ import annotations

from planner.compat.autograd import when_backward_ends
from planner.core.plan import PlanRecord
from planner.runtime.signature import Signature

MOST = 4  # calls of a step that are planned together


class Together:
    """The calls of the present step, and those of the step that plans are made for.

    Attributes:
        kinds: of these, in order, where they are not all alike; empty where each call is planned by itself.
        plans: the plans of each kind, in the order of its calls in a step.
    """

    def __init__(self) -> None:
        self.kinds: tuple[Signature, ...] = ()
        self.plans: dict[Signature, tuple[PlanRecord, ...]] = {}
        self._now: list[Signature] = []
        self._never = self._apart = False  # that there is one; that the backward passes are several

    def call_begins(self, kind: Signature, *, first: bool) -> bool:
        """A call begins, the first of a step or not; whether the step turns out to be another than was planned for.

        Each call is planned by itself from then on. A step may leave calls out, and others may have none of them.
        """
        if first:
            self._now.clear()
        if len(self._now) <= MOST:
            self._now.append(kind)
        if not self.kinds or not (self._apart or self._is_other()):
            return False
        self.kinds, self._never = (), True
        return True

    def _is_other(self) -> bool:
        """Whether the calls of the present step are not some of those that are planned together, in their order."""
        rest = iter(self.kinds)
        return not set(self.kinds).isdisjoint(self._now) and not all(each in rest for each in self._now)

    def plan(self, kind: Signature, plan: PlanRecord) -> PlanRecord:
        """The plan by which the latest call runs: the calls of a kind take turns, unless it was planned anew since."""
        turns = self.plans.get(kind, (plan,))
        taken = any(plan is each for each in turns)
        return turns[(self._now.count(kind) - 1) % len(turns)] if taken else plan

    def replace(self, kind: Signature, plan: PlanRecord, by: PlanRecord) -> None:
        """The same plan, with other figures."""
        self.plans[kind] = tuple(by if each is plan else each for each in self.plans.get(kind, ()))

    def recorded(self, *, passes: int, roles: int) -> None:
        """The step has ended and was recorded, with so many backward passes, through calls in so many roles."""
        kinds = tuple(self._now)
        if self.kinds:
            self._apart = kinds == self.kinds and passes != 1
        elif len(set(kinds)) > 1 and len(kinds) <= MOST and passes == 1 and roles == 1 and not self._never:
            self.kinds = kinds


class BackwardPasses:
    """The backward passes through calls of a model, some of which go through several calls."""

    def __init__(self) -> None:
        self._runs = False

    def begins(self) -> bool:
        """A backward pass comes to a call; whether that is the first one that it comes to."""
        if self._runs:
            return False
        self._runs = True
        when_backward_ends(self.end)
        return True

    def end(self) -> None:
        """No backward pass runs: a call begins, and one that has raised an error does not tell."""
        self._runs = False
