"""Resolves the links between regions: which of their values are one, and when autograd adds gradients up."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from planner.capture.regions.calls import Link, ViewSums
from planner.capture.regions.region import Region


@dataclass(frozen=True, slots=True)
class Sum:
    """Autograd adds up gradients of one tensor: in place, or into a new value.

    Attributes:
        reads: the values that are added.
        writes: the new value, where autograd may not write into the first.
        size: its bytes.
        workspace: bytes beside these, where the gradients are those of views of the tensor.
    """

    reads: tuple[int, ...]
    writes: int | None = None
    size: int = 0
    workspace: int = 0


@dataclass(frozen=True)
class LinkedValues:
    """How the values of regions are joined; numbered as in the problem.

    Attributes:
        taken: for each (region, primal) that another region makes, the values that it is.
        freed: results of regions that nothing holds but the regions that take them.
        same: for each gradient that comes into a region, the value that it is.
        made: of these, the bytes that the loss makes, where they are not whole.
        gradients: for each region, the gradients that stay once its backward pass has ended.
        sums: for each region, the additions of autograd once its backward pass has ended.
        parts: gradients of parameters and inputs that are added up.
    """

    taken: Mapping[tuple[int, int], tuple[int, ...]]
    freed: frozenset[int]
    same: Mapping[int, int]
    made: Mapping[int, int]
    gradients: tuple[tuple[int, ...], ...]
    sums: Mapping[int, Sequence[Sum]]
    parts: frozenset[int] = frozenset()

    def resolve(self, value: int) -> int:
        """The value that a gradient is."""
        while value in self.same:
            value = self.same[value]
        return value


Arrival = tuple[int, int]  # a region, and the gradient that its backward pass adds


def resolve_links(regions: Sequence[Region], links: Sequence[Link], offset: Sequence[int]) -> LinkedValues:
    """Follow every link, in the order in which autograd runs the backward passes: the last region's first. O(uses).

    Args:
        regions: in the order of their forward passes.
        links: the tensors that they make for each other and share.
        offset: for each region, the number of its first value; one more for the first number that is free.
    """
    taken: dict[tuple[int, int], tuple[int, ...]] = {}
    freed: set[int] = set()
    same: dict[int, int] = {}
    made: dict[int, int] = {}
    sums: dict[int, list[Sum]] = defaultdict(list)
    parts: set[int] = set()
    linked: set[tuple[int, int]] = set()  # (region, primal) whose gradient goes on
    final: dict[int, list[int]] = defaultdict(list)
    free = offset[-1]
    views: dict[int, list[tuple[ViewSums, Arrival]]] = defaultdict(list)  # their gradients, by that of the result
    for link in links:
        uses = [(r, regions[r].input_at(argument)) for r, argument in link.uses]
        places = [(r, primal) for r, primal in uses if primal is not None]
        produced = _produced(regions, offset, link, taken)
        if len(places) < len(uses) or produced is None:
            continue
        values, incoming = produced
        if link.producer is not None:
            taken.update(dict.fromkeys(places, values))
            if not (link.held or link.stays):
                freed.update(v for v in values if offset[link.producer[0]] <= v < offset[link.producer[0] + 1])
        found = [(r, p, _values(regions, offset, r, regions[r].grads[p])) for r, p in reversed(places)]
        found = [arrival for arrival in found if arrival[2]]
        if not found or any(len(g) > 1 for _, _, g in found) or (link.producer is not None and not incoming):
            continue
        linked.update((r, p) for r, p, _ in found)
        arrivals = [(r, gradient) for r, _, (gradient,) in found]
        if link.sums is not None and incoming:
            views[incoming[0]] += [(link.sums, arrival) for arrival in arrivals]
            continue
        total, added = _add_up(regions, offset, arrivals, incoming[0] if link.held and incoming else None, free)
        free += sum(each.writes is not None for _, each in added)
        for r, each in added:
            sums[r].append(each)
        if incoming:
            same[incoming[0]] = total
            if not link.held:
                made[incoming[0]] = 0
        else:
            final[arrivals[-1][0]].append(total)
            parts.update(gradient for _, gradient in arrivals)
    for r, of_views in _sums_of_views(regions, offset, views, same, made, free):
        sums[r].append(of_views)
    gradients = []
    for r, region in enumerate(regions):
        own = region.values_in(g for p, g in enumerate(region.grads) if (r, p) not in linked)
        gradients.append(tuple(dict.fromkeys([*(offset[r] + v for v in own), *final[r]])))
    return LinkedValues(taken, frozenset(freed), same, made, tuple(gradients), sums, frozenset(parts))


def _produced(
    regions: Sequence[Region],
    offset: Sequence[int],
    link: Link,
    taken: Mapping[tuple[int, int], tuple[int, ...]],
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The value of a link's tensor and that of the gradient that comes in for it, where there is one.

    Both are empty for a parameter or an input of the model; None for a tensor of several values.
    """
    if link.producer is None:
        return (), ()
    maker, result = link.producer
    node = regions[maker].output_at(result)
    incoming = _values(regions, offset, maker, regions[maker].tangent_at(result))
    values = _values(regions, offset, maker, node)
    if not values:  # a view of what the region took itself
        values = tuple(v for p in regions[maker].primal_of.get(node, ()) for v in taken.get((maker, p), ()))
    return None if len(values) != 1 or len(incoming) > 1 else (values, incoming)


def _add_up(
    regions: Sequence[Region], offset: Sequence[int], arrivals: Sequence[Arrival], total: int | None, free: int
) -> tuple[int, list[tuple[int, Sum]]]:
    """Add up the gradients of one tensor, as `torch/csrc/autograd/input_buffer.cpp` does.

    A gradient that arrives second is added to the first: in place where nothing else can see the first.

    Args:
        regions: as for `resolve_links`.
        offset: the same.
        arrivals: in the order of the backward passes.
        total: the gradient that is there before; None for none.
        free: the first number that no value has.

    Returns:
        The value that is the sum, and the additions, each with the region after which it runs.
    """
    owned, added = False, []
    for r, gradient in arrivals:
        if total is None:
            total, owned = gradient, _owned(regions[r], gradient - offset[r])
        elif owned:
            added.append((r, Sum((total, gradient))))
        else:
            size = regions[r].values[gradient - offset[r]].nbytes
            added.append((r, Sum((total, gradient), free, size)))
            total, owned, free = free, True, free + 1
    assert total is not None
    return total, added


def _sums_of_views(
    regions: Sequence[Region],
    offset: Sequence[int],
    views: Mapping[int, Sequence[tuple[ViewSums, Arrival]]],
    same: dict[int, int],
    made: dict[int, int],
    free: int,
) -> list[tuple[int, Sum]]:
    """The sums of gradients of views: autograd makes each as large as what they are of, once all of them are there.

    Args:
        regions: as for `resolve_links`.
        offset: the same.
        views: their gradients, by that of what they are of, as it comes into its region.
        same: as in `LinkedValues`; the sums are entered.
        made: the same.
        free: as for `_add_up`.

    Returns:
        The sums, each with the region after which it runs.
    """
    sums: list[tuple[int, Sum]] = []
    for tangent, arrivals in views.items():
        own = arrivals[0][0]
        of = bisect_right(offset, tangent) - 1
        size = regions[of].values[tangent - offset[of]].nbytes
        reads = [gradient for _, (_, gradient) in arrivals]
        there = size + sum(regions[r].values[gradient - offset[r]].nbytes for _, (r, gradient) in arrivals)
        after = min(r for _, (r, _) in arrivals)
        if tangent in same:
            reads.append(same[tangent])
        else:
            made[tangent] = own.outputs
            if own.outputs:  # they are added as they are first
                sums.append((after, Sum((reads[0], tangent))))
        same[tangent] = free
        sums.append((after, Sum(tuple(reads), free, size, max(0, own.at_once - there))))
        free += 1
    return sums


def _values(regions: Sequence[Region], offset: Sequence[int], r: int, node: object) -> tuple[int, ...]:
    return tuple(offset[r] + v for v in regions[r].values_in([node])) if isinstance(node, fx.Node) else ()


def _owned(region: Region, value: int) -> bool:
    """Whether a gradient is a tensor that the region made, and returns once."""
    made = any(value in op.writes for op in region.ops[region.boundary :])
    return made and sum(value in region.values_in([g]) for g in region.grads) == 1
