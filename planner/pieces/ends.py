"""What goes into a set of ops that run in pieces, and what comes out of it."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx
from torch.utils.flop_counter import flop_registry

from planner.capture.joint_graph import tensors
from planner.capture.passes.tangents import is_mark
from planner.capture.regions.region import Region
from planner.core.call import storages
from planner.pieces.groups import SUM, Group, can_be_cut
from planner.pieces.known import Known
from planner.pieces.recognise import Found, recognise, results, source
from planner.pieces.rules import IN_PLACE
from planner.pieces.ways import given


@dataclass(frozen=True)
class Piecewise:
    """A set of ops as a single one.

    Attributes:
        found: the set.
        reads: what it is given: nodes of the region, each with the group that is cut, or None.
        makes: the nodes that others read, each with the group that is cut, or SUM.
        views: ops of the set that others read, and that are views: they are written beside it, too.
    """

    found: Found
    reads: tuple[tuple[fx.Node, Group | None], ...]
    makes: tuple[tuple[fx.Node, Group], ...]
    views: frozenset[fx.Node]

    @property
    def own(self) -> frozenset[fx.Node]:
        """The ops that run nowhere else."""
        return frozenset(self.found.ways) - self.found.repeated

    @property
    def main(self) -> fx.Node:
        """The op that the set is named after: the largest of those that have FLOPs, if any have."""
        return max(self.own, key=_weight)


def piecewise(
    region: Region, seed: fx.Node, group: Group, known: Known | None = None, hops: int | None = None
) -> tuple[Piecewise, ...]:
    """The sets around an op's result that is cut along a group, with what goes in and out; none where there is no such
    set, or where a result cannot be written in pieces. Arguments as of `recognise`.
    """
    known = known or Known()
    key = seed, group, hops
    if key not in known.sets:
        known.sets[key] = _piecewise(recognise(region, *key[:2], known, hops))
    return known.sets[key]


def _piecewise(sets: Sequence[Found]) -> tuple[Piecewise, ...]:
    found = tuple(_ends(each, sets) for each in sets)
    if None in found:
        return ()
    return tuple(each for each in found if each is not None and each.makes)  # the others are views of what is whole


def _reads(found: Found) -> dict[tuple[fx.Node, Group | None], None]:
    """What the ops of a set are given from outside."""
    pairs = [pair for node, way in found.ways.items() for pair in zip(given(node), way.reads, strict=True)]
    return {(x, group): None for x, group in pairs if source(x)[0] not in found.ways}


def _ends(found: Found, sets: Sequence[Found]) -> Piecewise | None:
    if any(map(is_mark, found.ways)) and any(way.quotient for way in found.ways.values()):
        return None  # `write_whole` knows no quotients
    reads = _reads(found)
    others = {x for other in sets if other is not found for x, _ in _reads(other)}
    inside = {node for each in sets for node in each.ways}
    makes: dict[fx.Node, Group] = {}
    views: set[fx.Node] = set()
    own = [t for node in found.ways if node not in found.repeated for t in results(node)]
    stack = [t for t in own if t in others or any(_reader(t, user) and user not in inside for user in t.users)]
    while stack:
        t = stack.pop()
        op, result = source(t)
        if op in found.ways and _is_view(op):
            views.add(op)
            stack.append(given(op)[0])
        elif op in found.ways and t not in makes:
            makes[t] = found.ways[op].makes[result]
            if (quotient := found.ways[op].quotient) is not None and result == quotient[0]:
                by = [other for other in results(op) if source(other)[1] == quotient[1]]
                if not by:
                    return None
                stack += by
    keys = [key for t in makes for key in storages(t.meta["val"])]
    if len(set(keys)) != len(keys) or any(g != SUM and not can_be_cut(t.meta["val"], g) for t, g in makes.items()):
        return None
    place = {node: at for at, node in enumerate(found.ways)}
    ordered = sorted(makes.items(), key=lambda pair: (place[source(pair[0])[0]], source(pair[0])[1]))
    return Piecewise(found, tuple(reads), tuple(ordered), frozenset(views))


def _reader(t: fx.Node, user: fx.Node) -> bool:
    """Whether a user reads a node, and is not one of its parts."""
    return user.target is not operator.getitem or source(user)[0] is not t


def _weight(op: fx.Node) -> tuple[bool, int]:
    """By what the op of a set is found that it is named after: whether it counts as computing, and its size."""
    return getattr(op.target, "overloadpacket", None) in flop_registry, max(t.numel() for t in tensors(op))


def _is_view(op: fx.Node) -> bool:
    inputs = given(op)
    if op.target in IN_PLACE or len(inputs) != 1:
        return False
    return not storages(op.meta["val"]).keys().isdisjoint(storages(inputs[0].meta["val"]))
