"""Looks up the ways in which an op can run in pieces. An op that is in no table has none: nothing is assumed of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from planner.capture.joint_graph import may_write, shape_of, tensors
from planner.capture.passes.checkpoints import clone_of
from planner.capture.recomputability import is_random
from planner.capture.shapes import SYMBOLIC
from planner.pieces import rules, rules_nn, rules_products
from planner.pieces.groups import Group, groups_of
from planner.pieces.ways import PARTS, SUMS, Parts, Way, given, is_plain

TABLES = (rules, rules_nn, rules_products)  # importing them enters their rules


def _rule(node: fx.Node) -> Parts | None:
    if not any(True for _ in tensors(node)):
        return None
    return PARTS.get(node.target, rules.elementwise if rules.is_elementwise(node.target) else None)


def _may(node: fx.Node) -> bool:
    if node.op != "call_function" or clone_of(node) is not None or is_random(node) or SYMBOLIC in node.meta:
        return False
    if not all(map(is_plain, given(node))):
        return False
    return is_plain(node) and (not may_write(node) or node.target in rules.IN_PLACE)


@dataclass(frozen=True)
class Known:
    """The ways of the ops of one graph, each looked up once.

    Attributes:
        sets: found around a node that is cut along a group, as `planner.pieces.ends.piecewise` returns them.
        grown: for an op, the group of its first result and the least size of what a group was passed on through, from
            where the same ops were reached before: the first node and its group.
    """

    sets: dict[tuple[fx.Node, Group, int | None], tuple[Any, ...]] = field(default_factory=dict)
    grown: dict[tuple[fx.Node, Group, float], tuple[fx.Node, Group]] = field(default_factory=dict)
    _cut: dict[tuple[fx.Node, Group], Way | None] = field(default_factory=dict)
    _read: dict[tuple[fx.Node, fx.Node, Group], tuple[Way, ...]] = field(default_factory=dict)
    _all: dict[fx.Node, tuple[tuple[fx.Node, ...], tuple[Way, ...], bool]] = field(default_factory=dict)
    _may: dict[fx.Node, bool] = field(default_factory=dict)
    _numel: dict[fx.Node, int] = field(default_factory=dict)
    _place: dict[fx.Node, int] = field(default_factory=dict)

    def places(self, nodes: Sequence[fx.Node]) -> Mapping[fx.Node, int]:
        """Where each of the graph's nodes is in its order."""
        if not self._place:
            self._place.update({node: at for at, node in enumerate(nodes)})
        return self._place

    def numel(self, node: fx.Node) -> int:
        """Elements of the largest tensor that a node returns."""
        if node not in self._numel:
            self._numel[node] = max((t.numel() for t in tensors(node)), default=0)
        return self._numel[node]

    def may(self, node: fx.Node) -> bool:
        """Whether a node is an op that may run in pieces, where there is a way to."""
        if node not in self._may:
            self._may[node] = _may(node)
        return self._may[node]

    def to_make(self, node: fx.Node, result: int, group: Group) -> Iterator[Way]:
        """The ways in which result number `result` of an op is cut along a group."""
        for first in [group] if result == 0 else groups_of(shape_of(node)):
            way = self._way(node, first)
            if way is not None and result < len(way.makes) and way.makes[result] == group:
                yield way

    def to_read(self, node: fx.Node, argument: fx.Node, group: Group) -> tuple[Way, ...]:
        """The ways in which an op reads an argument cut along a group, wherever it is given it."""
        key = node, argument, group
        if key not in self._read:
            self._read[key] = tuple(self._to_read(*key))
        return self._read[key]

    def _to_read(self, node: fx.Node, argument: fx.Node, group: Group) -> Iterator[Way]:
        if node not in self._all:
            some = any(True for _ in tensors(node))
            ways = [self._way(node, first) for first in groups_of(shape_of(node))] if some else []
            self._all[node] = tuple(given(node)), tuple(way for way in ways if way is not None), some
        reads, found, some = self._all[node]
        at = [i for i, n in enumerate(reads) if n is argument]
        if some and (add := SUMS.get(node.target)) is not None and (way := add(node, at[0], group)) is not None:
            found = (*found, way)
        yield from (way for way in found if all(way.reads[i] == group for i in at))

    def _way(self, node: fx.Node, group: Group) -> Way | None:
        if (node, group) not in self._cut:
            rule = _rule(node)
            self._cut[node, group] = None if rule is None else rule(node, group)
        return self._cut[node, group]
