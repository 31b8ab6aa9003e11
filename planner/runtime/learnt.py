"""What was learnt of a training loop: for each role that calls of the model are in, what the loop does around them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import cast

from planner.core.loop import Gradients, Loop, most_beside, most_of
from planner.runtime.signature import Role


class Learnt:
    """The loops around the calls of one model, by role.

    Args:
        base: what is known before the first call.

    Attributes:
        role: of the latest call.
        fresh: whether that was the first in its role, and others came before in other roles.
        heard: whether a recording has ended.
        settled: the roles of whose calls nothing more is to be learnt but what each tells by itself.
    """

    def __init__(self, base: Loop) -> None:
        self._base = base
        self._loops: dict[Role, Loop] = {}
        self.role = cast(Role, ())
        self.fresh = self.heard = False
        self.settled: set[Role] = set()

    @property
    def loop(self) -> Loop:
        """The loop around calls in the role of the latest one."""
        return self._loops.get(self.role, self._base)

    @loop.setter
    def loop(self, loop: Loop) -> None:
        self._loops[self.role] = loop

    def begin(self, role: Role, waiting: Sequence[Role | None]) -> None:
        """A call begins while others, in these roles, wait for their backward pass."""
        known, before = role in self._loops, self.loop
        self.fresh = bool(self._loops) and not known
        self.role = role
        if not known:
            self._loops[role] = replace(before, in_flight=1, unused=False) if self.fresh else before
        for each in self._loops.keys() & {role, *waiting}:
            loop = self._loops[each]
            if loop.in_flight <= len(waiting):
                self._loops[each] = replace(loop, in_flight=len(waiting) + 1)

    def gradients_there(self, gradients: Gradients, nbytes: int | None) -> None:
        """Gradients are there when a call begins: so many bytes, or those of all parameters.

        Where others are cleared before a call, and these were not as the first call in another role came, nothing
        clears them before such calls.
        """
        before = self.loop
        added = self.fresh and before.gradients == "cleared"
        # where others come later, as of heads that take turns, each step may leave those of any
        if before.gradients == "cleared late" and (before.late is None or nbytes is None or nbytes > before.late):
            nbytes = None
        elif before.gradients == "cleared late":
            nbytes = before.late
        self.loop = replace(before, gradients="accumulated" if added else gradients, late=nbytes)

    def finds(self, beside: Loop) -> None:
        """Whatever role a call is in, the loop holds that much beside it."""
        self._loops = {role: most_beside(loop, beside) for role, loop in self._loops.items()}

    def enter(
        self, shown: Loop, roles: Collection[Role], batches: int, *, settles: bool, compiled: bool = True
    ) -> None:
        """Enter what a recording of calls in these roles has shown.

        Args:
            shown: by the recording.
            roles: of its calls.
            batches: of the bytes beside the step, those of the calls' own batches.
            settles: whether it has shown all of a step.
            compiled: whether the latest of the calls was; else gradients also came to outputs that others are computed
                from, whoever uses them.
        """
        if not compiled:
            before = self.loop
            shown = replace(
                shown,
                only_loss=before.only_loss,
                unreached=before.unreached,
                by_turns=before.by_turns,
                laid_out=before.laid_out,
            )
        # the next call in that role has another batch in its place
        own = replace(shown, beside=shown.beside - (0 if self.role in roles else batches))
        for role in roles:
            before = self._loops[role]
            loop = _with(before, own)
            loop = most_of(before, loop) if role in self.settled else loop
            self._loops[role] = most_beside(loop, before) if self.heard else loop
        # what stays from one call to the next stays whatever role the next is in
        others = self._loops.keys() - roles if self.heard else {self.role}.difference(roles)
        self._loops |= {role: most_beside(self._loops[role], shown) for role in others}
        self.heard = True
        if settles:
            self.settled.update(roles)


def _with(loop: Loop, shown: Loop) -> Loop:
    """The loop with what a recording has shown."""
    kept = shown if shown.graph_retained else loop
    return replace(
        loop,
        outputs_held=shown.outputs_held,
        at_once=shown.at_once,
        later_held=shown.later_held,
        only_loss=shown.only_loss,
        unreached=shown.unreached,
        by_turns=shown.by_turns,
        laid_out=shown.laid_out,
        loss=shown.loss,
        beside=shown.beside,
        around=shown.around,
        graph_retained=loop.graph_retained or shown.graph_retained,
        kept_beside=kept.kept_beside,
        freed_beside=kept.freed_beside,
        asks_first=kept.asks_first,
        stateless=shown.stateless,
        sparse=shown.sparse,
        without=shown.without,
        attributes=shown.attributes,
    )
