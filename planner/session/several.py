"""Plans for the kinds of calls that a loop makes in one step, before one backward pass: they are planned together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from planner.capture.trace.step import TrainingGraph
from planner.planning.together import joined, may_go_together, plans_of_calls
from planner.requests.planned import Planned
from planner.requests.request import Request
from planner.runtime.signature import Signature
from planner.runtime.together import MOST

SIGNATURE = 4  # parts of a kind of call that its signature is


class Several:
    """The kinds of calls that were captured lately, and the plans that were made for a step of several of them."""

    def __init__(self) -> None:
        self._captured: dict[Signature, tuple[Signature, Request, TrainingGraph]] = {}
        self._plans: dict[Signature, Planned] = {}

    def keep(self, kind: Signature, planned: Planned) -> None:
        """A call was captured."""
        if planned.captured is None or planned.captured.maxima is not None:
            return
        self._captured.pop(kind[:SIGNATURE], None)
        self._captured[kind[:SIGNATURE]] = kind, planned.without_batch().request, planned.captured
        while len(self._captured) > MOST:
            del self._captured[next(iter(self._captured))]

    def forget(self) -> None:
        """Plans are made anew."""
        self._plans.clear()

    def take(self, kind: Signature, request: Request, together: Sequence[Signature]) -> Planned | None:
        """The plan for a call that was made with those of the others; None where there is none."""
        planned = self._plans.pop(kind[:SIGNATURE], None)
        if planned is None or kind[:SIGNATURE] not in together or planned.request.budget_gb != request.budget_gb:
            return None
        return replace(planned, request=request)

    def plan(
        self,
        kind: Signature,
        request: Request,
        together: Sequence[Signature],
        make: Callable[[Request, TrainingGraph], Planned],
    ) -> Planned | None:
        """A plan for a call, made together with those of the others; None where each is planned by itself.

        Args:
            kind: of the call.
            request: for it.
            together: the signatures of all calls of a step.
            make: the plan for a captured step.
        """
        calls = [self._captured[each] for each in together if each in self._captured]
        if len(calls) < len(together) or kind[:SIGNATURE] not in together:
            return None
        graphs = [graph for _, _, graph in calls]
        alike = all(other[SIGNATURE:] == kind[SIGNATURE:] for other, _, _ in calls)
        if not alike or not may_go_together(request, graphs):
            return None
        step = make(replace(request, loop=replace(request.loop, in_flight=1)), joined(graphs))
        asked = [replace(request, batch=None, kinds=own.batch_kinds) for _, own, _ in calls]
        plans = plans_of_calls(step, list(zip(asked, graphs, strict=True)))
        self._plans = dict(zip(together, plans, strict=True))
        return self.take(kind, request, together)
