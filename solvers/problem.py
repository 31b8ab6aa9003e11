"""A rematerialization problem as plain data: ops in execution order, the values they read and write, a budget.

Units: sizes, workspaces and budgets in bytes; costs in any one unit of time (the planner uses seconds).
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import networkx as nx

from .errors import ProblemError

FORMAT = "rematerialization-problem/1"


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
    def total_cost(self) -> float:
        """Cost of running every op once."""
        return math.fsum(op.cost for op in self.ops)

    def with_budget(self, budget: int | None) -> Problem:
        """The same problem under another budget."""
        return replace(self, budget=budget)


def _check(p: Problem) -> None:
    def number(x: object) -> bool:
        return isinstance(x, (int, float)) and not isinstance(x, bool) and math.isfinite(x) and x >= 0

    if not 0 <= p.boundary <= len(p.ops):
        raise ProblemError(f"boundary {p.boundary!r} is outside 0..{len(p.ops)}")
    if not number(p.resident) or not (p.budget is None or number(p.budget)):
        raise ProblemError(f"resident {p.resident!r} and budget {p.budget!r} must be finite and not negative")
    for v, size in enumerate(p.sizes):
        if not number(size):
            raise ProblemError(f"value {v}: size {size!r} is not a finite number of bytes >= 0")
    made: set[int] = set()
    for i, op in enumerate(p.ops):
        where = f"op {i} ({op.name})" if op.name else f"op {i}"
        for v in (*op.reads, *op.writes):
            if not 0 <= v < len(p.sizes):
                raise ProblemError(f"{where}: there is no value {v!r}, only 0..{len(p.sizes) - 1}")
        if missing := [v for v in op.reads if v not in made]:
            raise ProblemError(f"{where} reads value {missing[0]}, which no earlier op writes: {_why(p, missing[0])}")
        if len(set(op.reads)) != len(op.reads):
            raise ProblemError(f"{where}: reads {op.reads} names a value twice")
        for v in op.writes:
            if v in made:
                raise ProblemError(f"{where}: value {v} is written twice")
            made.add(v)
        if not number(op.cost) or not number(op.workspace):
            raise ProblemError(f"{where}: cost {op.cost!r} and workspace {op.workspace!r} must be finite and >= 0")
    if len(made) != len(p.sizes):
        raise ProblemError(f"value {min(set(range(len(p.sizes))) - made)} has no op that writes it")
    if unknown := [v for v in p.pinned if v not in made]:
        raise ProblemError(f"pinned value {unknown[0]!r} does not exist")


def _why(p: Problem, value: int) -> str:
    """What is wrong when a value is read before it is written."""
    graph = to_networkx(p)
    if not any(value in op.writes for op in p.ops):
        return "no op writes it"
    try:
        cycle = nx.find_cycle(graph)
    except nx.NetworkXNoCycle:
        return "the ops are out of order"
    return "the ops have a cycle, " + " -> ".join(str(edge[0]) for edge in (*cycle, cycle[0]))


def to_networkx(problem: Problem) -> nx.DiGraph:
    """The ops as a graph: node i is `ops[i]`, with its attributes; an edge for every value that one reads of another.

    Examples:
        >>> p = Problem(ops=(Op("a", (), (0,), 1.0), Op("b", (0,), (1,), 2.0)), sizes=(4, 4), boundary=1)
        >>> list(to_networkx(p).edges(data="bytes"))
        [(0, 1, 4)]
    """
    graph = nx.DiGraph()
    makes = {v: i for i, op in enumerate(problem.ops) for v in op.writes}
    for i, op in enumerate(problem.ops):
        graph.add_node(i, name=op.name, cost=op.cost, workspace=op.workspace, forward=i < problem.boundary)
    for i, op in enumerate(problem.ops):
        for v in op.reads:
            if v in makes:
                before = graph.get_edge_data(makes[v], i, {"bytes": 0})["bytes"]
                graph.add_edge(makes[v], i, bytes=before + problem.sizes[v])
    return graph


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
        "ops": [
            {
                "name": op.name,
                "reads": list(op.reads),
                "writes": list(op.writes),
                "cost": op.cost,
                "workspace": op.workspace,
                "recomputable": op.recomputable,
                "region": op.region,
            }
            for op in problem.ops
        ],
    }


def from_json(data: Any) -> Problem:
    """Read a problem: this project's own format, or a published instance.

    A published instance (`{"budget_bytes", "last_forward_op", "ops": [{"inputs", "bytes", "cost"}]}`) has one
    value per op with the op's own number.

    Raises:
        ProblemError: naming what is missing or wrong.
    """
    try:
        if isinstance(data, dict) and "last_forward_op" in data:
            ops = tuple(
                Op(f"op{i}", tuple(dict.fromkeys(o["inputs"])), (i,), o["cost"]) for i, o in enumerate(data["ops"])
            )
            return Problem(
                ops=ops,
                sizes=tuple(o["bytes"] for o in data["ops"]),
                boundary=data["last_forward_op"] + 1,
                budget=data["budget_bytes"],
                name=data.get("name", ""),
            )
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise ProblemError(f"neither a published instance nor {FORMAT!r}")
        return Problem(
            ops=tuple(
                Op(
                    o.get("name", ""),
                    tuple(o["reads"]),
                    tuple(o["writes"]),
                    o["cost"],
                    o.get("workspace", 0),
                    o.get("recomputable", True),
                    o.get("region", 0),
                )
                for o in data["ops"]
            ),
            sizes=tuple(data["sizes"]),
            boundary=data["boundary"],
            pinned=frozenset(data.get("pinned", ())),
            resident=data.get("resident", 0),
            budget=data.get("budget"),
            name=data.get("name", ""),
        )
    except (KeyError, TypeError, AttributeError) as e:
        raise ProblemError(f"not a problem file: {type(e).__name__}: {e}") from e


def load(path: str | Path) -> Problem:
    """Read a problem from a JSON file; raises ProblemError for anything that is not one."""
    try:
        with open(path) as f:
            data = json.load(f)
    except (OSError, ValueError) as e:
        raise ProblemError(f"{path}: {e}") from e
    return from_json(data)
