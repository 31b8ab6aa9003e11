"""The calls of `offload.transfers` in emitted graphs: which values of a region leave, and where in a slab each lies."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from planner.capture.joint_graph import tensors
from planner.capture.regions.movable import movable
from planner.capture.regions.region import Region
from planner.offload.layout import Stay, lay_out, rounded
from planner.offload.transfers import begin, fetch, free, ready, send
from solvers import Move


class Moving:
    """Writes the moves of a region.

    Args:
        region: the captured region.
        forward, backward: the ops that each pass runs.
        moves: of its values; `at` counts the steps of both passes.
        store: where they go.

    Attributes:
        away: the values that have left and are not back, as far as the graphs are written.
    """

    def __init__(
        self, region: Region, forward: Sequence[int], backward: Sequence[int], moves: Sequence[Move], store: int
    ) -> None:
        self._region, self._store = region, store
        self._moves: dict[int, list[Move]] = defaultdict(list)
        for move in moves:
            self._moves[move.at].append(move)
        self._offsets, self._nbytes = slab_of(region, forward, backward, moves)
        self.away: set[int] = set()

    def before(self, at: int) -> Sequence[Move]:
        """The moves just before a step."""
        return self._moves.get(at, ())

    def begin(self, graph: fx.Graph) -> fx.Node:
        """Open the frame, in front of all ops."""
        placeholders = graph.find_nodes(op="placeholder")
        with graph.inserting_after(placeholders[-1]) if placeholders else graph.inserting_before(None):
            node = graph.call_function(begin, (self._store, self._nbytes))
        node.meta["val"] = self._fake(torch.empty(1, dtype=torch.int64))
        return node

    def send(self, graph: fx.Graph, ticket: fx.Node, held: fx.Node, value: int) -> None:
        """The copy out begins."""
        room = rounded(self._region.values[value].nbytes)
        graph.call_function(send, (ticket, held, value, self._offsets[value], room))

    def free(self, graph: fx.Graph, ticket: fx.Node, held: fx.Node, value: int) -> None:
        """The value leaves: this is the last that reads it."""
        graph.call_function(free, (ticket, held, value))
        self.away.add(value)

    def fetch(self, graph: fx.Graph, ticket: fx.Node, value: int) -> fx.Node:
        """The copy back begins."""
        self.away.discard(value)
        return self._like(graph, fetch, (ticket, value), value)

    def ready(self, graph: fx.Graph, ticket: fx.Node, coming: fx.Node, owner: fx.Node) -> fx.Node:
        """The value is there."""
        (value,) = (v for v in self._region.value_of[owner] if self._region.values[v].owner is owner)
        return self._like(graph, ready, (ticket, coming, value), value)

    def _like(self, graph: fx.Graph, call: Callable[..., Any], arguments: tuple[Any, ...], value: int) -> fx.Node:
        node = graph.call_function(call, arguments)
        node.meta = dict(self._region.values[value].owner.meta)
        return node

    def _fake(self, t: torch.Tensor) -> torch.Tensor:
        given = next(t for n in self._region.joint.graph.nodes for t in tensors(n))
        mode: Any = given.fake_mode  # type: ignore[attr-defined]
        fake: torch.Tensor = mode.from_tensor(t, static_shapes=True)
        return fake


def slab_of(
    region: Region, forward: Sequence[int], backward: Sequence[int], moves: Sequence[Move]
) -> tuple[dict[int, int], int]:
    """Where each value lies in the frame of one call, and the bytes of that frame. O(steps + reads + moves ** 2).

    A value's bytes are its own from its send to the read that waits for its last fetch; to the end, where the forward
    pass sends it and the backward pass fetches it, which may run again (`retain_graph=True`).
    """
    steps = (*forward, *backward)
    begun: dict[int, int] = {}
    fetched: dict[int, int] = {}
    for move in moves:
        begun.setdefault(move.value, move.at)
        if move.kind == "fetch":
            fetched[move.value] = move.at
    stays = []
    for v, start in begun.items():
        until = len(forward) if start < len(forward) else len(steps)
        end = next((at for at in range(fetched.get(v, 0), until) if v in region.ops[steps[at]].reads), None)
        last = max(move.at for move in moves if move.value == v)
        stays.append(Stay(region.values[v].nbytes, start, math.inf if end is None or last >= until else end))
    offsets, nbytes = lay_out(stays)
    return dict(zip(begun, offsets, strict=True)), nbytes


def moves_fit(region: Region, steps: Sequence[int], moves: Sequence[Move]) -> bool:
    """Whether graphs can be written with these moves. O(steps + reads + moves).

    They are of values that may leave, each in the order send, free, fetch, free, ..., and no op reads one that is away.

    Args:
        region: the captured region.
        steps: the ops that both passes run.
        moves: as in `PlannedRegion`.
    """
    if not moves:
        return True
    follows = {"send": (None,), "free": ("send", "fetch"), "fetch": ("free",)}
    may, last = movable(region), dict[int, str]()
    held: set[int] = set()
    n = 0
    for at, i in enumerate(steps):
        while n < len(moves) and moves[n].at == at:
            kind, v = moves[n].kind, moves[n].value
            if v not in may or last.get(v) not in follows[kind] or (v in held) == (kind == "fetch"):
                return False
            last[v] = kind
            (held.discard if kind == "free" else held.add)(v)
            n += 1
        if any(last.get(v) == "free" and v not in held for v in region.ops[i].reads):
            return False
        held.update(region.ops[i].writes)
    return n == len(moves) and "send" not in last.values()
