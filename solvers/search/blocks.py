"""Checkpointing of whole blocks, as `torch.utils.checkpoint` does it: a schedule to compare plans with."""

from __future__ import annotations

from collections.abc import Sequence

from solvers.problem import Problem
from solvers.schedule import Schedule


def checkpointed(problem: Problem, blocks: Sequence[Sequence[int]]) -> Schedule:
    """The schedule of checkpointing each block of forward ops whole, as `torch.utils.checkpoint` does.

    The outputs of a block are kept. When the backward pass first needs another value of the block, all ops of the block
    that lead to such values run again at once. Outputs of ops that must not run twice are kept.

    Args:
        problem: what to schedule.
        blocks: disjoint, of forward ops.
    """
    boundary, readers = problem.boundary, problem.readers
    block_of = {i: b for b, ops in enumerate(blocks) for i in ops}
    dropped: dict[int, int] = {}  # values that are recomputed -> their block
    for i, b in block_of.items():
        leaves = any(r < boundary and block_of.get(r) != b for v in problem.ops[i].writes for r in readers[v])
        if problem.ops[i].recomputable and not leaves:
            dropped.update((v, b) for v in problem.ops[i].writes if v not in problem.lasting)
    again = [_again(problem, sorted(ops), dropped) for ops in blocks]
    steps = list(range(boundary))
    done: set[int] = set()
    for i in range(boundary, len(problem.ops)):
        for b in dict.fromkeys(dropped[v] for v in problem.ops[i].reads if v in dropped):
            if b not in done:
                done.add(b)
                steps += again[b]
        steps.append(i)
    return Schedule(tuple(steps))


def _again(problem: Problem, ops: Sequence[int], dropped: dict[int, int]) -> list[int]:
    """The ops of a block that lead to values which the backward pass reads."""
    wanted: set[int] = set()
    again = []
    for i in reversed(ops):
        op = problem.ops[i]
        mine = [v for v in op.writes if v in dropped]
        if any(v in wanted or any(r >= problem.boundary for r in problem.readers[v]) for v in mine):
            again.append(i)
            wanted.update(op.reads)
    return again[::-1]
