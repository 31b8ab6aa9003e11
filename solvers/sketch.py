"""A rough trade-off curve in a second or two, and what simpler ways to place checkpoints cost on the same problem."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from solvers.anneal import Found, Search, ready
from solvers.auto import chained, segments
from solvers.bounds import relax
from solvers.guides import guides
from solvers.problem import Problem
from solvers.schedule import Schedule, every_op_once, simulate

EFFORT = 0.03  # of what `auto` gives to relaxations
GUIDES = 4  # of each budget


@dataclass(frozen=True, slots=True)
class Rough:
    """What a sketch found: pairs of bytes and cost.

    Attributes:
        points: peak and cost of schedules, by ascending peak and descending cost.
        bounds: budgets, ascending, and a proven lower bound on the cost of any schedule within each.
        segments: peak and cost of the leanest schedule of about sqrt(L) segments (`chen`), where there is one.
    """

    points: tuple[tuple[int, float], ...]
    bounds: tuple[tuple[int, float], ...]
    segments: tuple[int, float] | None


def sketch(problem: Problem, points: int = 6) -> Rough:
    """Peak against cost, from relaxations and segments alone: no annealing, so that costs may be above the best.

    Args:
        problem: what to schedule; its budget is not looked at.
        points: how many budgets to look at, between the lowest peak of segments and that of every op once.
    """
    ready()
    total = problem.total_cost
    search = Search(problem.with_budget(None), lambda _: None)
    cut = list(chained(segments(search)))
    found = [*cut, *chained(iter([search.keep_only()]))]
    low, high = min(f.peak for f in found), simulate(problem, every_op_once(problem)).peak
    bounds = [(high, total)]
    for i in range(points - 1, 0, -1):
        budgeted = problem.with_budget(low + (high - low) * i**2 // points**2)
        relaxed = relax(budgeted, EFFORT)
        bounds.append((budgeted.budget or 0, max(bounds[-1][1], total + relaxed.bound)))
        found += chained(search.keep_only(keep) for keep in islice(guides(budgeted, relaxed, EFFORT), GUIDES))
    leanest = min(cut, key=lambda f: (f.peak, f.extra), default=None)
    return Rough(
        tuple((f.peak, total + f.extra) for f in _front(found)),
        tuple(reversed(bounds)),
        None if leanest is None else (leanest.peak, total + leanest.extra),
    )


def _front(found: Sequence[Found]) -> list[Found]:
    """Those that none is better than, by ascending peak."""
    front: list[Found] = []
    for f in sorted(found, key=lambda f: (f.peak, f.extra)):
        if not front or f.extra < front[-1].extra:
            front.append(f)
    return front


def checkpointed(problem: Problem, blocks: Sequence[Sequence[int]]) -> Schedule:
    """The schedule of checkpointing each block of forward ops whole, as `torch.utils.checkpoint` does.

    What leaves a block is kept; when the backward pass first needs anything else in it, all of the block that leads to
    what the backward pass needs runs again at once. Ops that must not run twice keep what they make.

    Args:
        problem: what to schedule.
        blocks: disjoint, of forward ops.
    """
    boundary, readers = problem.boundary, problem.readers
    block_of = {i: b for b, ops in enumerate(blocks) for i in ops}
    dropped: dict[int, int] = {}  # values that are made again -> their block
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
    """Ops of a block that lead to what the backward pass reads of it."""
    wanted: set[int] = set()
    found = []
    for i in reversed(ops):
        op = problem.ops[i]
        mine = [v for v in op.writes if v in dropped]
        if any(v in wanted or any(r >= problem.boundary for r in problem.readers[v]) for v in mine):
            found.append(i)
            wanted.update(op.reads)
    return found[::-1]
