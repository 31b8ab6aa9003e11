"""Where the nodes of a directed acyclic graph are drawn, and the ways of its edges: in layers from top to bottom.

Sugiyama, Tagawa and Toda, "Methods for visual understanding of hierarchical system structures" (1981): layers of a
bounded number of nodes, places for the edges that pass them by, few crossings by barycentres, then coordinates.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import networkx as nx

ABREAST = 3  # nodes of a layer
SWEEPS = 8
STRAIGHTENED = 60
GAP, LANE = 16.0, 10.0  # between neighbours; width of an edge that passes by
PULL = (4.0, 1.0, 12.0)  # of a node on a node, between a node and an edge that passes by, along such an edge

Place = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Layout:
    """Coordinates, downwards and to the right.

    Attributes:
        places: the middle of each node's upper edge.
        ways: for each edge, the middles of what it passes, from the lower edge of its source to its target.
        width, height: of everything.
    """

    places: dict[Hashable, Place]
    ways: dict[tuple[Hashable, Hashable], list[Place]]
    width: float
    height: float


def layout(graph: nx.DiGraph, wide: float, tall: float, between: float) -> Layout:
    """Lay out a graph whose nodes stand in a topological order. O(SWEEPS * (nodes + edges)), edges counted by layer.

    Args:
        graph: acyclic.
        wide: of a node.
        tall: of a node.
        between: layers.
    """
    layer = _layers(graph)
    rows: list[list[Hashable]] = [[] for _ in range(max(layer.values(), default=-1) + 1)]
    for node, at in layer.items():
        rows[at].append(node)
    up: dict[Hashable, list[Hashable]] = defaultdict(list)
    down: dict[Hashable, list[Hashable]] = defaultdict(list)
    chains: dict[tuple[Hashable, Hashable], list[Hashable]] = {}
    for source in graph:
        reach = max((layer[t] for t in graph.successors(source)), default=0)
        lane: list[Hashable] = [(source, at) for at in range(layer[source] + 1, reach)]  # one for all edges of a source
        for at, passed in enumerate(lane, layer[source] + 1):
            rows[at].append(passed)
        links = list(zip([source, *lane], lane, strict=False))
        for target in graph.successors(source):
            chains[source, target] = [source, *lane[: layer[target] - layer[source] - 1], target]
            links.append((chains[source, target][-2], target))
        for a, b in dict.fromkeys(links):
            down[a].append(b)
            up[b].append(a)
    for sweep in range(SWEEPS):
        beside = down if sweep % 2 else up
        for row in reversed(rows) if sweep % 2 else rows:
            _order(row, beside, rows)
    size = {node: wide if node in graph else LANE for row in rows for node in row}
    x = _coordinates(rows, size, up, down)
    left = min((x[n] - size[n] / 2 for n in x), default=0.0)
    right = max((x[n] + size[n] / 2 for n in x), default=0.0)
    places = {n: (x[n] - left, at * (tall + between)) for at, row in enumerate(rows) for n in row}
    ways = {}
    for edge, chain in chains.items():
        way = [(places[chain[0]][0], places[chain[0]][1] + tall)]
        for passed in chain[1:-1]:
            px, py = places[passed]
            way += [(px, py), (px, py + tall)]
        ways[edge] = [*way, places[chain[-1]]]
    height = len(rows) * (tall + between) - between
    return Layout({n: places[n] for n in graph}, ways, right - left, max(height, 0.0))


def _layers(graph: nx.DiGraph) -> dict[Hashable, int]:
    """A layer for each node, below all that it comes from, the first one that is not full."""
    layer: dict[Hashable, int] = {}
    full: dict[int, int] = defaultdict(int)
    for node in graph:
        at = max((layer[p] + 1 for p in graph.predecessors(node)), default=0)
        while full[at] >= ABREAST:
            at += 1
        layer[node] = at
        full[at] += 1
    # what has nothing above it goes next to what it leads to
    for node in graph:
        below = [layer[s] for s in graph.successors(node)]
        if not graph.in_degree(node) and below and full[min(below) - 1] < ABREAST and min(below) - 1 > layer[node]:
            full[layer[node]] -= 1
            layer[node] = min(below) - 1
            full[layer[node]] += 1
    used = {at: new for new, at in enumerate(sorted(set(layer.values())))}
    return {node: used[at] for node, at in layer.items()}


def _order(row: list[Hashable], beside: dict[Hashable, list[Hashable]], rows: Sequence[Sequence[Hashable]]) -> None:
    """Sort a row by the middle of what its nodes are linked with, as a share of the row that is in."""
    place = {n: (at + 0.5) / len(r) for r in rows for at, n in enumerate(r)}

    def middle(node: Hashable) -> float:
        linked = [place[n] for n in beside[node]]
        return sum(linked) / len(linked) if linked else place[node]

    row.sort(key=middle)


def _coordinates(
    rows: Sequence[Sequence[Hashable]],
    size: dict[Hashable, float],
    up: dict[Hashable, list[Hashable]],
    down: dict[Hashable, list[Hashable]],
) -> dict[Hashable, float]:
    """The middle of each node: near what it is linked with, no two of a row closer than they are wide."""
    x: dict[Hashable, float] = {}
    for row in rows:
        at = -sum(size[n] + GAP for n in row) / 2
        for n in row:
            x[n] = at + size[n] / 2
            at += size[n] + GAP
    for sweep in range(STRAIGHTENED):
        for row in reversed(rows) if sweep % 2 else rows:
            wanted, weights = [], []
            for n in row:
                pulls = [(x[m], PULL[(size[n] == LANE) + (size[m] == LANE)]) for m in (*up[n], *down[n])]
                weight = sum(pull for _, pull in pulls)
                wanted.append(sum(at * pull for at, pull in pulls) / weight if weight else x[n])
                weights.append(weight or 1.0)
            x.update(zip(row, _apart(wanted, weights, [size[n] for n in row]), strict=True))
    return x


def _apart(wanted: Sequence[float], weights: Sequence[float], sizes: Sequence[float]) -> list[float]:
    """The places nearest to those wanted, by least squares, in the same order and apart: pooled adjacent violators."""
    offsets = [0.0]
    for a, b in pairwise(sizes):
        offsets.append(offsets[-1] + (a + b) / 2 + GAP)
    pools: list[tuple[float, float, int]] = []
    for want, weight, offset in zip(wanted, weights, offsets, strict=False):
        pool = (want - offset, weight, 1)
        while pools and pools[-1][0] > pool[0]:
            mean, heavy, count = pools.pop()
            both = heavy + pool[1]
            pool = ((mean * heavy + pool[0] * pool[1]) / both, both, count + pool[2])
        pools.append(pool)
    starts = [mean for mean, _, count in pools for _ in range(count)]
    return [start + offset for start, offset in zip(starts, offsets, strict=False)]
