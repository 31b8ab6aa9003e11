"""Adopts a schedule that is known already, of the same step or of other sizes, where it fits: nothing is solved."""

from __future__ import annotations

from collections.abc import Iterable

from solvers import Problem, Schedule, Solution, cost_bound, every_op_once, simulate, validate

NOTE = "The schedule is that of another size, which fits this one."


def adopt_schedule(problem: Problem, known: Iterable[tuple[Problem, Schedule]]) -> Solution | None:
    """The cheapest of the known schedules that holds the problem's budget; None where none does. O(steps) for each.

    Recomputing nothing is tried first, where any are known. A schedule is taken only from a problem of equal structure,
    and is replayed on this one.

    Args:
        problem: the step to schedule.
        known: problems, each with a schedule of it.
    """
    schedules = [s for other, s in known if same_structure(problem, other) and _may_move(problem, s)]
    found: Solution | None = None
    for schedule in dict.fromkeys([every_op_once(problem), *schedules] if schedules else []):
        timeline = validate(problem.with_budget(None), schedule)
        if problem.budget is not None and timeline.peak > problem.budget:
            continue
        if found is None or timeline.cost < found.timeline.cost:
            bound = min(timeline.cost, cost_bound(problem))
            found = Solution(schedule, timeline, "reused", 0.0, bound, NOTE)
    return found


def adopt_known(problem: Problem, known: Problem, schedule: Schedule, bound: float) -> Solution | str:
    """A known schedule as that of a problem that is the same but for the costs of its ops; else what differs, in words.

    Args:
        problem: the step to schedule.
        known: the problem that was scheduled; its resident bytes may differ, as the margin for fragmentation does.
        schedule: of `known`.
        bound: proven for `known`.
    """
    if not same_structure(problem, known):
        return "its graphs differ"
    if problem.sizes != known.sizes or any(
        a.workspace != b.workspace for a, b in zip(problem.ops, known.ops, strict=True)
    ):
        return "its sizes differ"
    if problem.waiting != known.waiting:
        return "its microbatches in flight differ"
    if problem.budget != known.budget:
        return "its budget differs"
    if not _may_move(problem, schedule):
        return "it offloads what has to stay here"
    timeline = validate(problem.with_budget(None), schedule)
    if problem.budget is not None and timeline.peak > problem.budget:
        return "fixed memory (parameters, batch, optimizer state and the like) leaves less room"
    proven = bound if problem.ops == known.ops else cost_bound(problem)
    return Solution(schedule, timeline, "known", 0.0, min(timeline.cost, proven))


def _may_move(problem: Problem, schedule: Schedule) -> bool:
    """Whether what a schedule moves may move, and there is room for it."""
    if not schedule.moves:
        return True
    if problem.link is None or not problem.movable.issuperset(move.value for move in schedule.moves):
        return False
    host = problem.link.host
    return host is None or simulate(problem, schedule).host_peak <= host


def same_structure(one: Problem, other: Problem) -> bool:
    """Whether two problems differ in nothing but sizes, costs and the budget."""
    if (one.boundary, one.pinned, len(one.ops)) != (other.boundary, other.pinned, len(other.ops)):
        return False
    if _numbers(one) != _numbers(other):
        return False
    return all(
        (a.reads, a.writes, a.recomputable, a.region) == (b.reads, b.writes, b.recomputable, b.region)
        for a, b in zip(one.ops, other.ops, strict=True)
    )


def _numbers(problem: Problem) -> list[int]:
    """The numbers of other microbatches that are in flight."""
    waiting = problem.waiting
    if waiting is None:
        return []
    return [*(number for number, _ in (*waiting.forward, *waiting.backward)), int(waiting.again is not None)]
