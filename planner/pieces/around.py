"""Sets of ops around single ones that take much memory: those of which the least goes in and comes out whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import fx

from planner.capture.joint_graph import shape_of
from planner.capture.regions.region import Region
from planner.core.call import storages
from planner.core.pieces import Split
from planner.pieces.ends import Piecewise, piecewise
from planner.pieces.groups import groups_of
from planner.pieces.known import Known
from planner.pieces.recognise import source
from planner.pieces.rewrite import Together, alone
from planner.pieces.ways import given

HOPS = (0, 1, 2, 3, 4, 6, 8, 12)  # how far from the op sets are sought
LESS = 0.9  # of an op's bytes: what goes in and out of a set around it is less than that, or it is not worth it

Needs = Mapping[fx.Node, int]  # bytes that an op takes while it runs whole: what it reads and makes, and its workspace


@dataclass(frozen=True)
class Around:
    """A set of ops of one pass of a region that could run in pieces.

    Attributes:
        split: what to run in pieces, so far in one.
        each: the set.
        outside: bytes of what goes in and comes out, which are whole.
        inside: bytes that any of its ops takes, at most, where it runs whole.
    """

    split: Split
    each: Piecewise
    outside: int
    inside: int

    def at(self, nbytes: float) -> Split:
        """In so few pieces, a power of two, that it takes no more bytes than that; else in as many as there can be."""
        pieces = 2
        while pieces < self.each.found.parts and self.outside + self.inside / pieces > nbytes:
            pieces *= 2
        return replace(self.split, pieces=min(pieces, self.each.found.parts))


class Surroundings:
    """The sets around the ops of a region, beside sets that are in pieces already; each is looked up once.

    Attributes:
        region: the graph.
        needs: of its ops.
        most: of these, the most of an op that is not in pieces already.
    """

    def __init__(self, region: Region, known: Known, needs: Needs, splits: Sequence[Split]) -> None:
        self.region, self.needs, self._known = region, needs, known
        self._place = known.places(region.order.nodes)
        self._found: dict[fx.Node, tuple[Around, ...]] = {}
        sets = (
            piecewise(region, region.order.nodes[split.seed], (split.first, split.last), self._known, split.hops)
            for split in splits
        )
        beside = [each for found in sets for each in found]
        self._together: Together = alone(region).with_sets(beside) or alone(region)
        inside = {node for each in beside for node in each.own}
        self.most = max((need for node, need in needs.items() if node not in inside), default=0)

    def above(self, nbytes: float) -> tuple[Split, ...]:
        """What to run in pieces for no op to take more than so many bytes, as far as that can be."""
        together, splits = self._together, []
        taken = {node for each in together.sets for node in each.own}
        for node, need in sorted(self.needs.items(), key=lambda pair: -pair[1]):
            if need <= nbytes:
                break
            for around in self._around(node) if node not in taken else ():
                if taken.isdisjoint(around.each.own) and (more := together.with_sets([around.each])) is not None:
                    splits.append(around.at(nbytes))
                    together = more
                    taken |= around.each.own
                    break
        return tuple(splits)

    def _around(self, node: fx.Node) -> tuple[Around, ...]:
        """The sets that have an op, the best first: that of which the least is whole, and of those the largest."""
        if node not in self._found:
            starts = [node, *(source(x)[0] for x in given(node))]
            found = [around for start in starts if start in self._place for around in self._from(start, node)]
            found.sort(key=lambda around: (around.outside, -len(around.each.own)))
            self._found[node] = tuple(found)
        return self._found[node]

    def _from(self, start: fx.Node, node: fx.Node) -> Iterator[Around]:
        for group in groups_of(shape_of(start)):
            size = 0
            for hops in HOPS:
                sets = piecewise(self.region, start, group, self._known, hops)
                if len(sets) != 1 or sets[0].found.parts < 2 or len(sets[0].found.ways) == size:
                    break
                size = len(sets[0].found.ways)
                outside = self._outside(sets[0])
                if node in sets[0].own and outside <= LESS * self.needs[node]:
                    inside = max(self.needs.get(op, 0) for op in sets[0].own)
                    yield Around(Split(self._place[start], *group, 1, hops), sets[0], outside, inside)

    def _outside(self, each: Piecewise) -> int:
        nodes = [x for x, _ in each.reads if x not in self.region.primal_of] + [t for t, _ in each.makes]
        return sum({key: n for x in nodes for key, n in storages(x.meta.get("val")).items()}.values())
