"""What a planned model runs: schedules of compiled regions, or checkpointed modules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from planner.core.loop import LaidOut
from planner.core.maxima import Maxima
from planner.core.pieces import Split
from solvers import Move

Settings = tuple[tuple[str, bool | int | float | str], ...]  # of Inductor, by name


@dataclass(frozen=True, slots=True)
class PlannedRegion:
    """The schedule of a region: indices of its ops, for a region of this fingerprint.

    Attributes:
        fingerprint: of the region.
        forward, backward: the ops that each pass runs, in order.
        realised: in mode="inductor", the ops of the region that these are the fused ones of; None: they run op by op.
        moves: of values of the region to the host and back; `at` counts the steps of both passes.
        splits: sets of the region's ops that run in pieces; these steps are of the region with them as single ops.
        own: whether Inductor partitions the graph itself, as without a plan; the schedule is then every op once.
        draws: whether the region draws random numbers.
        settings: what Inductor is set to while it compiles the region, beside its defaults.
        near: in mode="inductor", how many steps apart is what may be fused, at most.
        rnns_in_parts: whether it is traced with recurrent layers in parts of their sequences.
        made_again: results of its forward pass, by value, that an op of several results makes again in the backward
            pass, when nothing else holds them any more.
    """

    fingerprint: str
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    realised: tuple[int, ...] | None = None
    moves: tuple[Move, ...] = ()
    splits: tuple[Split, ...] = ()
    own: bool = False
    draws: bool = False
    settings: Settings = ()
    near: int = 0
    rnns_in_parts: bool = False
    made_again: tuple[int, ...] = ()


@dataclass(frozen=True)
class Recipe:
    """How to run one kind of call of the model by compiled graphs.

    Attributes:
        calls: for each Dynamo graph, by key, the schedule of each of its calls in a step; None for one without a
            gradient.
        detached: for each Dynamo graph, by key, the outputs that get no gradient.
        laid_out: the same of those whose gradient comes in another layout, as in `Loop`.
        maxima: where sizes are symbols in the graphs, the largest for which the plan holds.
        asks: lines of Python that ask for values of tensors, so that another step may have other graphs.
        apart: paths of the modules that torch.compile leaves alone, with all that they call.
        inner: paths of the parts of these that are compiled for themselves.
        written: names of the parameters that the forward pass writes into.
    """

    calls: Mapping[str, tuple[PlannedRegion | None, ...]] = field(repr=False)
    detached: Mapping[str, tuple[int, ...]] = field(repr=False)
    laid_out: Mapping[str, LaidOut] = field(default_factory=dict, repr=False)
    maxima: Maxima | None = field(default=None, repr=False)
    asks: tuple[str, ...] = ()
    apart: tuple[str, ...] = ()
    inner: tuple[str, ...] = ()
    written: tuple[str, ...] = ()

    @property
    def fused(self) -> Sequence[PlannedRegion]:
        """The regions that Inductor compiles, in the order of the calls."""
        return [r for calls in self.calls.values() for r in calls if r is not None and r.realised is not None]


Kept = Mapping[int, str]  # op of a module's call, by its number among those that return no view -> its target


@dataclass(frozen=True)
class Choice:
    """How to run a model without torch.compile: by checkpointed modules.

    Attributes:
        kept: path of each module that is checkpointed -> the ops whose results are kept.
        elements: of the tensors that the calls of these modules are given in one call of the model, where sizes depend
            on values; 0 where they do not.
        fused: as of a `Recipe`: none.
    """

    kept: Mapping[str, Kept] = field(default_factory=dict)
    elements: int = 0
    fused: ClassVar[Sequence[PlannedRegion]] = ()
