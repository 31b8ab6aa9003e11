"""Where the boxes of a graph are drawn, and the curves of its edges: by Graphviz, or in rows where that is missing.

Graphviz's `dot` (https://graphviz.org; Gansner et al., "A technique for drawing directed graphs", 1993) is an optional
program. It reads DOT, and answers in its plain format (https://graphviz.org/docs/outputs/plain/): inches, from the
lower left corner. Without it, `networkx.topological_generations` gives the rows.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import networkx as nx

from planner.errors import warn

INCH = 72.0  # units of a drawing
GAP, BETWEEN = 14.0, 24.0  # between neighbours in a row, and between rows
ABREAST = 4  # boxes of a row, without Graphviz
LANE = 9.0  # between edges that pass rows
WIDEST = 1000.0  # a page shrinks wider drawings until their text cannot be read
PATIENCE = 60  # seconds

Place = tuple[float, float]
Edge = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Layout:
    """Coordinates, to the right and downwards from (0, 0).

    Attributes:
        places: the middle of each box's upper edge.
        curves: for each edge, the 3n + 1 control points of n cubic Bézier curves that follow on one another, from the
            middle of its source's lower edge to the middle of its target's upper edge.
        width, height: of the drawing.
    """

    places: Mapping[int, Place]
    curves: Mapping[Edge, Sequence[Place]]
    width: float
    height: float


def layout(graph: nx.DiGraph, dot: str, wide: float, tall: float) -> Layout:
    """Lay out boxes of one size so that edges go downwards and boxes do not overlap.

    Graphviz's layout is taken where the program is installed, works (PlanWarning where it does not), and needs at most
    `WIDEST`.

    Args:
        graph: acyclic; nodes are numbers.
        dot: the same graph as DOT, where node 3 is called "n3".
        wide: width of a box.
        tall: height of a box.
    """
    if (program := shutil.which("dot")) is not None:
        try:
            drawn = _by_graphviz(program, graph, dot, wide, tall)
        except (OSError, subprocess.SubprocessError, ValueError) as e:
            warn(f"Graphviz ({program}) failed, and the graph is drawn without it: {e}")
        else:
            if drawn.width <= WIDEST:
                return drawn
    return _in_rows(graph, wide, tall)


def _by_graphviz(program: str, graph: nx.DiGraph, dot: str, wide: float, tall: float) -> Layout:
    """The layout of `dot`; ValueError where its answer is none of this graph."""
    boxes = [f"-Nwidth={wide / INCH}", f"-Nheight={tall / INCH}", "-Nfixedsize=true"]
    edges = ["-Etailport=s", "-Eheadport=n", "-Edir=none"]
    space = [f"-Gnodesep={GAP / INCH}", f"-Granksep={BETWEEN / INCH}"]
    command = [program, "-q", "-Tplain", *boxes, *edges, *space]
    run = subprocess.run(command, input=dot.encode(), capture_output=True, timeout=PATIENCE)
    if run.returncode:
        raise ValueError(run.stderr.decode(errors="replace").strip()[:500] or f"exit status {run.returncode}")
    places, curves = {}, {}
    for line in run.stdout.decode().splitlines():
        kind, *words = line.split()
        if kind == "node":
            x, y = (float(word) * INCH for word in words[1:3])
            places[int(words[0][1:])] = x, -y - tall / 2
        elif kind == "edge":
            numbers = [float(word) * INCH for word in words[3 : 3 + 2 * int(words[2])]]
            way = zip(numbers[::2], (-y for y in numbers[1::2]), strict=True)
            curves[int(words[0][1:]), int(words[1][1:])] = list(way)
    if places.keys() != set(graph) or curves.keys() != set(graph.edges):
        raise ValueError(f"its answer has other nodes or edges: {run.stdout[:200]!r}")
    return _from_corner(places, curves, wide, tall)


def _in_rows(graph: nx.DiGraph, wide: float, tall: float) -> Layout:
    """Rows from top to bottom; each node stands in the last row that is above all of its successors.

    A generation that is wider than `ABREAST` takes several rows. O(nodes log nodes + edges * nodes).
    """
    places: dict[int, Place] = {}
    rows: list[list[int]] = []
    for generation in reversed(list(nx.topological_generations(graph.reverse(copy=False)))):
        above = {n: [places[p][0] for p in graph.predecessors(n)] for n in generation}
        order = sorted(generation, key=lambda n: (sum(above[n]) / max(len(above[n]), 1), n))
        for start in range(0, len(order), ABREAST):
            members = order[start : start + ABREAST]
            for column, n in enumerate(members):
                places[n] = (column - (len(members) - 1) / 2) * (wide + GAP), len(rows) * (tall + BETWEEN)
            rows.append(members)
    return _from_corner(places, _around(graph, rows, places, wide, tall), wide, tall)


def _around(
    graph: nx.DiGraph, rows: Sequence[Sequence[int]], places: Mapping[int, Place], wide: float, tall: float
) -> dict[Edge, Sequence[Place]]:
    """The curves of edges, which pass the rows between their ends on the right: those of one source in one lane."""
    row = {n: at for at, members in enumerate(rows) for n in members}
    rights = [places[members[-1]][0] + wide / 2 for members in rows]
    curves: dict[Edge, Sequence[Place]] = {}
    lanes: list[int] = []  # the row down to which each lane is taken
    for source in row:
        lane = next((i for i, end in enumerate(lanes) if end <= row[source]), len(lanes))
        if (reach := max((row[t] for t in graph.successors(source)), default=0)) > row[source] + 1:
            lanes[lane : lane + 1] = [reach]
        for target in graph.successors(source):
            (x0, y0), (x1, y1) = (places[source][0], places[source][1] + tall), places[target]
            stops = [(x1, y1)]
            if passed := rights[row[source] + 1 : row[target]]:
                x = max(passed) + LANE * (lane + 1)
                stops = [(x, y0 + BETWEEN), (x, y1 - BETWEEN), *stops]
            curve = [(x0, y0)]
            for x, y in stops:
                middle = (curve[-1][1] + y) / 2
                curve += [(curve[-1][0], middle), (x, middle), (x, y)]
            curves[source, target] = curve
    return curves


def _from_corner(
    places: Mapping[int, Place], curves: Mapping[Edge, Sequence[Place]], wide: float, tall: float
) -> Layout:
    """The same, moved to where nothing is left of or above (0, 0)."""
    corners = [at for x, y in places.values() for at in ((x - wide / 2, y), (x + wide / 2, y + tall))]
    corners = corners or [(0.0, 0.0)]
    xs, ys = zip(*corners, *(at for way in curves.values() for at in way), strict=True)
    left, top = min(xs), min(ys)
    return Layout(
        {n: (x - left, y - top) for n, (x, y) in places.items()},
        {edge: [(x - left, y - top) for x, y in way] for edge, way in curves.items()},
        max(xs) - left,
        max(ys) - top,
    )
