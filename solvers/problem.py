"""A rematerialization problem as plain data: ops in execution order, the values they read and write, a budget.

Units: sizes, workspaces and budgets in bytes; costs in any one unit of time (the planner uses seconds).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property

import networkx as nx

from solvers.errors import ProblemError
from solvers.link import Link, check_link

MOST_BYTES = 2**62  # resident bytes, sizes and workspaces add up to no more, so that any peak fits 64 bits
LARGEST = 10**300  # the budget and the total cost are no larger, so that sums and products stay finite as floats


@dataclass(frozen=True, slots=True)
class Op:
    """One operation.

    Attributes:
        name: for messages only.
        reads: the values that must be allocated while it runs.
        writes: the values that it produces; all are allocated each time it runs.
        cost: time of one run.
        workspace: temporary bytes, allocated only while it runs, beside the values that it reads and writes.
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

    Each waiting microbatch holds its own copy of the saved tensors: as many bytes as the schedule keeps when its first
    backward op starts. A pair (number, beside) says that `number` microbatches wait, with `beside` further bytes. The
    schedule must fit beside the largest of its pairs.

    The backward pass may also run twice over the same saved tensors (`retain_graph=True`): the first time none of these
    is freed, and the second time the results of the first are there.

    Attributes:
        forward: the pairs that occur while the forward pass runs.
        backward: the pairs that occur while the backward pass runs.
        until: no microbatch waits, and nothing is saved any more, while `ops[until:]` run.
        again: bytes of the results of a first backward pass, where there is a second; None where there is none.
    """

    forward: Pairs
    backward: Pairs
    until: int
    again: int | None = None

    def bytes_in(self, pairs: Pairs, kept: int) -> int:
        """Bytes of the microbatches that wait, each of which keeps `kept` bytes; the largest of the pairs."""
        return max(number * kept + beside for number, beside in pairs)


@dataclass(frozen=True)
class Problem:
    """The input of every solver. Construction checks it: every index in range, one writer per value, topological order.

    Attributes:
        ops: in a valid order of execution; first runs keep this order in every schedule.
        sizes: bytes of each value (a value is one storage; views are not values).
        boundary: `ops[:boundary]` is the forward pass, the rest the backward pass.
        pinned: values that stay allocated once produced (outputs that the caller holds, gradients).
        resident: bytes that are allocated all the time, beside the values.
        budget: bytes that `resident`, values and workspaces may take together; None for no limit.
        waiting: the other microbatches that are in flight; None for none.
        link: over which values may leave the device for a while; None for none.
        movable: the values that may leave; none of them is pinned.

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
    link: Link | None = None
    movable: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        _check(self)

    @cached_property
    def producer(self) -> tuple[int, ...]:
        """For each value, the op that writes it."""
        producer = [-1] * len(self.sizes)
        for i, op in enumerate(self.ops):
            for v in op.writes:
                producer[v] = i
        return tuple(producer)

    @cached_property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """For each value, the ops that read it, in order."""
        readers: list[list[int]] = [[] for _ in self.sizes]
        for i, op in enumerate(self.ops):
            for v in op.reads:
                readers[v].append(i)
        return tuple(map(tuple, readers))

    @cached_property
    def lasting(self) -> frozenset[int]:
        """Values that no search recomputes: once written, each stays allocated until its last use.

        These are the pinned values, the outputs of backward ops, the outputs of ops that must not run twice, and the
        values that an op of another region reads.
        """
        lasting = {*self.pinned, *(v for v, until in enumerate(self.shared_until) if until >= 0)}
        for i, op in enumerate(self.ops):
            if i >= self.boundary or not op.recomputable:
                lasting.update(op.writes)
        return frozenset(lasting)

    @cached_property
    def shared_until(self) -> tuple[int, ...]:
        """For each value, the last op of the other regions that read it, and -1 where none does: until that has run,
        all read the first copy, and what its op writes when it runs again is in no one's hands.
        """
        region = [op.region for op in self.ops]
        last = {r: i for i, r in enumerate(region)}
        made = zip(self.producer, self.readers, strict=True)
        others = ({region[i] for i in readers} - {region[of]} for of, readers in made)
        return tuple(max((last[r] for r in each), default=-1) for each in others)

    @cached_property
    def least_kept(self) -> int:
        """Bytes of values that are live in every schedule when the first backward op starts."""
        first = self.ops[self.boundary].reads if self.boundary < len(self.ops) else ()
        live = {*self.pinned, *first, *(v for v in self.lasting if max(self.readers[v], default=-1) >= self.boundary)}
        return sum(self.sizes[v] for v in live if self.producer[v] < self.boundary)

    @cached_property
    def total_cost(self) -> float:
        """Cost of running every op once."""
        return math.fsum(op.cost for op in self.ops)

    def without_link(self) -> Problem:
        """The same problem where no value may leave; its schedules are valid for this one, too."""
        return self if self.link is None else replace(self, link=None, movable=frozenset())

    def with_budget(self, budget: int | None) -> Problem:
        """The same problem under another budget."""
        return replace(self, budget=budget)


def _check(p: Problem) -> None:
    """Check types before relations, so that no check can fail by accident. O(ops + reads)."""
    _check_types(p)
    _check_magnitudes(p)
    _check_order(p)
    for named, values in (("pinned", p.pinned), ("movable", p.movable)):
        for v in values:
            if not (_whole(v) and v < len(p.sizes)):
                raise ProblemError(f"{named} value {v!r:.60} does not exist")
    if both := sorted(p.movable & p.pinned):
        raise ProblemError(f"value {both[0]} is pinned, so that it cannot be movable")
    if p.link is not None:
        check_link(p.link)
        if p.waiting is not None:
            raise ProblemError("a problem has a link or microbatches that wait, not both")


def _check_types(p: Problem) -> None:
    for name, kind in (("ops", tuple), ("sizes", tuple), ("pinned", frozenset), ("movable", frozenset), ("name", str)):
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
        if fault := _fault(op, len(p.sizes)):
            raise ProblemError(f"{_op_label(i, op)} {fault}")
    if p.waiting is not None:
        _check_waiting(p, p.waiting)


def _check_magnitudes(p: Problem) -> None:
    if p.resident + sum(p.sizes) + sum(op.workspace for op in p.ops) > MOST_BYTES:
        raise ProblemError(f"resident, sizes and workspaces add up to more than {MOST_BYTES} bytes")
    if (p.budget or 0) > LARGEST or any(op.cost > LARGEST / len(p.ops) for op in p.ops):
        raise ProblemError("the budget or a cost is too large to calculate with")


def _check_order(p: Problem) -> None:
    """Every value has one writer, which stands before all readers."""
    written = bytearray(len(p.sizes))
    for i, op in enumerate(p.ops):
        for v in op.reads:
            if not written[v]:
                raise ProblemError(
                    f"{_op_label(i, op)} reads value {v}, which no earlier op writes: {_why_unwritten(p, v)}"
                )
        for v in op.writes:
            if written[v]:
                raise ProblemError(f"{_op_label(i, op)}: value {v} is written twice")
            written[v] = 1
    if (v := written.find(0)) >= 0:
        raise ProblemError(f"value {v} has no op that writes it")


def _check_waiting(p: Problem, waiting: Waiting) -> None:
    if not (isinstance(waiting, Waiting) and _whole(waiting.until) and p.boundary < waiting.until <= len(p.ops)):
        raise ProblemError(f"waiting {waiting!r:.60} does not end after the first backward op, number {p.boundary}")
    if not (waiting.again is None or _whole(waiting.again)):
        raise ProblemError(f"waiting has {waiting.again!r:.60} for again, not a whole number of bytes >= 0, or None")
    for pairs in (waiting.forward, waiting.backward):
        if not (isinstance(pairs, tuple) and pairs):
            raise ProblemError(f"waiting has {pairs!r:.60}, not pairs of a number and bytes")
        for pair in pairs:
            if not (isinstance(pair, tuple) and len(pair) == 2 and all(map(_whole, pair))):
                raise ProblemError(f"waiting has {pair!r:.60}, not a number of microbatches and bytes beside them")
            if p.resident + (pair[0] + 2) * sum(p.sizes) + pair[1] + (waiting.again or 0) > MOST_BYTES:
                raise ProblemError(f"the microbatches that wait add up to more than {MOST_BYTES} bytes")


def _fault(op: Op, values: int) -> str:
    """Say why an op is ill formed by itself; an empty string where it is well formed."""
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


def _op_label(i: int, op: Op) -> str:
    name = f"{getattr(op, 'name', '')!s:.60}"
    return f"op {i}" if name in ("", f"op{i}") else f"op {i} ({name})"


def _why_unwritten(p: Problem, value: int) -> str:
    """Explain a read before the write: no writer at all, ops out of order, or a cycle of ops."""
    producer = p.producer
    if producer[value] < 0:
        return "no op writes it"
    try:
        graph = nx.DiGraph((producer[v], i) for i, op in enumerate(p.ops) for v in op.reads if producer[v] >= 0)
        cycle = [i for i, _ in nx.find_cycle(graph)]
    except nx.NetworkXNoCycle:
        return "the ops are out of order; each must stand after all that it reads from"
    first = cycle.index(min(cycle))
    shown = [str(i) for i in (*cycle[first:], *cycle[: first + 1])]
    return "the ops have a cycle, " + " -> ".join(shown if len(shown) < 12 else [*shown[:10], "...", shown[-1]])
