"""What a schedule holds, from the definition and quadratic: forward, looking ahead for each value at each step."""

from __future__ import annotations

from solvers.moves import Move
from solvers.problem import Problem
from solvers.schedule import Schedule


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
        freed.append({v for v in held if v not in problem.pinned and not _read_again(problem, steps, at, v)})
        held -= freed[-1]
    return during, freed, sum(problem.ops[i].cost for i in steps)


def _read_again(problem: Problem, steps: tuple[int, ...], at: int, v: int) -> bool:
    """Whether a value is read after a step and before it is written again, while other regions have not yet read it."""
    for n, i in enumerate(steps[at + 1 :], at + 1):
        if v in problem.ops[i].reads:
            return True
        if v in problem.ops[i].writes and not to_others(problem, v, max(steps[: n + 1]) + 1):
            return False
    return False


def to_others(problem: Problem, v: int, first: int) -> bool:
    """Whether other regions that read a value have ops that have not run, the next of which is `first`."""
    own = problem.ops[problem.producer[v]].region
    others = {op.region for op in problem.ops if v in op.reads} - {own}
    return any(op.region in others for op in problem.ops[first:])


def replay_moves(problem: Problem, schedule: Schedule) -> tuple[list[int], float, int]:
    """For each step the bytes held while it runs (or just before it), the time of the schedule, the host's peak.

    Discrete events: the clock goes to whatever ends next, a copy or the op, and copies that run at once share the link
    for as long as they do.
    """
    link = problem.link
    assert link is not None
    todo: list[Move | int] = []
    for at, i in enumerate(schedule.steps):
        todo += [m for m in schedule.moves if m.at == at]
        todo.append(i)
    held: dict[int, int] = {}  # copies of each value on the device
    host: set[int] = set()
    queues: dict[str, list[list[float]]] = {"send": [], "fetch": []}  # [value, latency left, bytes left]
    time, most, at, peaks, host_peak = 0.0, 0, 0, list[int](), 0
    rates = {"send": link.out, "fetch": link.back}

    def run(until: float) -> None:
        """Let copies go on until a time, or, where that is infinite, until the next one ends."""
        nonlocal time
        while time < until:
            heads = {kind: queue[0] for kind, queue in queues.items() if queue}
            if not heads and until == float("inf"):
                return
            share = link.both if len(heads) == 2 else 1.0
            left = {kind: h[1] + h[2] / (rates[kind] * share) for kind, h in heads.items()}
            step = min([until - time, *left.values()])
            for kind, h in heads.items():
                if left[kind] <= step:
                    queues[kind].pop(0)
                else:
                    waited = min(h[1], step)
                    h[1] -= waited
                    h[2] -= (step - waited) * rates[kind] * share
            time += step
            if until == float("inf"):
                return

    def wait(kind: str, v: int) -> None:
        while any(copy[0] == v for copy in queues[kind]):
            run(float("inf"))

    def now() -> int:
        return problem.resident + sum(problem.sizes[v] * n for v, n in held.items())

    for n, act in enumerate(todo):
        if isinstance(act, Move):
            v = act.value
            if act.kind == "send":
                host.add(v)
            if act.kind == "free":
                wait("send", v)
                held[v] -= 1
            else:
                queues[act.kind].append([v, link.latency, float(problem.sizes[v])])
            held[v] = held.get(v, 0) + (act.kind == "fetch")
            host_peak = max(host_peak, sum(problem.sizes[u] for u in host))
            most = max(most, now())
            continue
        op = problem.ops[act]
        for v in op.reads:
            wait("fetch", v)
            if held.get(v, 0) < 1:
                raise LookupError(f"step {at}")
        later = todo[n + 1 :]
        host -= {v for v in op.reads if not any(isinstance(m, Move) and m.value == v for m in later)}
        for v in op.writes:
            held[v] = held.get(v, 0) + 1
        peaks.append(max(most, now() + op.workspace))
        run(time + op.cost)
        for v in held:
            if held[v]:
                held[v] = int(v in problem.pinned or _needed(problem, todo, n, v))
        most, at = 0, at + 1
    return peaks, time, host_peak


def _needed(problem: Problem, todo: list[Move | int], after: int, v: int) -> bool:
    """Whether a value is read, sent or freed before it is fetched, or written so that the old copy is none any more."""
    for n, act in enumerate(todo[after + 1 :], after + 1):
        if isinstance(act, Move):
            if act.value == v:
                return act.kind != "fetch"
        elif v in problem.ops[act].reads:
            return True
        elif v in problem.ops[act].writes and not to_others(
            problem, v, max(i for i in todo[: n + 1] if not isinstance(i, Move)) + 1
        ):
            return False
    return False
