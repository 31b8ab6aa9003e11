"""Looks up the ways in which an op can run in pieces. An op that is in no table has none: nothing is assumed of it."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from planner.capture.joint_graph import tensors
from planner.pieces import rules, rules_nn, rules_products
from planner.pieces.groups import Group, groups_of
from planner.pieces.ways import PARTS, SUMS, Parts, Way, given, shape_of

TABLES = (rules, rules_nn, rules_products)  # importing them enters their rules


def _rule(node: fx.Node) -> Parts | None:
    if not any(True for _ in tensors(node)):
        return None
    return PARTS.get(node.target, rules.elementwise if rules.is_elementwise(node.target) else None)


def ways_to_make(node: fx.Node, result: int, group: Group) -> Iterator[Way]:
    """The ways in which result number `result` of an op is cut along a group."""
    rule = _rule(node)
    if rule is None:
        return
    for first in [group] if result == 0 else groups_of(shape_of(node)):
        way = rule(node, first)
        if way is not None and result < len(way.makes) and way.makes[result] == group:
            yield way


def ways_to_read(node: fx.Node, argument: fx.Node, group: Group) -> Iterator[Way]:
    """The ways in which an op reads an argument cut along a group, wherever it is given it."""
    at = [i for i, n in enumerate(given(node)) if n is argument]
    rule = _rule(node)
    found = [rule(node, first) for first in groups_of(shape_of(node))] if rule is not None else []
    if (add := SUMS.get(node.target)) is not None:
        found.append(add(node, at[0], group))
    yield from (way for way in found if way is not None and all(way.reads[i] == group for i in at))
