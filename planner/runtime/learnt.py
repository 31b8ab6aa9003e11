"""What was learnt of a training loop: for each role that calls of the model are in, what the loop does around them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import cast

from planner.core.loop import Gradients, Loop, most_beside, most_of
from planner.runtime.signature import Role

AWHILE = 3  # calls in a row that begin alone, after others waited in vain, before no others are expected any more
RARE = 100  # calls between two such changes of plans


@dataclass(slots=True)
class _Waited:
    """The calls that waited when more of them did than before, by number.

    Attributes:
        before: for each role, the loop until then.
        alone: how many calls have begun since then while none waited.
        warn: what warns of what they held, if no backward pass comes of them.
    """

    numbers: frozenset[int]
    before: dict[Role, Loop]
    alone: int = 0
    warn: Callable[[], None] | None = None


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
        self._compiled: Counter[Role] = Counter()  # recordings of calls that were
        self._waited: _Waited | None = None
        self._begun, self._lowered = 0, -RARE  # calls; how many there were when fewer were last expected to wait

    @property
    def loop(self) -> Loop:
        """The loop around calls in the role of the latest one."""
        return self._loops.get(self.role, self._base)

    @loop.setter
    def loop(self, loop: Loop) -> None:
        self._loops[self.role] = loop

    def begin(self, role: Role, waiting: Mapping[int, Role | None]) -> bool:
        """A call begins while others, by number and in these roles, wait for their backward pass; whether more do than
        ever before.
        """
        self._begun += 1
        known, before = role in self._loops, self.loop
        self.fresh = bool(self._loops) and not known
        self.role = role
        if not known:
            self._loops[role] = replace(before, in_flight=1, unused=False) if self.fresh else before
        ours = {each: self._loops[each] for each in self._loops.keys() & {role, *waiting.values()}}
        fewer = {each: loop for each, loop in ours.items() if loop.in_flight <= len(waiting)}
        self._loops |= {each: replace(loop, in_flight=len(waiting) + 1) for each, loop in fewer.items()}
        if fewer:
            if (waited := self._waited) is not None and waited.numbers <= waiting.keys():
                fewer |= waited.before
            self._waited = _Waited(frozenset(waiting), fewer)
        return bool(fewer)

    def waiting_takes_more(self, warn: Callable[[], None]) -> None:
        """Warn that calls which wait take more than a plan counts: in the first step, where that is no fault of a plan,
        once they are over without a backward pass, as those of a step that was left out.
        """
        if self.role in self.settled:
            warn()
        elif self._waited is not None:
            self._waited.warn = warn

    def begins_alone(self, unused: Callable[[Collection[int]], bool | None]) -> None:
        """A call has begun while none waits: where those that did were of steps that the loop has left out (a loss that
        is not finite), calls are not expected to wait for such any more after a while.

        Args:
            unused: whether calls, by number, are over without a backward pass; None where they are not over.
        """
        if (waited := self._waited) is None or (in_vain := unused(waited.numbers)) is None:
            return
        waited.alone += 1
        if in_vain and waited.warn is not None:
            waited.warn()
            waited.warn = None
        if in_vain and (waited.alone < AWHILE or self._begun - self._lowered < RARE):
            return
        if in_vain:
            self._lowered = self._begun
            for each, loop in waited.before.items():  # with several losses, one's backward pass was seen to take more
                loss = self._loops[each].loss if loop.loss is None else loop.loss
                self._loops[each] = replace(self._loops[each], in_flight=loop.in_flight, loss=loss)
        self._waited = None

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
                beside_loss=before.beside_loss,
                unreached=before.unreached,
                by_turns=before.by_turns,
                laid_out=before.laid_out,
            )
            if self._compiled[self.role] > 1:  # as others still are; autograd's graph holds other outputs than theirs
                held = before.outputs_held, before.at_once, before.without
                shown = replace(shown, outputs_held=held[0], at_once=held[1], without=held[2])
        else:
            self._compiled.update(roles)
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
        outputs_late=shown.outputs_late,
        at_once=shown.at_once,
        later_held=shown.later_held,
        only_loss=shown.only_loss,
        beside_loss=shown.beside_loss,
        unreached=shown.unreached,
        aside=shown.aside,
        by_turns=shown.by_turns,
        laid_out=shown.laid_out,
        loss=shown.loss,
        beside=shown.beside,
        around=shown.around,
        between_steps=shown.between_steps,
        graph_retained=loop.graph_retained or shown.graph_retained,
        kept_beside=kept.kept_beside,
        freed_beside=kept.freed_beside,
        asks_first=loop.asks_first or shown.asks_first,
        stateless=shown.stateless,
        sparse=shown.sparse,
        without=shown.without,
        attributes=shown.attributes,
    )
