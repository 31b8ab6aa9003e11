"""Sets of ops that are independent along a dimension, found by passing the dimension on from op to op."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from planner.capture.joint_graph import shape_of, tensors
from planner.capture.regions.region import Region
from planner.core.call import storages
from planner.pieces.groups import SUM, Group, can_be_cut, size_of
from planner.pieces.known import Known
from planner.pieces.rules import IN_PLACE
from planner.pieces.ways import Way, given, is_plain

BIG = 0.5  # values of at least this share of the elements of the first one are what a set is grown around


@dataclass(frozen=True)
class Found:
    """Ops that can run in pieces as one.

    Attributes:
        ways: how each op runs, in the order in which they run; the repeated ones first.
        repeated: of these, ops of the forward pass that the backward pass repeats for itself.
        parts: into how many pieces it could be cut, at most.
    """

    ways: Mapping[fx.Node, Way]
    repeated: frozenset[fx.Node]
    parts: int


@dataclass
class _Growth:
    """A set that grows.

    Attributes:
        region: the graph.
        floor: elements of a big value.
        parts: how many parts each group has.
        known: the ways of its ops.
        ways: how each op of the set runs.
        demands: what the ops of the set ask of each node: the group that they read cut.
        refused: ops that were taken out again.
    """

    region: Region
    floor: float
    parts: int
    known: Known
    ways: dict[fx.Node, Way] = field(default_factory=dict)
    demands: dict[fx.Node, set[tuple[Group | None, bool]]] = field(default_factory=lambda: defaultdict(set))
    refused: set[fx.Node] = field(default_factory=set)

    def forward(self, node: fx.Node) -> bool:
        return node in self.region.order.forward

    def made(self, node: fx.Node) -> Group | None:
        """The group along which the set makes a node in pieces, or SUM; None for a node that is not of the set."""
        op, result = source(node)
        return self.ways[op].makes[result] if op in self.ways else None

    def admits(self, node: fx.Node, way: Way) -> bool:
        """Whether a way fits those of the ops that are in the set already."""
        if node in self.ways or node in self.refused or not self.known.may(node):
            return False
        phase = self.forward(node)
        for x, wanted in zip(given(node), way.reads, strict=True):
            found = self.made(x)
            same_pass = self.forward(source(x)[0]) == phase
            if found is not None and same_pass and found != wanted:
                return False
            if wanted is not None:
                if size_of(shape_of(x), wanted) != self.parts:
                    return False
                if not (found is not None and same_pass) and not can_be_cut(next(tensors(x)), wanted):
                    return False
        for t in results(node):
            made = way.makes[source(t)[1]]
            if any(wanted != made for wanted, asker in self.demands.get(t, ()) if asker == phase):
                return False
        return node.target not in IN_PLACE or self.made(node.args[0]) == way.makes[0]  # type: ignore[arg-type]

    def add(self, node: fx.Node, way: Way) -> None:
        self.ways[node] = way
        for x, wanted in zip(given(node), way.reads, strict=True):
            self.demands[x].add((wanted, self.forward(node)))

    def try_to_make(self, x: fx.Node, group: Group) -> fx.Node | None:
        """Take the op that makes a node into the set, where it can make it in pieces."""
        op, result = source(x)
        for way in self.known.to_make(op, result, group):
            if self.admits(op, way):
                self.add(op, way)
                return op
        return None

    def try_to_read(self, user: fx.Node, x: fx.Node, group: Group) -> fx.Node | None:
        """Take an op that reads a node into the set, where it can read it in pieces."""
        for way in self.known.to_read(user, x, group):
            if self.admits(user, way):
                self.add(user, way)
                return user
        return None

    def big(self, node: fx.Node) -> bool:
        return self.known.numel(node) >= self.floor

    def overwritten(self, op: fx.Node) -> bool:
        """Whether an op reads an input that the step writes into, of which a second run would find another value."""
        region = self.region
        places = [at for x in given(op) for at in region.primal_of.get(x, ())]
        return any(region.primals[at] in region.mutated for at in places)

    def grow(self, first: fx.Node, hops: int | None) -> None:
        """Pass the group on, through big values, to the ops that make and read them, so many hops far."""
        layer = [first]
        while layer and hops != 0:
            layer = [op for node in layer for op in self._neighbours(node)]
            hops = None if hops is None else hops - 1

    def _neighbours(self, node: fx.Node) -> Iterator[fx.Node]:
        """Take the ops into the set that make what an op reads, and read what it makes."""
        for x, group in zip(given(node), self.ways[node].reads, strict=True):
            if group is not None and self.big(x):
                if op := self.try_to_make(x, group):
                    yield op
                yield from self._readers(x, group)
        for t in results(node):
            made = self.made(t)
            if made is not None and made != SUM and self.big(t):
                yield from self._readers(t, made)

    def _readers(self, x: fx.Node, group: Group) -> list[fx.Node]:
        tried = (self.try_to_read(user, x, group) for user in x.users if user.target is not operator.getitem)
        return [user for user in tried if user is not None]

    def close(self) -> None:
        """Take in what lies between ops of the set; take out what is reached from the set only by way of others."""
        while self._close_once():
            pass

    def _close_once(self) -> bool:
        """Whether ops were taken in; what is taken out changes nothing that came before it."""
        return any(self._close_pass(forward) for forward in (True, False))

    def _close_pass(self, forward: bool) -> bool:
        """Whether ops of a pass were taken in. No node before the first op of the set, or after the last, matters."""
        place = self.known.places(self.region.order.nodes)
        own = [place[node] for node in self.ways if node in place and self.forward(node) == forward]
        after: set[fx.Node] = set()
        for node in self.region.order.nodes[min(own) : max(own) + 1] if own else ():
            if self.forward(node) != forward:
                continue
            op = source(node)[0]
            late = [x for x in node.all_input_nodes if x in after]
            if op in self.ways and late and op is node:
                before = len(self.ways)
                if self._fill(node, late):
                    return True
                self._drop(node)
                if len(self.ways) >= before:
                    return True
            if op not in self.ways:
                inputs = node.all_input_nodes
                if late or any(source(x)[0] in self.ways and self.forward(x) == forward for x in inputs):
                    after.add(node)
        return False

    def _fill(self, node: fx.Node, late: Sequence[fx.Node]) -> bool:
        """Take in the ops that make what an op of the set reads; whether all of them could be."""
        reads = dict(zip(given(node), self.ways[node].reads, strict=True))
        wanted = [(x, reads[x]) for x in late]
        return all(group is not None and self.try_to_make(x, group) is not None for x, group in wanted)

    def _drop(self, node: fx.Node) -> None:
        del self.ways[node]
        self.refused.add(node)
        for x in given(node):
            users = [user for user in x.users if user in self.ways]
            pairs = [(user, *pair) for user in users for pair in zip(given(user), self.ways[user].reads, strict=True)]
            self.demands[x] = {(wanted, self.forward(user)) for user, y, wanted in pairs if y is x}


def source(node: fx.Node) -> tuple[fx.Node, int]:
    """The op that returns a node, and the number of the result that it is."""
    if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
        return node.args[0], node.args[1]  # type: ignore[return-value]
    return node, 0


def results(node: fx.Node) -> list[fx.Node]:
    """The nodes that are the results of an op."""
    parts = [user for user in node.users if user.target is operator.getitem]
    return parts if isinstance(node.meta.get("val"), (tuple, list)) else [node]


def floor_of(seed: fx.Node) -> float:
    """The elements of a big value where sets are grown around a node."""
    return BIG * next(tensors(seed)).numel()


def recognise(
    region: Region, seed: fx.Node, group: Group, known: Known | None = None, hops: int | None = None
) -> tuple[Found, ...]:
    """The sets around the big values that are made or read with a node cut along a group: of the forward and the
    backward pass, as far as there are any.

    Args:
        region: the captured region.
        seed: an op of it.
        group: of its first result.
        known: the ways of the region's ops, as far as they were looked up before.
        hops: how far from the seed, in its pass alone; None for as far as it goes, in both passes.
    """
    growth = _Growth(region, floor_of(seed), size_of(shape_of(seed), group), known or Known())
    for way in growth.known.to_make(seed, 0, group):
        if growth.admits(seed, way):
            growth.add(seed, way)
            growth.grow(seed, hops)
            if hops is None:
                for node, way_of in growth.ways.items():
                    growth.known.grown.setdefault((node, way_of.makes[0], growth.floor), (seed, group))
            growth.close()
            break
    if seed not in growth.ways:
        return ()
    order = [n for n in region.order.nodes if n in growth.ways]
    forward = {n: growth.ways[n] for n in order if growth.forward(n)}
    backward = {n: growth.ways[n] for n in order if not growth.forward(n)}
    repeated = _repeated(growth, forward, backward)
    again = {n: forward[n] for n in forward if n in repeated}
    sets = [Found(forward, frozenset(), growth.parts), Found({**again, **backward}, frozenset(again), growth.parts)]
    if hops is not None:
        sets = sets[:1] if growth.forward(seed) else sets[1:]
    return tuple(each for each in sets if len(each.ways) > len(each.repeated))


def _repeated(growth: _Growth, forward: Mapping[fx.Node, Way], backward: Mapping[fx.Node, Way]) -> frozenset[fx.Node]:
    """The ops of the forward pass that the backward pass repeats, for the big values that it reads in the same pieces;
    those that the graph returns are there anyway.
    """
    held = {key for n in growth.region.fwd_outputs if isinstance(n, fx.Node) for key in storages(n.meta.get("val"))}
    found: set[fx.Node] = set()
    stack = [(x, g) for node, way in backward.items() for x, g in zip(given(node), way.reads, strict=True)]
    while stack:
        x, wanted = stack.pop()
        op = source(x)[0]
        if op in found or op not in forward or wanted is None or growth.made(x) != wanted:
            continue
        if growth.big(x) and held.isdisjoint(storages(x.meta["val"])) and not growth.overwritten(op):
            found.add(op)
            stack += zip(given(op), forward[op].reads, strict=True)
    return frozenset(found)


def seeds(region: Region, least: float) -> list[fx.Node]:
    """The ops that make the largest values, the largest first, down to a share of the largest."""
    sized = [(max(t.nbytes for t in tensors(n)), n) for n in region.order.nodes if _allocates(n)]
    largest = max((size for size, _ in sized), default=0)
    return [n for size, n in sorted(sized, key=lambda pair: -pair[0]) if size >= least * largest]


def _allocates(node: fx.Node) -> bool:
    """Whether an op makes a tensor, and not a view."""
    if node.op != "call_function" or node.target is operator.getitem or not is_plain(node):
        return False
    return bool(storages(node.meta["val"]).keys() - storages([n.meta.get("val") for n in given(node)]).keys())
