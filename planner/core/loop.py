"""What a training loop was seen to do around the planned graphs: a record that a plan is made anew for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Loop:
    """What a training loop was seen to do around the planned graphs, in its first step; the defaults: nothing was seen.

    Attributes:
        graph_retained: whether a backward pass ran with `retain_graph=True`, so that saved tensors stay to the end of
            the step.
    """

    graph_retained: bool = False
