"""Plans for the kinds of calls that a loop makes in one step, before one backward pass: they are planned together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from planner.capture.trace.layers import has_whole_rnn, rnns_in_parts
from planner.capture.trace.step import TrainingGraph
from planner.compat.pytree import tree_leaves, tree_map_only
from planner.core.identity import TensorKind
from planner.errors import CaptureError, InfeasibleBudgetError, PlannerError
from planner.planning.pipeline import capture_step
from planner.planning.together import joined, may_go_together, plans_of_calls
from planner.requests.check import with_batch
from planner.requests.planned import Planned
from planner.requests.request import Request
from planner.runtime.signature import Signature
from planner.runtime.step_calls import PLAIN, GivenTensor
from planner.runtime.together import MOST

SIGNATURE = 4  # parts of a kind of call that its signature is


@dataclass
class _Captured:
    """A call that was captured.

    Attributes:
        way: what else than its signature its graphs depend on.
        kinds: of its tensors.
        batch: what it was given, with `GivenTensor` in the place of tensors; None where that does not stand for it.
        graph: its graphs.
    """

    way: Signature
    kinds: tuple[TensorKind, ...] | None
    batch: Any
    graph: TrainingGraph


def _stand_ins(batch: Any) -> Any:
    leaves = tree_leaves(batch)
    tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
    if not all(type(t) is torch.Tensor and t.layout is torch.strided and not t.requires_grad for t in tensors):
        return None
    if not all(isinstance(x, (torch.Tensor, *PLAIN)) for x in leaves):
        return None
    return tree_map_only(
        torch.Tensor, lambda t: GivenTensor(tuple(t.shape), t.stride(), t.dtype, t.device, t.requires_grad), batch
    )


def _captured_anew(call: _Captured, request: Request, way: Signature) -> bool:
    """Capture a call for what is known of the loop now; whether that can be done."""
    if call.batch is None:
        return False
    args, kwargs = tree_map_only(GivenTensor, GivenTensor.stand_in, call.batch)
    try:
        call.graph = capture_step(with_batch(request, request.model, args, kwargs, None))
    except PlannerError:
        return False
    call.way = way
    return True


class Several:
    """The kinds of calls that were captured lately, and the plans that were made for a step of several of them."""

    def __init__(self) -> None:
        self._captured: dict[Signature, _Captured] = {}
        self._plans: dict[Signature, Planned] = {}

    def keep(self, kind: Signature, planned: Planned) -> None:
        """A call was captured."""
        if planned.captured is None or planned.captured.maxima is not None:
            return
        request = planned.request
        batch = _stand_ins((request.args or (), request.kwargs))
        self._captured.pop(kind[:SIGNATURE], None)
        self._captured[kind[:SIGNATURE]] = _Captured(kind[SIGNATURE:], request.batch_kinds, batch, planned.captured)
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
        if not may_go_together(request, [call.graph for call in calls]):
            return None
        for each in calls:
            if each.way != kind[SIGNATURE:] and not _captured_anew(each, request, kind[SIGNATURE:]):
                return None
        graphs = [call.graph for call in calls]
        if not may_go_together(request, graphs):
            return None
        alone = replace(request, loop=replace(request.loop, in_flight=1))
        try:
            step = make(alone, joined(graphs))
        except CaptureError:
            return None
        except InfeasibleBudgetError:
            if not any(has_whole_rnn(region) for graph in graphs for region in graph.regions):
                raise
            with rnns_in_parts():
                if not all(_captured_anew(each, request, kind[SIGNATURE:]) for each in calls):
                    raise
            graphs = [call.graph for call in calls]
            step = make(alone, joined(graphs))
        asked = [replace(request, batch=None, kinds=call.kinds) for call in calls]
        plans = plans_of_calls(step, list(zip(asked, graphs, strict=True)))
        self._plans = {}
        for own, planned in zip(together, plans, strict=True):
            first = self._plans.get(own)
            self._plans[own] = replace(first, repeats=(*first.repeats, planned.record)) if first else planned
        return self.take(kind, request, together)
