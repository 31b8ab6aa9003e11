"""What a schedule holds, from the definition and quadratic: forward, looking ahead for each value at each step."""

from __future__ import annotations

from solvers.problem import Problem


def replay(problem: Problem, steps: tuple[int, ...]) -> tuple[list[int], list[set[int]], float]:
    """For each step the bytes held while it runs and the values freed when it ends; and the cost of all.

    Raises:
        LookupError: a step reads what is not held.
    """
    during: list[int] = []
    freed: list[set[int]] = []
    held: set[int] = set()
    for at, i in enumerate(steps):
        op = problem.ops[i]
        if not held.issuperset(op.reads):
            raise LookupError(f"step {at}")
        copies = [*held, *op.writes]  # a value that is made while it is held counts twice
        during.append(problem.resident + op.workspace + sum(problem.sizes[v] for v in copies))
        held.update(op.writes)
        freed.append({v for v in held if v not in problem.pinned and not _read_again(problem, steps[at + 1 :], v)})
        held -= freed[-1]
    return during, freed, sum(problem.ops[i].cost for i in steps)


def _read_again(problem: Problem, steps: tuple[int, ...], v: int) -> bool:
    """Whether a value is read before it is written again."""
    for i in steps:
        if v in problem.ops[i].reads:
            return True
        if v in problem.ops[i].writes:
            return False
    return False
