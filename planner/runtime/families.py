"""Calls of many shapes: which plan, made for the largest sizes, serves which call."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from planner.capture.shapes import densely, marked
from planner.capture.trace.layers import helpers
from planner.capture.trace.state_guard import Undoing
from planner.compat.tensors import version_of
from planner.core.maxima import Maxima, sizes_in
from planner.core.plan import PlanRecord
from planner.core.recipe import Recipe
from planner.errors import ApplyError, InfeasibleBudgetError, warn

TRIES = 3  # shapes that turn out to have graphs of their own, before no more is expected of a kind of calls


class GraphChanged(ApplyError):
    """A graph that no plan knows: of other sizes, or of a model that changed without its signature telling."""

    def __init__(self) -> None:
        super().__init__(
            "a part of the model's graph differs from the one that was planned, and other parts have run already: "
            "something that it depends on was changed (a module, a hook, a dropout rate). The next call plans anew"
        )


def recipe_of(plan: PlanRecord) -> Recipe:
    """The schedules of a compiled plan."""
    assert isinstance(plan.recipe, Recipe)
    return plan.recipe


@dataclass
class Family:
    """One compiled call for every shape up to its maxima.

    Attributes:
        plan: made for the maxima.
        compiled: the model's call; it is traced anew where guards of torch.compile say so.
        graphs: how many there are in a call.
        came: the signatures of calls that it has served.
    """

    maxima: Maxima
    plan: PlanRecord
    compiled: Callable[..., Any]
    graphs: int
    came: set[tuple[object, ...]] = field(default_factory=set)
    undoing: Undoing = field(default_factory=Undoing)

    def run(self, model: nn.Module, signature: tuple[object, ...], args: Any, kwargs: Any) -> Any:
        """The model's output. Raises GraphChanged, with the model's state as it was, where its graph is another."""
        (args, kwargs), copies = densely(args, kwargs, self.maxima)
        versions = [version_of(copy) for _, copy in copies]
        # a graph that differs may come after others have run
        careful = self.graphs > 1 and (signature not in self.came or recipe_of(self.plan).asks)
        kept = model, recipe_of(self.plan).written, (args, kwargs)
        undone = self.undoing.on(GraphChanged, *kept) if careful else nullcontext()
        with marked(args, kwargs, self.maxima), undone, helpers():
            result = self.compiled(*args, **kwargs)
        self.came.add(signature)
        for (t, dense), version in zip(copies, versions, strict=True):
            if version_of(dense) != version:
                t.copy_(dense)
        return result


class Shapes:
    """The families of a model's calls.

    Args:
        free: whether any size may be smaller; else `limits` says which.
        limits: the largest sizes, as far as they are known.

    Attributes:
        apart: kinds of calls of which each shape is planned for itself.
    """

    def __init__(self, free: bool, limits: Maxima) -> None:
        self.free = None if free else {path: frozenset(at) for path, at in limits.sizes.items()}
        self.limits: dict[tuple[str, int], int] = {}
        self.families: dict[tuple[object, ...], list[Family]] = {}
        self.apart: set[tuple[object, ...]] = set()
        self.differed: dict[tuple[object, ...], int] = {}
        self.warned = False
        self.limit(limits)

    def without_families(self) -> Shapes:
        """The same, with no plans yet."""
        new = copy.copy(self)
        new.families, new.limits = {}, dict(self.limits)
        new.apart, new.differed = set(self.apart), dict(self.differed)
        return new

    def note(self, kind: tuple[object, ...], sizes: Maxima, *, together: bool = False) -> None:
        """A call came whose shape is new, with all of its sizes; `kind` is equal for calls that differ in these.

        `together`: calls of other shapes wait for their backward pass, in the first step that there is.
        """

    def shrunk(self, kind: tuple[object, ...], sizes: Maxima) -> bool:
        """Whether a call is a smaller one of some that came, and may run without being compiled."""
        return False

    def sizes(self, args: Any, kwargs: Any) -> Maxima:
        """The sizes of a call that may change; those of one element (or none) make other graphs, and stay."""
        return sizes_in(args, kwargs, self.free)

    def wanted(self, kind: tuple[object, ...], own: Maxima) -> list[Maxima]:
        """The sizes to plan for, that a call of such sizes may be served, to be tried one after the other.

        The largest, or its own if one is above.
        """
        limits = Maxima(
            {path: {d: self.limits.get((path, d), n) for d, n in at.items()} for path, at in own.sizes.items()}
        )
        if limits.cover(own):
            return [limits]
        if not self.warned:
            self.warned = True
            warn(
                f"a batch is larger than what was planned for ({_in_words(own, limits)}): it is planned for itself. "
                "Give plan() the largest batch, or the largest sizes by dynamic={...}, to have one plan for all"
            )
        return [own]

    def refused(self, kind: tuple[object, ...], maxima: Maxima, why: Exception, *, last: bool) -> None:
        """Note that no plan for such sizes can be made; `last`: of those that were wanted, so that each shape is
        planned apart. Raises what says enough.
        """
        if isinstance(why, InfeasibleBudgetError):
            raise why
        if not self.warned:
            self.warned = True
            warn(
                "a batch with the largest sizes does not go together with what else this call is given: "
                "it is planned for itself. dynamic={...} has to name every tensor that shares a size"
            )
        self.apart.add(kind)

    def planned(self, maxima: Maxima) -> None:
        """A plan was made for such sizes, that calls may be served together."""

    def differs(self, kind: tuple[object, ...]) -> None:
        """Note that a call had another graph than that of the largest: after `TRIES`, such calls are planned apart."""
        self.differed[kind] = self.differed.get(kind, 0) + 1
        if self.differed[kind] >= TRIES:
            self.apart.add(kind)

    def find(self, kind: tuple[object, ...], maxima: Maxima) -> Family | None:
        """The first family of a kind of call that holds for such sizes."""
        return next((f for f in self.families.get(kind, ()) if f.maxima.cover(maxima)), None)

    def add(self, kind: tuple[object, ...], family: Family) -> None:
        self.families.setdefault(kind, []).append(family)
        self.limit(family.maxima)

    def limit(self, maxima: Maxima) -> None:
        """Take sizes for the largest, where none are known yet."""
        for path, at in maxima.sizes.items():
            for d, n in at.items():
                self.limits.setdefault((path, d), n)


def _in_words(own: Maxima, limits: Maxima) -> str:
    over = [
        f"dimension {d} of batch{path[3:]} is {n}, planned for {limits.of(path)[d]}"
        for path, at in own.sizes.items()
        for d, n in at.items()
        if n > limits.of(path)[d]
    ]
    return "; ".join(over)
