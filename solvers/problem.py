"""A rematerialization problem as plain data: ops in execution order, the values they read and write, a budget.

Units: sizes, workspaces and budgets in bytes; costs in any one unit of time (the planner uses seconds).
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import networkx as nx

from solvers.errors import ProblemError

FORMAT = "rematerialization-problem/1"
MOST_BYTES = 2**62  # of everything together, so that any peak fits 64 bits
LARGEST = 10**300  # budget or total cost: what solvers make of them stays finite as floats


@dataclass(frozen=True, slots=True)
class Op:
    """One operation.

    Attributes:
        name: for messages only.
        reads: the values that must be held while it runs.
        writes: the values that it produces; all are allocated each time it runs.
        cost: time of one run.
        workspace: bytes held only while it runs, beside what it reads and writes.
        recomputable: whether it may run more than once.
        region: ops of a region may run again only between the first runs of two ops of the same region.
    """

    name: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    cost: float
    workspace: int = 0
    recomputable: bool = True
    region: int = 0


Pairs = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Waiting:
    """Other microbatches of the same step, whose forward pass has run and whose backward pass has not.

    Each of them holds what the schedule keeps: the values that are held when the first backward op starts. Beside what
    a schedule holds by itself, `number` times that and `beside` bytes are there, for the pair of which that is most.

    Attributes:
        forward: pairs (number, beside) that occur while the forward pass runs.
        backward: while the backward pass runs.
        until: `ops[until:]` run when no microbatch waits.
    """

    forward: Pairs
    backward: Pairs
    until: int

    def bytes_in(self, pairs: Pairs, kept: int) -> int:
        """Bytes beside a schedule that keeps `kept` bytes, for one of the lists of pairs."""
        return max(number * kept + beside for number, beside in pairs)


@dataclass(frozen=True)
class Problem:
    """What a solver gets. Checked when made: every index in range, one writer per value, order topological.

    Attributes:
        ops: in a valid order of execution; first runs keep this order in every schedule.
        sizes: bytes of each value (a value is one storage; views are not values).
        boundary: `ops[:boundary]` is the forward pass, the rest the backward pass.
        pinned: values that stay held once produced (outputs the caller holds, gradients).
        resident: bytes held all the time, beside the values.
        budget: bytes that `resident` and everything held may take together; None for no limit.
        waiting: the other microbatches that are in flight; None for none.

    Raises:
        ProblemError: naming the op or value that is wrong.

    Examples:
        >>> Problem(ops=(Op("a", (), (0,), 1.0), Op("b", (0,), (1,), 2.0)), sizes=(4, 4), boundary=1).total_cost
        3.0
    """

    ops: tuple[Op, ...]
    sizes: tuple[int, ...]
    boundary: int
    pinned: frozenset[int] = frozenset()
    resident: int = 0
    budget: int | None = None
    name: str = field(default="", compare=False)
    waiting: Waiting | None = None

    def __post_init__(self) -> None:
        _check(self)

    @cached_property
    def producer(self) -> tuple[int, ...]:
        """For each value, the op that writes it."""
        made = [-1] * len(self.sizes)
        for i, op in enumerate(self.ops):
            for v in op.writes:
                made[v] = i
        return tuple(made)

    @cached_property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """For each value, the ops that read it, in order."""
        found: list[list[int]] = [[] for _ in self.sizes]
        for i, op in enumerate(self.ops):
            for v in op.reads:
                found[v].append(i)
        return tuple(map(tuple, found))

    @cached_property
    def lasting(self) -> frozenset[int]:
        """Values that are never made again where they are needed: once made, they stay until their last use.

        Pinned ones, results of the backward pass or of ops that must not run twice, and what another region reads.
        """
        found = set(self.pinned)
        for i, op in enumerate(self.ops):
            again = i < self.boundary and op.recomputable
            found.update(
                v for v in op.writes if not again or any(self.ops[r].region != op.region for r in self.readers[v])
            )
        return frozenset(found)

    @cached_property
    def least_kept(self) -> int:
        """Bytes that every schedule holds when the first backward op starts."""
        first = self.ops[self.boundary].reads if self.boundary < len(self.ops) else ()
        held = {*self.pinned, *first, *(v for v in self.lasting if max(self.readers[v], default=-1) >= self.boundary)}
        return sum(self.sizes[v] for v in held if self.producer[v] < self.boundary)

    @cached_property
    def total_cost(self) -> float:
        """Cost of running every op once."""
        return math.fsum(op.cost for op in self.ops)

    def with_budget(self, budget: int | None) -> Problem:
        """The same problem under another budget."""
        return replace(self, budget=budget)


def _check(p: Problem) -> None:
    """Types before relations, so that nothing here fails but on purpose. O(ops + reads)."""
    for name, kind in (("ops", tuple), ("sizes", tuple), ("pinned", frozenset), ("name", str)):
        if not isinstance(getattr(p, name), kind):
            raise ProblemError(f"{name} must be a {kind.__name__}, not {getattr(p, name)!r:.60}")
    if not p.ops:
        raise ProblemError("ops is empty: there is nothing to schedule")
    if not (_whole(p.boundary) and p.boundary <= len(p.ops)):
        raise ProblemError(f"boundary {p.boundary!r:.60} is outside 0..{len(p.ops)}")
    budget = 0 if p.budget is None else p.budget
    sizes = ((f"value {v}: size", size) for v, size in enumerate(p.sizes))
    for what, size in (("resident", p.resident), ("budget", budget), *sizes):
        if not _whole(size):
            raise ProblemError(f"{what} {size!r:.60} is not a whole number of bytes >= 0")
    for i, op in enumerate(p.ops):
        if wrong := _wrong(op, len(p.sizes)):
            raise ProblemError(f"{_called(i, op)} {wrong}")
    if p.waiting is not None:
        _check_waiting(p, p.waiting)
    if p.resident + sum(p.sizes) + sum(op.workspace for op in p.ops) > MOST_BYTES:
        raise ProblemError(f"resident, sizes and workspaces add up to more than {MOST_BYTES} bytes")
    if budget > LARGEST or any(op.cost > LARGEST / len(p.ops) for op in p.ops):
        raise ProblemError("the budget or a cost is too large to calculate with")
    made = bytearray(len(p.sizes))
    for i, op in enumerate(p.ops):
        for v in op.reads:
            if not made[v]:
                raise ProblemError(f"{_called(i, op)} reads value {v}, which no earlier op writes: {_why(p, v)}")
        for v in op.writes:
            if made[v]:
                raise ProblemError(f"{_called(i, op)}: value {v} is written twice")
            made[v] = 1
    if (v := made.find(0)) >= 0:
        raise ProblemError(f"value {v} has no op that writes it")
    for v in p.pinned:
        if not (_whole(v) and v < len(made)):
            raise ProblemError(f"pinned value {v!r:.60} does not exist")


def _check_waiting(p: Problem, waiting: Waiting) -> None:
    if not (isinstance(waiting, Waiting) and _whole(waiting.until) and p.boundary < waiting.until <= len(p.ops)):
        raise ProblemError(f"waiting {waiting!r:.60} does not end after the first backward op, number {p.boundary}")
    for pairs in (waiting.forward, waiting.backward):
        if not (isinstance(pairs, tuple) and pairs):
            raise ProblemError(f"waiting has {pairs!r:.60}, not pairs of a number and bytes")
        for pair in pairs:
            if not (isinstance(pair, tuple) and len(pair) == 2 and all(map(_whole, pair))):
                raise ProblemError(f"waiting has {pair!r:.60}, not a number of microbatches and bytes beside them")
            if p.resident + (pair[0] + 1) * sum(p.sizes) + pair[1] > MOST_BYTES:
                raise ProblemError(f"the microbatches that wait add up to more than {MOST_BYTES} bytes")


def _wrong(op: Op, values: int) -> str:
    """What is wrong with an op by itself; empty where nothing is."""
    if not isinstance(op, Op):
        return f"is {op!r:.60}, not an Op"
    for does, named in (("reads", op.reads), ("writes", op.writes)):
        if not isinstance(named, tuple):
            return f"{does} {named!r:.60}, not a tuple of value numbers"
        for v in named:
            if not (_whole(v) and v < values):
                return f"{does} {v!r:.60}, but there is no value {v!r:.60} among the {values}, numbered from 0"
    if len(set(op.reads)) != len(op.reads):
        return f"reads {op.reads!r:.60}, which names a value twice"
    if isinstance(op.cost, bool) or not isinstance(op.cost, (int, float)) or not 0 <= op.cost < math.inf:
        return f"has cost {op.cost!r:.60}, which is not a finite number >= 0"
    if not _whole(op.workspace):
        return f"has workspace {op.workspace!r:.60}, which is not a whole number of bytes >= 0"
    for what, x, kind in (("name", op.name, str), ("recomputable", op.recomputable, bool), ("region", op.region, int)):
        if type(x) is not kind:
            return f"has {what} {x!r:.60}, which is not of type {kind.__name__}"
    return ""


def _whole(x: object) -> bool:
    return type(x) is int and x >= 0  # not isinstance: True is no number of bytes


def _called(i: int, op: Op) -> str:
    name = f"{getattr(op, 'name', '')!s:.60}"
    return f"op {i}" if name in ("", f"op{i}") else f"op {i} ({name})"


def _why(p: Problem, value: int) -> str:
    """What is wrong when a value is read before it is written."""
    makes = p.producer
    if makes[value] < 0:
        return "no op writes it"
    try:
        graph = nx.DiGraph((makes[v], i) for i, op in enumerate(p.ops) for v in op.reads if makes[v] >= 0)
        cycle = [i for i, _ in nx.find_cycle(graph)]
    except nx.NetworkXNoCycle:
        return "the ops are out of order; each must stand after all that it reads from"
    first = cycle.index(min(cycle))
    shown = [str(i) for i in (*cycle[first:], *cycle[: first + 1])]
    return "the ops have a cycle, " + " -> ".join(shown if len(shown) < 12 else [*shown[:10], "...", shown[-1]])


def to_json(problem: Problem) -> dict[str, Any]:
    """The problem as plain JSON data; `from_json` is its inverse."""
    return {
        "format": FORMAT,
        "name": problem.name,
        "budget": problem.budget,
        "resident": problem.resident,
        "boundary": problem.boundary,
        "sizes": list(problem.sizes),
        "pinned": sorted(problem.pinned),
        "ops": [asdict(op) | {"reads": list(op.reads), "writes": list(op.writes)} for op in problem.ops],
        **({} if problem.waiting is None else {"waiting": asdict(problem.waiting)}),
    }


def from_json(data: Any, path: str | Path | None = None) -> Problem:
    """Read a problem: this project's own format, or a published instance.

    A published instance (`{"budget_bytes", "last_forward_op", "ops": [{"inputs", "bytes", "cost"}]}`) has one value per
    op with the op's own number. Both formats list ops in a valid order of execution. Bytes may be written as 10.0.

    Args:
        data: what `json.load` returns.
        path: the file it is from, for messages.

    Raises:
        ProblemError: naming what is missing or wrong.
    """
    try:
        if isinstance(data, dict) and "last_forward_op" in data:
            return _published(data)
        if isinstance(data, dict) and data.get("format") == FORMAT:
            return _own(data)
        raise ProblemError(f'neither a published instance (with "last_forward_op") nor one with "format": "{FORMAT}"')
    except ProblemError as e:
        raise e if path is None else ProblemError(f"{path}: {e}") from e


def _published(data: dict[str, Any]) -> Problem:
    ops, last = _get(data, "ops", list), _get(data, "last_forward_op")
    if not (_whole(last) and last < len(ops)):
        raise ProblemError(f"last_forward_op {last!r:.60} is not one of the {len(ops)} ops, numbered from 0")
    return Problem(
        tuple(Op(f"op{i}", tuple(_get(o, "inputs", list, i)), (i,), _get(o, "cost", op=i)) for i, o in enumerate(ops)),
        sizes=tuple(_bytes(_get(o, "bytes", op=i)) for i, o in enumerate(ops)),
        boundary=last + 1,
        budget=_bytes(_get(data, "budget_bytes", (int, float))),
        name=data.get("name", ""),
    )


def _own(data: dict[str, Any]) -> Problem:
    ops = []
    for i, o in enumerate(_get(data, "ops", list)):
        reads, writes = (tuple(_get(o, key, list, i)) for key in ("reads", "writes"))
        more = {key: o[key] for key in ("recomputable", "region") if key in o}
        ops.append(Op(o.get("name", ""), reads, writes, _get(o, "cost", op=i), _bytes(o.get("workspace", 0)), **more))
    pinned = _get({"pinned": [], **data}, "pinned", list)
    if not all(map(_whole, pinned)):  # a list in it would not go into a set
        raise ProblemError(f"pinned {pinned!r:.60} is not a list of value numbers")
    return Problem(
        ops=tuple(ops),
        sizes=tuple(map(_bytes, _get(data, "sizes", list))),
        boundary=_get(data, "boundary"),
        pinned=frozenset(pinned),
        resident=_bytes(data.get("resident", 0)),
        budget=_bytes(data.get("budget")),
        name=data.get("name", ""),
        waiting=_waiting(data.get("waiting")),
    )


def _waiting(data: Any) -> Waiting | None:
    if data is None:
        return None
    lists = [_get(data, key, (list, tuple)) for key in ("forward", "backward")]
    pairs = [
        tuple(tuple(map(_bytes, pair)) if isinstance(pair, (list, tuple)) else pair for pair in each) for each in lists
    ]
    return Waiting(pairs[0], pairs[1], _get(data, "until"))


def _get(data: Any, key: str, kind: type | tuple[type, ...] = object, op: int | None = None) -> Any:
    where = "the problem" if op is None else f"op {op}"
    if not isinstance(data, dict):
        raise ProblemError(f"{where} is {data!r:.60}, not an object")
    if key not in data:
        raise ProblemError(f"{where} has no {key!r}")
    if not isinstance(data[key], kind):
        raise ProblemError(f"{where} has {key} {data[key]!r:.60}, not a {'list' if kind is list else 'number'}")
    return data[key]


def _bytes(x: Any) -> Any:
    return int(x) if isinstance(x, float) and x.is_integer() else x


def read(path: str | Path) -> Any:
    """The data in a JSON file; raises ProblemError, naming the file, where there is none."""
    try:
        with open(path, encoding="utf-8") as f:
            return json.load(f)
    except (OSError, ValueError, RecursionError) as e:
        raise ProblemError(f"{path}: {getattr(e, 'strerror', None) or f'not JSON: {e}'}") from e


def load(path: str | Path) -> Problem:
    """Read a problem from a JSON file; raises ProblemError, naming the file, for anything that is not one."""
    return from_json(read(path), path)
