"""The step as a graph of ops, coloured by the plan's decisions: SVG, DOT, or networkx."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import accumulate, groupby
from typing import Any

import networkx as nx

from planner.core.plan import VARIABLES, BaselineMoment, PlanRecord
from planner.errors import OptionError, gb
from planner.report.graph_layout import layout
from planner.report.names import folded, lines_of, modules_of, title
from planner.report.svg import ACTIONS, MICRO, escape, legend, number, svg, swatch, text, width_of
from planner.report.words import clip, duration, shown

MOST = 40  # nodes of a drawing
TOGETHER = 10  # parts of a long list of layers
WIDE, TALL = 168.0, 58.0  # of a node's box
FORMATS = ("svg", "dot", "networkx")


class Drawing(str):
    """SVG as text; in Jupyter, drawn."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"<SVG of {len(self)} characters>"  # beside the drawing in a notebook's file, the text is there twice

    def _repr_html_(self) -> str:
        return str(self)


@dataclass(frozen=True, slots=True)
class Node:
    """An op of the forward pass, or several that follow on one another.

    Attributes:
        ops: positions in the baseline timeline.
        name: its label.
        more: its whole name and source line, for a title.
        place: the files and lines that make it; empty where they are not known.
        sizes: bytes of its results, by the decision for them, as in `ACTIONS`.
        seconds: of one run.
        outside: whether it belongs to another module than the drawn one.
    """

    ops: tuple[int, ...]
    name: str
    more: str
    place: str
    sizes: Mapping[str, int]
    seconds: float
    outside: bool = False

    @property
    def action(self) -> str:
        """The decision for most of its bytes."""
        chosen = [(size, action) for action, size in self.sizes.items() if action and size]
        return max(chosen)[1] if chosen else ""

    @property
    def facts(self) -> str:
        """Its bytes and seconds, in words."""
        size = sum(self.sizes.values())
        return f"{gb(size) if size else 'in place'} · {duration(self.seconds, MICRO)}"


def graph(plan: PlanRecord, module: str | None, format: str) -> Any:
    """See `Plan.graph`."""
    if format not in FORMATS:
        raise OptionError(f"format {format!r} is not known; the known ones are {', '.join(FORMATS)}")
    ops = plan.baseline_timeline
    mine = _members(plan, module)
    if format == "networkx":
        return _networkx(ops, mine)
    drawn = _folded(ops, mine, module)
    return _dot(drawn) if format == "dot" else Drawing(_svg(drawn, module))


def _members(plan: PlanRecord, module: str | None) -> list[int]:
    """The ops of a module. Raises OptionError where there are none."""
    ops = plan.baseline_timeline
    own = (i for i, op in enumerate(ops) if not module or f"{op.module}.".startswith(f"{module}."))
    members = [i for i in own if ops[i].op != VARIABLES]
    if members:
        return members
    known = sorted({path for op in ops for path in accumulate(op.module.split("."), "{}.{}".format)} - {""})
    near = get_close_matches(str(module)[:200], known, 3) or known[:3]
    which = "has no op in this plan" if module in modules_of(plan) else "is no module of the model"
    raise OptionError(f"{str(module)[:200]!r} {which}; the nearest that have one are {', '.join(map(repr, near))}")


def _networkx(ops: Sequence[BaselineMoment], mine: Iterable[int]) -> nx.DiGraph:
    whole = nx.DiGraph()
    for i in mine:
        op = ops[i]
        whole.add_node(
            i,
            title=title(op.module, op.op, op.source),
            op=op.op,
            module=op.module,
            source=op.source,
            phase=op.phase,
            action=op.action or "",
            bytes=op.nbytes,
            seconds=op.seconds,
            runs=op.runs,
        )
    whole.add_edges_from((r, i, {"bytes": ops[r].nbytes}) for i in whole for r in ops[i].reads if r in whole)
    return whole


def _folded(ops: Sequence[BaselineMoment], mine: Sequence[int], module: str | None) -> nx.DiGraph:
    """The graph to draw, whose nodes have a `Node` each: the forward ops, in as much detail as there is room for."""
    forward = [i for i in mine if ops[i].phase == "forward"]
    nodes = [_node(ops, (i,), ops[i].op.strip("_")) for i in forward]
    depth = max((ops[i].module.count(".") + 1 for i in forward), default=1)
    ways = ((at, alike) for at in range(depth, 0, -1) for alike in (True, False))
    while len(nodes) > MOST and (way := next(ways, None)) is not None:
        nodes = _runs(ops, forward, module or "", *way)
    if len(nodes) > MOST:
        rest = tuple(i for node in nodes[MOST - 1 :] for i in node.ops)
        nodes = [*nodes[: MOST - 1], _node(ops, rest, f"{len(nodes) - MOST + 1} more")]
    inside = {i for node in nodes for i in node.ops}
    nodes += _outside(ops, inside, forward)
    nodes.sort(key=lambda node: node.ops[0])
    home = {i: at for at, node in enumerate(nodes) for i in node.ops}
    drawn = nx.DiGraph()
    drawn.add_nodes_from((at, {"node": node}) for at, node in enumerate(nodes))
    for at, node in enumerate(nodes):
        for i in node.ops:
            sources = (home[r] for r in ops[i].reads if r in home)
            drawn.add_edges_from((s, at) for s in sources if s < at and not (nodes[s].outside and node.outside))
    return drawn


def _outside(ops: Sequence[BaselineMoment], inside: set[int], forward: Sequence[int]) -> list[Node]:
    """The ops of other modules that the drawn ops read from."""
    read = sorted({r for i in forward for r in ops[i].reads} - inside)
    return [_node(ops, (r,), title(ops[r].module, ops[r].op, ""), outside=True) for r in read[: MOST // 4]]


def _runs(
    ops: Sequence[BaselineMoment], forward: Sequence[int], module: str, depth: int, treated_alike: bool
) -> list[Node]:
    """A node for the ops in a row of one module, down to some depth, and of modules in a row that are alike.

    Modules are alike if their paths differ only in numbers and the plan decides the same for them. Without
    `treated_alike`, decisions may differ, and a list of such modules is cut into `TOGETHER` nodes at most.
    """
    runs = [
        (path, tuple(run)) for path, run in groupby(forward, key=lambda i: ".".join(ops[i].module.split(".")[:depth]))
    ]

    def alike(run: tuple[str, tuple[int, ...]]) -> tuple[object, ...]:
        return folded(run[0]), tuple((ops[i].op, ops[i].nbytes, ops[i].action) for i in run[1] if treated_alike)

    nodes = []
    for _, group in groupby(runs, key=alike):
        same = list(group)
        size = len(same) if treated_alike else -(-len(same) // TOGETHER)
        for start in range(0, len(same), size):
            paths, members = zip(*same[start : start + size], strict=True)
            first, last = paths[0], paths[-1]
            short = first.removeprefix(f"{module}.") if first != module else first.rpartition(".")[2]
            name = short or "(the model)"
            if len(paths) > 1:
                name += f" to {last.rpartition('.')[2]}" if first != last else f" x{len(paths)}"
            nodes.append(_node(ops, tuple(i for run in members for i in run), name))
    return nodes


def _node(ops: Sequence[BaselineMoment], members: tuple[int, ...], name: str, outside: bool = False) -> Node:
    sizes = dict.fromkeys(ACTIONS, 0)
    for i in members:
        sizes[ops[i].action or ""] += ops[i].nbytes
    one = ops[members[0]]
    place = lines_of(ops[i].source for i in members)
    several = ", ".join(filter(None, (f"{len(members)} ops", place)))
    more = title(one.module, one.op, one.source) if len(members) == 1 else f"{name}: {several}"
    seconds = sum(ops[i].seconds for i in members)
    return Node(members, shown(name), more, shown(place), sizes, seconds, outside)


def _svg(drawn: nx.DiGraph, module: str | None) -> str:
    placed = layout(drawn, _dot(drawn), WIDE, TALL)
    width = max(placed.width + 16, 560)
    dx, dy = (width - placed.width) / 2, 8
    curves = [[(x + dx, y + dy) for x, y in curve] for curve in placed.curves.values()]
    paths = "".join(f"<path d='{_bezier(curve)}'/>" for curve in curves)
    ends = (curve[-1] for curve in curves)
    heads = "".join(f"M{number(x - 3.5)} {number(y - 6)}h7L{number(x)} {number(y)}z" for x, y in ends)
    parts = [
        f"<g data-role='edges' fill='none' stroke='currentColor' stroke-width='1.2' opacity='0.45'>{paths}</g>",
        f"<path d='{heads}' fill='currentColor' fill-opacity='0.6'/>",
    ]
    nodes: list[Node] = [drawn.nodes[at]["node"] for at in drawn]
    for at, node in zip(drawn, nodes, strict=True):
        x, y = placed.places[at]
        parts.append(_box(node, x + dx - WIDE / 2, y + dy))
    used = {node.action for node in nodes}
    entries = [(swatch(colour), words) for action, (colour, words) in ACTIONS.items() if action in used]
    frame = (
        "<rect x='-6' y='-6' width='12' height='12' rx='2' fill='none' stroke='currentColor' stroke-dasharray='4 3'/>"
    )
    entries += [(frame, "of another module")] if any(node.outside for node in nodes) else []
    marks, bottom = legend(entries, 8, placed.height + dy + 32, width)
    return svg(bottom - 8, f"graph of {module or 'the model'}", [*parts, *marks], width=width)


def _bezier(points: Sequence[tuple[float, float]]) -> str:
    (x, y), *rest = points
    return f"M{number(x)} {number(y)}C{' '.join(f'{number(x)} {number(y)}' for x, y in rest)}"


def _box(node: Node, x: float, y: float) -> str:
    colour, place = ACTIONS[node.action][0], node.place.partition(", ")[0]
    place = place or ("" if len(node.ops) == 1 else f"{len(node.ops)} ops")
    dashes = " stroke-dasharray='4 3'" if node.outside else ""
    bar, at = "", x + 1
    total = sum(node.sizes.values())
    for action, size in node.sizes.items():
        wide = (WIDE - 2) * size / total if total else 0.0
        if size and not node.outside:
            corner = f"x='{number(at)}' y='{number(y + TALL - 5)}' width='{number(wide)}' height='4'"
            bar += f"<rect {corner} fill='{ACTIONS[action][0]}'/>"
        at += wide
    frame = f"x='{number(x)}' y='{number(y)}' width='{number(WIDE)}' height='{number(TALL)}' rx='4'"
    return (
        f"<g data-action='{node.action}' data-kept='{node.sizes['keep']}' data-recomputed='{node.sizes['recompute']}'>"
        f"<title>{escape(node.more)}</title>"
        f"<rect {frame} fill='{colour}' fill-opacity='{0.05 if node.outside else 0.16}' stroke='{colour}'{dashes}/>"
        + bar
        + text(x + 9, y + 16, clip(node.name, WIDE - 18, width_of))
        + text(x + 9, y + 31, clip(place, WIDE - 18, width_of), more=" fill-opacity='0.8'")
        + text(x + 9, y + 46, node.facts, more=" fill-opacity='0.8'")
        + "</g>"
    )


def _dot(drawn: nx.DiGraph) -> str:
    """DOT: https://graphviz.org/doc/info/lang.html."""
    lines = ["digraph {", '  node [shape=box, style=filled, fontname="sans-serif", fontcolor=white];']
    for at in drawn:
        node = drawn.nodes[at]["node"]
        place = f"\\n{_quoted(clip(node.place, 60))}" if node.place else ""
        label = f"{_quoted(clip(node.name, 60))}{place}\\n{_quoted(node.facts)}"
        lines.append(
            f'  n{at} [label="{label}", tooltip="{_quoted(node.more)}", fillcolor="{ACTIONS[node.action][0]}"];'
        )
    lines += [f"  n{a} -> n{b};" for a, b in drawn.edges]
    return "\n".join([*lines, "}"]) + "\n"


def _quoted(words: str) -> str:
    return shown(words).replace("\\", "\\\\").replace('"', '\\"')
