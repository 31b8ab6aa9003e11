"""The emitted graphs of a plan, written when they are asked for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

from planner.capture.regions.region import Region
from planner.codegen.emit import emit
from planner.core.plan import GraphModules


class EmittedGraphs(Sequence[GraphModules]):
    """One pair of graphs per region of the plan, emitted at the first access and held from then on."""

    def __init__(self, planned: Iterable[tuple[Region, Sequence[int], Sequence[int]]]) -> None:
        """Each region with the ops that its forward and its backward pass run, as for `emit()`."""
        self._planned = tuple(planned)

    @cached_property
    def _graphs(self) -> tuple[GraphModules, ...]:
        return tuple(GraphModules(*emit(*planned)) for planned in self._planned)

    def __len__(self) -> int:
        return len(self._planned)

    def __getitem__(self, at: Any) -> Any:
        return self._graphs[at]
