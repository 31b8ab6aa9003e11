"""What devices that share parameters hold beside the values of a step, as ops of the problem.

The order is that of `torch.distributed.fsdp.fully_shard` (`_fsdp_state.py`, `_fsdp_param_group.py`). Before a module
runs, its parameters are gathered into one buffer and copied out of it; in the forward pass that buffer is held until
the next one is there. In the backward pass the next module's buffer is filled ahead. Once a module's gradients are
made, they are copied into a buffer that is reduced and scattered, and held until the next module's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from planner.core.parameter_group import ParameterGroup, is_around
from planner.core.plan import Phase
from planner.core.step import Row, Step
from planner.lowering.build import COMMUNICATION, own_row, round_up


@dataclass
class _Writer:
    """A step that is written anew, with communication.

    Attributes:
        groups: parameters.
        granularity: the allocator rounds sizes up to multiples of it, in bytes.
        sizes: of values, in bytes.
        phase: of the ops that are written now.
        rows: ops in order, each with its origin.
        gathered: values that are whole parameters or buffers of them.
        shares: values that are shares of gradients.
        whole: parameters that are gathered now, by group.
        ahead: buffers that they are to be copied out of, by group.
        late: copies of the backend that may be held until the next op of communication.
    """

    groups: Sequence[ParameterGroup]
    granularity: int
    sizes: list[int]
    phase: Phase = "forward"
    rows: list[Row] = field(default_factory=list)
    gathered: set[int] = field(default_factory=set)
    shares: set[int] = field(default_factory=set)
    whole: dict[int, int] = field(default_factory=dict)
    ahead: dict[int, int] = field(default_factory=dict)
    late: list[int] = field(default_factory=list)

    def value(self, nbytes: int) -> int:
        self.sizes.append(round_up(nbytes, self.granularity))
        return len(self.sizes) - 1

    def parameters(self, nbytes: int) -> int:
        self.gathered.add(value := self.value(nbytes))
        return value

    def add(self, name: str, reads: Sequence[int] = (), writes: Sequence[int] = (), workspace: int = 0) -> None:
        """An op of communication."""
        self.rows.append(own_row(COMMUNICATION, name, self.phase, (*reads, *self.late), writes, workspace))
        self.late.clear()

    def send(self, name: str, g: int, reads: Sequence[int], made: int, workspace: int) -> None:
        """An op for which the backend may hold a copy of the larger buffer until the next one."""
        most = max(self.sizes[v] for v in (*reads, made))
        copies = [self.parameters(most)] if self.groups[g].copied else []
        self.add(name, reads, [made, *copies], workspace)
        self.late += copies

    def fetch(self, g: int) -> None:
        """Gather a group into its buffer, unless it is there."""
        if g not in self.whole and g not in self.ahead:
            self.ahead[g] = self.parameters(self.groups[g].buffer)
            self.send("all-gather", g, (), self.ahead[g], self.groups[g].casting)

    def copy_out(self, g: int, freed: Sequence[int] = ()) -> None:
        """Whole parameters from their buffer; some values may go then."""
        self.whole[g] = self.parameters(self.groups[g].whole)
        self.add("copy out", freed, [self.whole[g]])


def insert_collectives(
    step: Step, groups: Sequence[ParameterGroup], *, accumulate: bool = False, granularity: int = 1
) -> Step:
    """Add gathering, resharding and reducing to a step. O(ops x groups).

    Args:
        step: built with `reduced=True`.
        groups: the outer before the inner; none for a step without communication, which is returned as it is.
        accumulate: whether shares of gradients are added to earlier ones, and freed.
        granularity: the allocator rounds sizes up to multiples of it, in bytes.
    """
    if not groups:
        return step
    paths = {origin.module for origin in step.origins}
    around = {path: tuple(g for g, group in enumerate(groups) if is_around(group, path)) for path in paths}
    chains = [None if origin.region is None else around[origin.module] for origin in step.origins]
    to = _Writer(groups, granularity, list(step.problem.sizes))
    order = _forward(step, to, chains)
    boundary = len(to.rows)
    to.phase = "backward"
    _backward(step, to, chains, order)
    ops, origins = zip(*to.rows, strict=True)
    problem = replace(
        step.problem,
        ops=ops,
        sizes=tuple(to.sizes),
        boundary=boundary,
        pinned=step.problem.pinned if accumulate else step.problem.pinned | to.shares,
    )
    return replace(
        step,
        problem=problem,
        origins=origins,
        names=(*step.names, *("" for _ in to.sizes[len(step.names) :])),
        gradients=step.gradients | to.shares,
        gathered=frozenset(to.gathered),
    )


def _forward(step: Step, to: _Writer, chains: Sequence[tuple[int, ...] | None]) -> list[int]:
    """Returns the groups in the order in which their modules' calls end."""
    order: list[int] = []
    entered: list[int] = []
    held: list[int] = []  # the latest buffer that was copied out of

    def enter(g: int) -> None:
        if g not in to.whole:
            to.fetch(g)
            to.add("wait", held)
            to.copy_out(g)
            held[:] = [to.ahead.pop(g)]
        for other in to.groups[g].next_forward:
            to.fetch(other)

    def leave(g: int) -> None:
        order.append(g)
        if not to.groups[g].stays:
            to.add("reshard", [to.whole.pop(g)])

    for i, op in enumerate(step.problem.ops[: step.problem.boundary]):
        if (chain := chains[i]) is not None:
            _go(entered, chain, enter, leave)
        to.rows.append((op, step.origins[i]))
    _go(entered, (), enter, leave)
    to.add("wait", held)
    return order


def _backward(step: Step, to: _Writer, chains: Sequence[tuple[int, ...] | None], order: Sequence[int]) -> None:
    """Takes the groups in the order in which `_forward` returns them."""
    problem = step.problem
    entered: list[int] = []
    reduced: list[int] = []  # the latest buffer of gradients
    gradients: dict[int, list[int]] = defaultdict(list)
    places: dict[int, list[int]] = defaultdict(list)
    for at, g in enumerate(order):
        places[g].append(at)

    def enter(g: int) -> None:
        if g not in to.whole:
            to.fetch(g)
            to.copy_out(g, [to.ahead.pop(g)])
        before = [order[at - 1]] if places[g] and (at := places[g].pop()) > 0 else []
        for other in to.groups[g].next_backward or before:
            to.fetch(other)

    def leave(g: int) -> None:
        to.add("reshard", [to.whole.pop(g), *reduced])
        reduced.clear()
        if made := gradients.pop(g, None):
            reduced.append(to.value(to.groups[g].reduced))
            to.add("copy gradients", made, reduced)
            share = to.value(to.groups[g].share)
            to.send("reduce-scatter", g, reduced, share, to.groups[g].scattering)
            to.shares.add(share)

    whole = {v: i for i, op in enumerate(problem.ops) for v in (*op.reads, *op.writes) if v in step.final}
    made: dict[int, list[int]] = defaultdict(list)  # an op -> the gradients that it makes, or adds the last term to
    for v, i in whole.items():
        made[i].append(v)
    for i, op in enumerate(problem.ops[problem.boundary :], problem.boundary):
        if (chain := chains[i]) is not None:
            _go(entered, chain, enter, leave)
        elif step.origins[i].phase == "optimizer":
            _go(entered, (), enter, leave)
        if entered:
            gradients[entered[-1]] += made[i]
        to.rows.append((op, step.origins[i]))
    _go(entered, (), enter, leave)


def _go(entered: list[int], chain: Sequence[int], enter: Callable[[int], None], leave: Callable[[int], None]) -> None:
    """Leave the groups that a chain has not, the inner first, and enter those that it has, the outer first."""
    while entered and entered[-1] not in chain:
        leave(entered.pop())
    for g in chain:
        if g not in entered:
            entered.append(g)
            enter(g)
