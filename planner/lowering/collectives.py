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

from planner.lowering.build import COMMUNICATION, OPTIMIZER, Lowered, LoweredOp
from solvers import Op, Problem


@dataclass(frozen=True, slots=True)
class Group:
    """Parameters that are gathered together; bytes.

    Attributes:
        paths: of the modules around whose calls that happens.
        whole: the gathered parameters.
        buffer: what they are gathered into; 0 where nothing is gathered.
        casting: what is held besides while that happens: this device's share in another data type.
        reduced: the buffer that gradients are copied into.
        share: this device's share of the gradients.
        scattering: what is held besides while they are reduced: that share in another data type.
        stays: whether the whole parameters are held from the forward to the backward pass.
        copied: whether the backend copies what it sends (gloo), and lets go of that some time after.
        next_forward: groups that are gathered ahead once its module's call has begun.
        next_backward: the same once its backward pass has begun; empty for the one whose call ended before its own.
    """

    paths: tuple[str, ...]
    whole: int
    buffer: int
    casting: int
    reduced: int
    share: int
    scattering: int
    stays: bool
    copied: bool = False
    next_forward: tuple[int, ...] = ()
    next_backward: tuple[int, ...] = ()

    def around(self, path: str) -> bool:
        """Whether a module is one of its own, or inside one."""
        return any(not own or path == own or path.startswith(f"{own}.") for own in self.paths)


@dataclass
class _Communicating:
    """A step that is written anew, with communication.

    Attributes:
        groups: parameters.
        granularity: what the allocator rounds sizes up to, in bytes.
        sizes: of values, in bytes.
        ops: in order.
        source: for each op, where it was; None for communication.
        gathered: values that are whole parameters or buffers of them.
        shares: values that are shares of gradients.
        whole: parameters that are gathered now, by group.
        ahead: buffers that they are to be copied out of, by group.
        late: copies of the backend that may be held until the next op of communication.
    """

    groups: Sequence[Group]
    granularity: int
    sizes: list[int]
    ops: list[Op] = field(default_factory=list)
    source: list[int | None] = field(default_factory=list)
    gathered: set[int] = field(default_factory=set)
    shares: set[int] = field(default_factory=set)
    whole: dict[int, int] = field(default_factory=dict)
    ahead: dict[int, int] = field(default_factory=dict)
    late: list[int] = field(default_factory=list)

    def value(self, nbytes: int) -> int:
        self.sizes.append(-(-nbytes // self.granularity) * self.granularity)
        return len(self.sizes) - 1

    def parameters(self, nbytes: int) -> int:
        self.gathered.add(made := self.value(nbytes))
        return made

    def copy(self, i: int, op: Op) -> None:
        """An op of the step itself."""
        self.ops.append(op)
        self.source.append(i)

    def add(self, name: str, reads: Sequence[int] = (), writes: Sequence[int] = (), workspace: int = 0) -> None:
        """An op of communication."""
        self.ops.append(Op(name, (*reads, *self.late), tuple(writes), 0.0, workspace, False, COMMUNICATION))
        self.source.append(None)
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


def communicate(
    lowered: Lowered,
    groups: Sequence[Group],
    paths: Sequence[Sequence[str]],
    *,
    accumulate: bool = False,
    granularity: int = 1,
) -> Lowered:
    """Add gathering, resharding and reducing to a step. O(ops x groups).

    Args:
        lowered: made with `reduced=True`.
        groups: the outer before the inner.
        paths: for each region, the module that each op belongs to.
        accumulate: whether shares of gradients are added to earlier ones, and freed.
        granularity: what the allocator rounds sizes up to, in bytes.
    """
    problem = lowered.problem
    around = {path: tuple(g for g, group in enumerate(groups) if group.around(path)) for each in paths for path in each}
    chains = [None if o.region < 0 else around[paths[o.region][o.index]] for o in lowered.origin]
    to = _Communicating(groups, granularity, list(problem.sizes))
    order = _forward(lowered, to, chains)
    _backward(lowered, to, chains, order)
    made = Problem(
        tuple(to.ops),
        tuple(to.sizes),
        to.source.index(problem.boundary),
        problem.pinned if accumulate else problem.pinned | to.shares,
        problem.resident,
        problem.budget,
    )
    return replace(
        lowered,
        problem=made,
        origin=tuple(LoweredOp(COMMUNICATION, 0) if i is None else lowered.origin[i] for i in to.source),
        kinds=tuple(op.name if i is None else lowered.kinds[i] for i, op in zip(to.source, to.ops, strict=True)),
        gradients=lowered.gradients | to.shares,
        gathered=frozenset(to.gathered),
    )


def _forward(lowered: Lowered, to: _Communicating, chains: Sequence[tuple[int, ...] | None]) -> list[int]:
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

    for i, op in enumerate(lowered.problem.ops[: lowered.problem.boundary]):
        if (chain := chains[i]) is not None:
            _go(entered, chain, enter, leave)
        to.copy(i, op)
    _go(entered, (), enter, leave)
    to.add("wait", held)
    return order


def _backward(
    lowered: Lowered, to: _Communicating, chains: Sequence[tuple[int, ...] | None], order: Sequence[int]
) -> None:
    problem = lowered.problem
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

    for i, op in enumerate(problem.ops[problem.boundary :], problem.boundary):
        if (chain := chains[i]) is not None:
            _go(entered, chain, enter, leave)
        elif lowered.origin[i].region == OPTIMIZER:
            _go(entered, (), enter, leave)
        if entered:
            gradients[entered[-1]] += [v for v in op.writes if v in lowered.final]
        to.copy(i, op)
    _go(entered, (), enter, leave)


def _go(entered: list[int], chain: Sequence[int], enter: Callable[[int], None], leave: Callable[[int], None]) -> None:
    """Leave the groups that a chain has not, the inner first, and enter those that it has, the outer first."""
    while entered and entered[-1] not in chain:
        leave(entered.pop())
    for g in chain:
        if g not in entered:
            entered.append(g)
            enter(g)
