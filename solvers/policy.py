"""From keep and hold decisions to a schedule, by lazy recomputation.

Two sets of values say everything: a value in `keep` stays held from the forward pass to its last use in the
backward pass; any other one is recomputed, from the nearest held values, just before a backward op needs it. A
recomputed value in `hold` then stays for its later uses; one that is not is dropped after the op it was recomputed
for, and recomputed again for the next. Keep is a checkpoint, hold a checkpoint inside a recomputed segment, neither
is nested recomputation.
"""

from __future__ import annotations

from collections.abc import Collection

from .problem import Problem
from .schedule import Schedule


def droppable(problem: Problem) -> list[int]:
    """Forward values that a schedule may drop and make again, in order of production.

    Also those that no backward op reads: kept, they are where a recomputation can start.
    """
    return [
        v
        for op in problem.ops[: problem.boundary]
        for v in op.writes
        if v not in problem.lasting and problem.readers[v]
    ]


def realize(problem: Problem, keep: Collection[int], hold: Collection[int] | None = None) -> Schedule:
    """The schedule of a policy. O(ops run * reads) time.

    Args:
        problem: what to schedule.
        keep: forward values held from the forward pass on; `problem.lasting` ones are kept anyway.
        hold: recomputed values held for their later uses; None for all.

    Returns:
        Every op once in order; before each backward op, the forward ops that it needs again, in order.
    """
    ops, producer, boundary = problem.ops, problem.producer, problem.boundary
    held = bytearray(len(problem.sizes))
    for v in (*keep, *problem.lasting):
        held[v] = 1
    again = None if hold is None else set(hold)
    steps = list(range(boundary))
    # what the first backward op reads has not been dropped yet; it may be afterwards
    passing = [v for v in ops[boundary].reads if not held[v]] if boundary < len(ops) else []
    for v in passing:
        held[v] = 1
    for b in range(boundary, len(ops)):
        burst: set[int] = set()
        stack = [v for v in ops[b].reads if not held[v]]
        while stack:
            i = producer[stack.pop()]
            if i not in burst:
                burst.add(i)
                stack.extend(v for v in ops[i].reads if not held[v])
        for i in sorted(burst):
            steps.append(i)
            if again is None:
                for v in ops[i].writes:
                    held[v] = 1
            else:
                for v in ops[i].writes:
                    if v in again:
                        held[v] = 1
        steps.append(b)
        if b == boundary:
            for v in passing:
                held[v] = 0
    return Schedule(tuple(steps))
