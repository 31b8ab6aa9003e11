"""The sets of ops of a step that are worth running in pieces, and into how many for each size of a piece."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import fx

from planner.capture.joint_graph import shape_of, tensors
from planner.capture.regions.region import Region
from planner.core.pieces import Split
from planner.pieces.ends import Piecewise, piecewise
from planner.pieces.groups import SUM, groups_of
from planner.pieces.known import Known
from planner.pieces.recognise import floor_of, seeds
from planner.pieces.rewrite import alone

LEAST = 1 / 32  # share of the largest value below which values are too small to be worth it


@dataclass(frozen=True)
class Candidate:
    """Ops of a region that could run in pieces.

    Attributes:
        region: number of the region.
        split: what to run in pieces, so far in one.
        parts: how many pieces there could be.
        nbytes: of the largest value that is never whole then.
    """

    region: int
    split: Split
    parts: int
    nbytes: int

    def at(self, nbytes: float) -> Split | None:
        """In so many pieces, a power of two where that can be, that no piece of the value has more bytes; None for
        whole.
        """
        pieces = 1
        while pieces < self.parts and self.nbytes > nbytes * pieces:
            pieces *= 2
        pieces = min(pieces, self.parts)
        return Split(self.split.seed, self.split.first, self.split.last, pieces) if pieces > 1 else None


def candidates(regions: Sequence[Region], known: Sequence[Known]) -> tuple[Candidate, ...]:
    """The sets around the largest values of each region, the largest first; no op is in two.

    Args:
        regions: as captured.
        known: what is known of the ops of each.
    """
    pairs = enumerate(zip(regions, known, strict=True))
    found = [each for r, (region, ways) in pairs if region.fingerprint for each in _of(r, region, ways)]
    return tuple(sorted(found, key=lambda each: -each.nbytes))


def _of(number: int, region: Region, known: Known) -> Iterator[Candidate]:
    place = known.places(region.order.nodes)
    taken: set[fx.Node] = set()
    together = alone(region)
    for seed in seeds(region, LEAST):
        if seed in taken:
            continue
        best: tuple[int, Candidate, tuple[Piecewise, ...]] | None = None
        for group in groups_of(shape_of(seed)):
            here = seed, group
            first, along = known.grown.get((*here, floor_of(seed)), here)  # from there, the same is found
            sets = piecewise(region, first, along, known)
            if not any(seed in each.found.ways for each in sets):
                continue
            own = {node for each in sets for node in each.own}
            sizes = [size for each in sets for size in _never_whole(each)]
            if not sizes or sets[0].found.parts < 2 or not own.isdisjoint(taken):
                continue
            if best is None or sum(sizes) > best[0]:
                split = Split(place[first], *along, 1)
                best = sum(sizes), Candidate(number, split, sets[0].found.parts, max(sizes)), sets
        if best is not None and (more := together.with_sets(best[2])) is not None:
            yield best[1]
            together = more
            taken.update(node for each in best[2] for node in each.own)


def _never_whole(each: Piecewise) -> list[int]:
    """Bytes of the values of a set that exist in pieces only."""
    made = {t for t, _ in each.makes}
    sizes = []
    for node, way in each.found.ways.items():
        if node in each.views or node in made or any(user in made for user in node.users) or way.makes[0] == SUM:
            continue
        sizes.append(max((t.nbytes for t in tensors(node)), default=0))
    return sizes
