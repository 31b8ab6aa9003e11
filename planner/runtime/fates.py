"""What becomes of a model's calls: a backward pass runs through them, or their results are let go of without one."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from planner.core.plan import PlanRecord
from planner.errors import gb, warn
from planner.runtime.signature import Role, evaluates

LATEST = 100  # calls of which it is known that they got no backward pass


@dataclass(slots=True)
class _Made:
    """A call: in which role, the bytes that it saved, and whether a backward pass has come to its results."""

    role: Role
    kept: int
    used: bool


class Fates:
    """The calls of a model that are not over, and what became of those that are.

    Attributes:
        used: the roles of which some call got a backward pass.
        dropped: those of which some call got none.
    """

    def __init__(self) -> None:
        self.used: set[Role] = set()
        self.dropped: set[Role] = set()
        self._calls: dict[int, _Made] = {}
        self._without: tuple[int, ...] = ()

    def certain(self, role: Role) -> bool:
        """Whether each call in a role is taken to get a backward pass."""
        return role in self.used and role not in self.dropped

    def add(self, number: int, role: Role, kept: int) -> None:
        """A call has run, and saved so many bytes."""
        self._calls[number] = _Made(role, kept, self.certain(role))

    def beyond(self, kept: int) -> int:
        """Bytes that calls which are not over have saved beside `kept` for each."""
        return sum(max(0, made.kept - kept) for made in self._calls.values())

    def doubt(self, numbers: Collection[int]) -> None:
        """More calls wait than ever before: a backward pass is not to be taken for granted, `use` tells of each."""
        for number in self._calls.keys() & set(numbers):
            self._calls[number].used = False

    def in_vain(self, numbers: Collection[int]) -> bool | None:
        """Whether these calls, which are among the latest, are over without a backward pass; None: not all are over."""
        return None if not self._calls.keys().isdisjoint(numbers) else self.without(numbers, ())

    def use(self, number: int) -> None:
        """A backward pass has come to the results of a call."""
        if number in self._calls:
            self._calls[number].used = True
            self.used.add(self._calls[number].role)

    def settle(self, waiting: Collection[int]) -> None:
        """Calls that do not wait any more are over."""
        for number in self._calls.keys() - set(waiting):
            made = self._calls.pop(number)
            if not made.used:
                self.dropped.add(made.role)
                self._without = (*self._without[-LATEST:], number)

    def without(self, numbers: Collection[int | None], left_over: Collection[int]) -> bool:
        """Whether all of these calls, which are among the latest, are over without a backward pass, or left over."""
        return all(number in self._without or number in left_over for number in numbers)

    def unused(self, role: Role) -> bool:
        """Whether no backward pass is expected of calls in a role: none came of earlier ones; or a model that is
        trained in training mode is in evaluation mode.
        """
        if role in self.used:
            return False
        return role in self.dropped or (evaluates(role) and not all(map(evaluates, self.used)))

    def role(self, number: int) -> Role | None:
        """The role of a call that is not over; None where it is not known."""
        return self._calls[number].role if number in self._calls else None

    def left_over(self, waiting: Collection[int]) -> dict[int, int]:
        """Of calls that wait for a backward pass, those of which none is expected, and the bytes that each holds."""
        own = {number: self._calls[number] for number in waiting if number in self._calls}
        return {number: made.kept for number, made in own.items() if not made.used and self.unused(made.role)}


def warn_waiting(plan: PlanRecord, beyond: int) -> None:
    """Say that earlier calls, by another plan, held so many bytes more in a forward pass than the plan counts for them,
    where it leaves too little room.
    """
    most = max((m.held_bytes for m in plan.timeline if m.phase in ("forward", "loss")), default=0) + beyond
    if most > plan.budget_bytes:
        warn(
            f"an earlier call of the model still held what it saved for a backward pass, {gb(beyond)} more than this "
            f"plan counts: the forward pass took up to {gb(most)} of {gb(plan.budget_bytes)}. Where a step is left "
            "out, as one whose loss is not finite, or keeps its graph (retain_graph=True), let go of its loss before "
            "the next: loss = None"
        )


def warn_retained(plan: PlanRecord) -> None:
    """Say that the first step, which ran without a plan, has left its graph, where that and the second do not fit."""
    ends = next((m for m in reversed(plan.baseline_timeline) if m.phase == "forward"), None)
    left = 0 if ends is None else max(0, ends.held_bytes - plan.resident_bytes)
    most = max((m.held_bytes for m in plan.timeline if m.phase == "forward"), default=0) + left
    if most > plan.budget_bytes:
        warn(
            f"the first step ran without a plan, and its graph is still there (retain_graph=True): the forward pass of "
            f"the second one takes up to {gb(most)} of {gb(plan.budget_bytes)}. Let go of the loss and of the model's "
            "results before the next step"
        )


def warn_unseen(name: str) -> None:
    """Say that a model of such a class is called by a compiled function, in which nothing of the loop is seen."""
    warn(
        f"this {name} is called by a function that torch.compile was given: what that does beside the model, as its "
        f"loss, is not seen, and a step may take more than was planned. Compile the {name} alone, or have it return "
        "its loss"
    )


def warn_between(took: int, budget: int) -> None:
    """Say that a loop held so many bytes at once after its backward pass, of the budget of its plan."""
    warn(
        f"after its backward pass, and before it called the model again, the loop held {gb(took)} at once, of a budget "
        f"of {gb(budget)}: no plan is for what runs there (another model, which can have a plan, too; a method of this "
        "one; an evaluation; results that are put together). Give it smaller batches, or free what it does not need"
    )
