"""Numbers, flags and names that modules keep as attributes: code that no guard of torch.compile's watches goes by them.

A model that runs as it is, or by checkpointed modules, takes another way where a rate of dropout or a flag changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any

from torch import nn

from planner.core.plan import PlanRecord
from planner.core.recipe import Choice
from planner.runtime.signature import Signature

_KINDS = {int, float, bool, str}
_MODE = "training"  # which is part of a signature
_MOST = 16  # plans for one kind of call


class _Kind:
    """What is known of one kind of call.

    Attributes:
        of: for each module that has some, its position and the names of its attributes.
        plans: for the values that they had.
        newest: of these plans.
        values: for which that was made.
        asked: whether a plan was asked for since.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        names = (
            (at, [n for n, x in vars(m).items() if type(x) in _KINDS and n != _MODE]) for at, m in enumerate(modules)
        )
        self.of = {at: each for at, each in names if each}
        self.plans: dict[tuple[Any, ...], PlanRecord] = {}
        self.newest: PlanRecord | None = None
        self.values: tuple[Any, ...] = ()
        self.asked = False

    def now(self, modules: Sequence[nn.Module]) -> tuple[Any, ...]:
        """The values of the attributes; those of one module come together."""
        return tuple(itemgetter(*names)(vars(modules[at])) for at, names in self.of.items())

    def leave_out(self, values: tuple[Any, ...]) -> None:
        """Leave out the attributes that are not as in `self.values`."""
        for (at, names), was, is_now in zip(list(self.of.items()), self.values, values, strict=True):
            pairs = [(was, is_now)] if len(names) == 1 else zip(was, is_now, strict=True)
            self.of[at] = [name for name, (a, b) in zip(names, pairs, strict=True) if a == b]
        self.of = {at: names for at, names in self.of.items() if names}
        self.plans.clear()


class Attributes:
    """The plans of a model that were made for its attributes as they were."""

    def __init__(self) -> None:
        self._kinds: dict[Signature, _Kind] = {}

    def suit(self, plans: dict[Signature, PlanRecord], signature: Signature, modules: Sequence[nn.Module]) -> bool:
        """Whether the plan for a kind of call is for the attributes as they are; where it is not, it is forgotten.

        One that was made for them before takes its place. Attributes whose change has changed no peak, as that of a
        counter, do not count any more. O(attributes).

        Args:
            plans: by kinds of calls; a new one was made for the attributes as they are.
            signature: of the call.
            modules: all of the model's.
        """
        plan = plans[signature]
        if not isinstance(plan.recipe, Choice):  # torch.compile guards what was compiled
            return True
        found = self._plan(signature, modules, plan)
        if found is None:
            del plans[signature]
        else:
            plans[signature] = found
        return found is not None

    def _plan(self, signature: Signature, modules: Sequence[nn.Module], plan: PlanRecord) -> PlanRecord | None:
        kind = self._kinds.get(signature)
        try:
            values = () if kind is None else kind.now(modules)
        except (IndexError, KeyError):  # another module or attribute
            kind = None
        if kind is None:
            kind = self._kinds[signature] = _Kind(modules)
            values = kind.now(modules)
        if plan is not kind.newest:
            if not kind.asked or len(kind.plans) == _MOST:
                kind.plans.clear()
            elif kind.newest is not None and plan.peak_bytes == kind.newest.peak_bytes:
                kind.leave_out(values)
                values = kind.now(modules)
            kind.plans[values] = plan
        found = kind.plans.get(values)
        kind.asked = found is None
        if found is not None:
            kind.newest, kind.values = found, values
        return found
