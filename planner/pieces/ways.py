"""How an op runs in pieces: which of its tensors are cut, and along which dimensions; and the table of what is known.

An op that is in no table never runs in pieces: nothing is assumed of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import fx

from planner.capture.joint_graph import map_nodes, tensors
from planner.pieces.body import Body
from planner.pieces.groups import Group

Write = Callable[[Body, Any, Any], Any]


@dataclass(frozen=True)
class Way:
    """One way to run an op in pieces.

    Attributes:
        reads: for each tensor that it is given (`given`), the group that is cut; None for whole.
        makes: for each tensor that it returns, the group that is cut, or SUM.
        write: writes it into the graph of a piece, from its arguments there; None for the same op.
        quotient: of results that add up, (a, b) where the sum of a has yet to be divided by that of b.
    """

    reads: tuple[Group | None, ...]
    makes: tuple[Group, ...]
    write: Write | None = None
    quotient: tuple[int, int] | None = None


Parts = Callable[[fx.Node, Group], Way | None]  # the way whose first result is cut along a group
Sums = Callable[[fx.Node, int, Group], Way | None]  # the way that adds up, of argument number and the group of it

PARTS: dict[Any, Parts] = {}
SUMS: dict[Any, Sums] = {}


def parts(*targets: Any) -> Callable[[Parts], Parts]:
    """Enter a rule for ops whose results are cut."""

    def enter(rule: Parts) -> Parts:
        PARTS.update(dict.fromkeys(targets, rule))
        return rule

    return enter


def sums(*targets: Any) -> Callable[[Sums], Sums]:
    """Enter a rule for ops whose results add up."""

    def enter(rule: Sums) -> Sums:
        SUMS.update(dict.fromkeys(targets, rule))
        return rule

    return enter


def given(node: fx.Node) -> list[fx.Node]:
    """The nodes that a node is given, one for each place."""
    found: list[fx.Node] = []
    map_nodes((node.args, dict(node.kwargs)), found.append)
    return found


def args_of(node: fx.Node) -> Any:
    """The positional arguments of a node."""
    return node.args


def count(node: fx.Node) -> int:
    """How many results a node has, None among them counted."""
    value = node.meta["val"]
    return len(value) if isinstance(value, (tuple, list)) else 1


def is_plain(node: fx.Node) -> bool:
    """Whether all that a node returns is tensors of fixed shapes, on one device."""
    found = list(tensors(node))
    fixed = all(isinstance(n, int) for t in found for n in t.shape)
    return bool(found) and fixed and len({t.device for t in found}) == 1
