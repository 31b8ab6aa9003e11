"""What the loop holds at once between two steps, as the last op of a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from planner.core.step import Row, Step
from planner.lowering.build import OPTIMIZER, own_row
from planner.lowering.margin import CONTEXT, MARGIN
from solvers import Problem

BETWEEN = "what the loop does between its steps"
_NO_TENSORS = (CONTEXT, MARGIN, "cuBLAS workspace", "NCCL buffers")  # lines of the account


def add_between(step: Step, nbytes: int) -> Step:
    """The step with an op at its end at which all tensors take so many bytes. O(ops).

    It is what a loop does with parameters and gradients by itself, such as an optimizer that is written by hand, or an
    evaluation: no plan makes it smaller, so that it bounds the budget from below.
    """
    op, origin = row_at(step.problem, nbytes + other_bytes(step.account))
    if not op.workspace:
        return step
    return replace(step, problem=replace(step.problem, ops=(*step.problem.ops, op)), origins=(*step.origins, origin))


def row_at(problem: Problem, nbytes: int) -> Row:
    """The op at the end of a step while which so many bytes are allocated, or more where the step leaves more."""
    left = problem.resident + sum(problem.sizes[v] for v in problem.pinned)
    return own_row(OPTIMIZER, BETWEEN, "optimizer", workspace=max(0, nbytes - left))


def other_bytes(lines: Mapping[str, int]) -> int:
    """The bytes of an account's lines that are no tensors of the loop."""
    return sum(lines.get(name, 0) for name in _NO_TENSORS)
