"""What the GPU's caching allocator needs beside what a traced step asks of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count

from planner.devices.caching_allocator import FREE, Event, smallest_limit
from planner.eager.costs import OpCost
from planner.eager.trace import Trace
from planner.lowering.margin import CONTEXT, EXPANDABLE, expandable, fragments, resident_tensors
from planner.requests.request import Request


def margin_of(
    request: Request, lines: Mapping[str, int], trace: Trace, costs: Sequence[OpCost], sizes: Sequence[int], peak: int
) -> int:
    """Bytes for fragmentation, by simulating two steps; 0 where there is no caching allocator, or the request says it.

    Args:
        request: what is planned.
        lines: the account, without a margin.
        trace: what runs.
        costs: of its ops.
        sizes: bytes of each storage.
        peak: bytes that are asked for.
    """
    if not fragments(request, lines):
        return 0
    if expandable():
        return round(EXPANDABLE * peak)
    before, state, _ = resident_tensors(request, lines)
    return max(0, smallest_limit(_events(trace, costs, sizes, before, state)) + lines[CONTEXT] - peak)


def _events(
    trace: Trace, costs: Sequence[OpCost], sizes: Sequence[int], before: Sequence[int], state: Sequence[int]
) -> list[Event]:
    ends: list[list[int]] = [[] for _ in range(len(trace.ops) + 1)]
    for s, (born, died) in enumerate(zip(trace.born, trace.died, strict=True)):
        if born >= 0:
            ends[max(died, born + 1)].append(s)
    keys = count()
    events: list[Event] = [(n, next(keys)) for n in before]
    for n in range(2):
        key = {s: next(keys) for s, born in enumerate(trace.born) if born >= 0}
        for i, (op, cost) in enumerate(zip(trace.ops, costs, strict=True)):
            events += [(FREE, key[s]) for s in ends[i]]
            events += [(sizes[s], key[s]) for s in op.writes]
            if cost.workspace:
                work = next(keys)
                events += [(cost.workspace, work), (FREE, work)]
        if n == 0:
            events += [(size, next(keys)) for size in state]
        events += [(FREE, key[s]) for s in ends[len(trace.ops)]]
    return events
