"""The numbers on the picture are the numbers of the plan: read back out of the HTML and the SVG."""

import math
import re
import shutil
import warnings
import xml.etree.ElementTree as ET
from contextlib import nullcontext
from dataclasses import replace
from html import unescape
from itertools import combinations, pairwise

import networkx as nx
import pytest
import torch
from torch import nn

from planner import ApplyError, OptionError, PlanWarning, applied_plan, pareto, plan
from planner.cli.commands import facts
from planner.core.plan import Held
from planner.core.verification import Verification
from planner.errors import gb
from planner.planning.curve import blocks_of
from planner.report.answer import least_overhead
from planner.report.curve import words_of
from planner.report.graph_layout import WIDEST, layout
from planner.report.names import line_of
from planner.report.svg import ACTIONS, BUDGET, KINDS
from solvers import every_op_once, simulate, validate
from solvers.search.blocks import checkpointed
from solvers.search.quick_curve import quick_curve
from tests.plans import changed

from .pictures import HOSTILE, pictures, square, without_graphviz
from .problems import random_training_graph

pytestmark = pytest.mark.usefixtures("short_searches")

NAMES = ["gpt2", "everything kept", "eager", "regions", "hostile"]
SVG = "{http://www.w3.org/2000/svg}"


def drawings(name):
    """The timeline and the curve of a plan."""
    html = pictures()[name][0]._repr_html_()
    found = [ET.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", html, flags=re.DOTALL)]
    timeline, curve, *_ = [svg for svg in found if svg.get("role") == "img"]
    return timeline, curve


def axis(svg, data, along):
    """What turns a place into a number, by two ticks of an axis."""
    ticks = [(float(t.get(data)), float(t.get(along))) for t in svg.iter(f"{SVG}text") if t.get(data)]
    (n0, at0), (n1, at1) = ticks[0], ticks[-1]
    return lambda at: n0 + (at - at0) / (at1 - at0) * (n1 - n0)


def corners(path):
    """The corners of a path of M, h and v."""
    x = y = 0.0
    for command, first, second in re.findall(r"([Mhv])([\d.-]+)(?: ([\d.-]+))?", path):
        x = float(first) if command == "M" else x + float(first) * (command == "h")
        y = float(second) if command == "M" else y + float(first) * (command == "v")
        yield x, y


def highest(svg, kind, height):
    (path,) = [p for p in svg.iter(f"{SVG}path") if p.get("data-kind") == kind]
    return height(min(y for _, y in corners(path.get("d"))))


@pytest.mark.parametrize("name", NAMES)
def test_the_sums_over_kinds_are_what_is_held(name):
    p, _ = pictures()[name]
    held = [sum(m.held) for m in p.timeline]
    assert max(held) == p.peak_bytes
    assert max(m.held_bytes for m in p.baseline_timeline) == p.baseline_peak_bytes
    assert all(size >= 0 for m in p.timeline for size in m.held)
    if p.problem is not None:
        assert held == list(simulate(p.problem, p.schedule).held)
        assert [m.held_bytes for m in p.baseline_timeline] == list(simulate(p.problem, every_op_once(p.problem)).held)
    assert sum(m.seconds for m in p.timeline) == pytest.approx(p.step_seconds)


@pytest.mark.parametrize("name", NAMES)
def test_what_the_kinds_are(name):
    """Against what is known otherwise: parameters by their storage, gradients by theirs, what is kept by decisions."""
    p, model = pictures()[name]
    parameters = sum(q.untyped_storage().nbytes() for q in model.parameters())
    assert {m.held.parameters for m in p.timeline} == {p.account["parameters"] + p.account["buffers"]}
    assert p.account["parameters"] == parameters
    ends = [m for m in p.timeline if m.phase == "backward"][-1]
    if name != "eager":  # there autograd holds parts of sums longer
        assert ends.held.gradients == parameters
    between = [m for m in p.timeline if m.phase == "forward"][-1].held
    assert between.gradients == between.backward == 0
    assert (p.overhead > 0) == any(m.held.recomputed for m in p.timeline)
    kept = sum(d.nbytes for d in p.decisions if d.action == "keep")
    again = sum(d.nbytes for d in p.decisions if d.action != "keep")  # of which some were made a last time before
    assert kept * 0.65 <= between.kept <= kept * 1.35 + again
    assert not any(re.search(r"_\d+$", m.op) for m in p.timeline)


@pytest.mark.parametrize("name", NAMES)
def test_the_timeline(name):
    p, _ = pictures()[name]
    svg, _ = drawings(name)
    height = axis(svg, "data-tick-bytes", "y")
    ticks = [t for t in svg.iter(f"{SVG}text") if t.get("data-tick-bytes")]
    offset = height(float(ticks[0].get("y")) - 4)  # words stand a little below their place

    def size(y):
        return height(y) - offset

    pixel = abs(height(1) - height(0))
    top = next(kind for kind in reversed(Held._fields) if any(getattr(m.held, kind) for m in p.timeline))
    assert highest(svg, top, size) == pytest.approx(p.peak_bytes, abs=pixel)
    resident = p.timeline[0].held.parameters
    assert highest(svg, "parameters", size) == pytest.approx(resident, abs=pixel)
    assert int(svg.get("data-peak-bytes")) == p.peak_bytes
    lines = [e for e in svg.iter(f"{SVG}line") if e.get("data-budget-bytes")]
    if name == "everything kept":
        assert lines == []
    else:
        assert size(float(lines[0].get("y1"))) == pytest.approx(p.budget_bytes, abs=pixel)
        assert highest(svg, "unplanned", size) == pytest.approx(p.baseline_peak_bytes, abs=pixel)
    at_peak = {e.get("data-kind"): int(e.get("data-bytes-at-peak")) for e in svg.iter() if e.get("data-bytes-at-peak")}
    assert sum(at_peak.values()) == p.peak_bytes


@pytest.mark.parametrize("name", NAMES)
def test_the_curve(name):
    p, _ = pictures()[name]
    _, svg = drawings(name)
    marks = [g for g in svg.iter(f"{SVG}g") if g.get("data-role")]
    (own,) = [g for g in marks if g.get("data-role") == "chosen"]
    assert (int(own.get("data-bytes")), float(own.get("data-overhead"))) == (p.peak_bytes, p.overhead)
    right, up = axis(svg, "data-tick-bytes", "x"), axis(svg, "data-tick-overhead", "y")
    for g in marks:
        x, y = map(float, re.findall(r"[\d.-]+", g.get("transform")))
        assert right(x) == pytest.approx(int(g.get("data-bytes")), abs=abs(right(1) - right(0)))
        assert up(y + 4) == pytest.approx(float(g.get("data-overhead")), abs=abs(up(1) - up(0)))


@pytest.mark.parametrize("name", NAMES)
def test_the_bound_is_the_same_in_words_and_in_the_drawing(name):
    p, _ = pictures()[name]
    words = p.summary(colour=False).partition("Without")[0]
    own, least = f"{p.overhead:.1%}", f"{least_overhead(p.record):.1%}"
    said = "no extra time" if own == "0.0%" else "the least possible" if own == least else f"at least {least}"
    assert said in " ".join(words.split()) or least == "0.0%"
    if p.problem is None:
        return

    def proven(budget):
        return max(b.overhead for b in p.curve.bound if b.peak_bytes >= budget)

    assert proven(p.budget_bytes) == pytest.approx(least_overhead(p.record), abs=1e-9)
    assert all(q.overhead >= proven(q.peak_bytes) - 1e-9 for q in p.curve.points)


@pytest.mark.parametrize("name", NAMES)
def test_pictures_say_of_what_they_are_and_what_a_plan_does_at_each_peers_peak(name):
    p, model = pictures()[name]
    html = unescape(p._repr_html_())
    size = re.search(rf"{type(model).__name__} \(([\d.]+) (\w?) ?parameters\), batch [\dx]+ \w+", html)
    unit = {"": 1, "k": 1e3, "M": 1e6}[size[2]]
    assert float(size[1]) * unit == pytest.approx(sum(q.numel() for q in model.parameters()), rel=0.01)
    assert f"{p.device}, budget {gb(p.budget_bytes)}" in html
    plans = [(p.peak_bytes, p.overhead), *((q.peak_bytes, q.overhead) for q in p.curve.points)]
    for peer in p.curve.peers:
        least = min((overhead for peak, overhead in plans if peak <= peer.peak_bytes), default=math.inf)
        if said := re.search(rf">{re.escape(words_of(peer))} \(a plan: \+([\d.]+)%\)<", html):
            assert float(said[1]) == pytest.approx(100 * least, abs=0.05)
        else:
            assert not peer.overhead or f"{least:.1%}" >= f"{peer.overhead:.1%}" or least > peer.overhead


@pytest.mark.parametrize("name", NAMES)
def test_the_tables_and_the_answer(name):
    p, _ = pictures()[name]
    html = p._repr_html_()
    assert re.search(r"<b>Fits: peak ([^,]*),", html)[1] == f"{gb(p.peak_bytes)} of {gb(p.budget_bytes)}"
    for action, column in (("keep", "kept"), ("recompute", "recomputed")):
        sizes = [int(n) for n in re.findall(rf"data-module='[^']*'[^>]* data-{column}='(\d+)'", html)]
        assert sum(sizes) == sum(d.nbytes for d in p.decisions if d.action == action)
    paid = [float(s) for s in re.findall(r"data-module='[^']*'[^>]* data-seconds='([^']*)'", html)]
    assert sum(paid) == pytest.approx(sum(d.recompute_seconds for d in p.decisions))
    lines = [int(n) for n in re.findall(r"data-line='[^']*' data-bytes='(\d+)'", html)]
    assert sum(lines) == p.peak_bytes


@pytest.fixture(params=["graphviz", "rows"])
def laid_out(request):
    """Both ways to lay out a graph: by Graphviz, and in rows where it is not installed."""
    if request.param == "graphviz" and shutil.which("dot") is None:
        pytest.skip("Graphviz is not installed: apt-get install graphviz")
    with without_graphviz() if request.param == "rows" else nullcontext():
        yield request.param


def test_names_are_escaped_and_small(laid_out):
    p, _ = pictures()["hostile"]
    for text in (p._repr_html_(), p.to_html(), p.graph(), p.graph(HOSTILE)):
        assert "<script" not in text.lower()
        assert len(text) < 300_000
    dot = p.graph(format="dot")
    assert all(re.fullmatch(r"(  .*;)|digraph \{|\}", line) for line in dot.splitlines())
    assert "alert" in p._repr_html_()


def test_eighty_layers_take_little_room():
    p, _ = pictures()["gpt2"]
    layers = [replace(d, module=d.module.replace(".h.1", f".h.{n}")) for n in range(80) for d in p.decisions]
    several = [replace(m, held=m.held._replace(kept=m.held.kept * n)) for n in range(1, 80) for m in p.timeline]
    peak = max(m.held_bytes for m in several)
    q = changed(p, timeline=tuple(several), decisions=tuple(layers), peak_bytes=peak, budget_bytes=peak)
    html = q._repr_html_()
    assert len(html) < 150_000
    assert re.search(r"layers 0–79, \d patterns", html)


def test_what_a_real_step_showed():
    p, _ = pictures()["regions"]
    assert "not verified on a real step" in p._repr_html_()
    seen = Verification(p.peak_bytes, p.budget_bytes + 2**20, None, p.budget_bytes, 0.0, True, 1.0, None)
    q = changed(p, verification=seen)
    html = q._repr_html_()
    assert f"<b>Does not fit: peak {gb(p.budget_bytes + 2**20)} of" in html
    assert f"a real step took {gb(p.budget_bytes + 2**20)}" in html
    assert str(q).startswith(f"Does not fit: peak {gb(p.budget_bytes + 2**20)} of")
    assert not facts(q)["fits"]
    assert facts(q)["measured_peak_bytes"] == p.budget_bytes + 2**20


@pytest.mark.parametrize(
    "figures",
    [
        {"budget_bytes": 0, "overhead": 0.0},
        {"budget_bytes": 2**62, "overhead": 1e300, "gap": float("inf")},
        {"timeline": (), "baseline_timeline": (), "decisions": (), "account": {}, "peak_bytes": 0},
        {"peak_bytes": 2**62, "baseline_peak_bytes": 1, "step_seconds": 0.0},
        {"overhead": -0.5, "peak_bytes": 1},
    ],
)
def test_odd_figures_are_drawn(figures):
    p, _ = pictures()["eager"]
    for svg in re.findall(r"<svg.*?</svg>", changed(p, **figures)._repr_html_(), flags=re.DOTALL):
        ET.fromstring(svg)


def test_the_same_plan_is_drawn_the_same():
    p, _ = pictures()["regions"]
    assert p._repr_html_() == p._repr_html_()


def test_what_repeats_is_found_and_checkpointed():
    p, _ = pictures()["gpt2"]
    problem = p.problem.with_budget(None)
    blocks = blocks_of(p.baseline_timeline[: problem.boundary])
    assert [path.rpartition(".")[2] for path in blocks] == ["0", "1", "2"]
    schedule = checkpointed(problem, list(blocks.values()))
    timeline = validate(problem, schedule)
    assert timeline.peak < simulate(problem, every_op_once(problem)).peak
    again = schedule.steps[problem.boundary :]
    assert {i for i in again if i < problem.boundary} <= {i for ops in blocks.values() for i in ops}
    assert len(again) == len(set(again))  # each at most once


@pytest.mark.parametrize("seed", range(4))
def test_a_sketch_is_within_its_bounds(seed):
    """Points are schedules' own; no schedule of the exact solver beats a bound."""
    from solvers import solve

    problem = random_training_graph(seed, 4)
    rough = quick_curve(problem, points=3)
    assert [peak for peak, _ in rough.points] == sorted({peak for peak, _ in rough.points})
    assert all(a[1] > b[1] for a, b in pairwise(rough.points))
    assert rough.points[-1][1] == pytest.approx(problem.total_cost)
    for budget, bound in rough.bounds:
        if budget >= rough.points[0][0]:
            exact = solve(problem.with_budget(budget), "ilp")
            assert exact.timeline.cost >= bound - 1e-9


def test_plans_of_a_curve_show_that_curve():
    model = nn.Sequential(*[layer for _ in range(3) for layer in (nn.Linear(64, 64), nn.GELU())])
    plans = pareto(model, torch.zeros(64, 64), points=3, time_limit=0.5, loss_fn=square, progress=False)
    for p in plans:
        assert p.curve.about == "3 plans of pareto()"
        assert {q.peak_bytes for q in p.curve.points} <= {q.peak_bytes for q in plans}


def test_graph_of_ops(laid_out):
    p, _ = pictures()["gpt2"]
    whole = p.graph(format="networkx")
    assert nx.is_directed_acyclic_graph(whole)
    assert len(whole) == len(p.baseline_timeline)
    assert sum(d["seconds"] * d["runs"] for _, d in whole.nodes(data=True)) == pytest.approx(p.step_seconds)
    block = "a_language_model_with_a_rather_long_name_of_its_own.transformer.h.1"
    part = p.graph(block, format="networkx")
    assert {d["module"].startswith(block) for _, d in part.nodes(data=True)} == {True}
    assert {d["action"] for _, d in part.nodes(data=True)} == {"keep", "recompute", ""}
    svg = ET.fromstring(p.graph(block))
    boxes = [g for g in svg.iter(f"{SVG}g") if g.get("data-action") is not None]
    recomputed = sum(d["bytes"] for _, d in part.nodes(data=True) if d["action"] == "recompute")
    assert sum(int(g.get("data-recomputed")) for g in boxes if "dasharray" not in ET.tostring(g).decode()) == recomputed
    assert ACTIONS["recompute"][0] in ET.tostring(svg).decode()
    whole = p.graph(f"{block}.mlp", format="networkx")
    drawn = {t.text for t in ET.fromstring(p.graph(f"{block}.mlp")).iter(f"{SVG}text")}
    lines = {line_of(d["source"]) for _, d in whole.nodes(data=True) if d["phase"] == "forward"} - {""}
    assert lines
    assert lines <= drawn
    several = [t.text for t in ET.fromstring(p.graph()).iter(f"{SVG}title") if " ops" in t.text]
    assert several
    assert all(re.search(r" ops, .*\.py:\d+", text) for text in several)


@pytest.mark.parametrize("name", NAMES)
def test_graphs_are_bounded(name, laid_out):
    p, _ = pictures()[name]
    svg = ET.fromstring(p.graph())
    assert float(svg.get("viewBox").split()[2]) <= WIDEST + 16
    assert 3 <= len([g for g in svg.iter(f"{SVG}g") if g.get("data-action") is not None]) <= 52
    assert p.graph()._repr_html_() == p.graph()


def points(path):
    numbers = list(map(float, re.findall(r"-?[\d.]+", path.get("d"))))
    return list(zip(numbers[::2], numbers[1::2], strict=True))


def along(curve):
    """Points of a chain of cubic Bézier curves, by de Casteljau's definition."""
    for start in range(0, len(curve) - 1, 3):
        for step in range(33):
            t, part = step / 32, curve[start : start + 4]
            while len(part) > 1:
                part = [((1 - t) * a + t * c, (1 - t) * b + t * d) for (a, b), (c, d) in pairwise(part)]
            yield part[0]


MODULES = {"gpt2": "a_language_model_with_a_rather_long_name_of_its_own.transformer.h.1", "hostile": HOSTILE}


@pytest.mark.parametrize(("name", "module"), [*((name, None) for name in NAMES), *MODULES.items()])
def test_edges_go_down_from_box_to_box_and_around_the_others(name, module, laid_out):
    """The edges of the drawing are those of the DOT, whose nodes are the boxes in their order."""
    p, _ = pictures()[name]
    svg, dot = ET.fromstring(p.graph(module)), p.graph(module, format="dot")
    frames = [g.find(f"{SVG}rect") for g in svg.iter(f"{SVG}g") if g.get("data-action") is not None]
    boxes = [tuple(float(frame.get(k)) for k in ("x", "y", "width", "height")) for frame in frames]
    assert len(boxes) == dot.count("[label=")
    for (x0, y0, w0, h0), (x1, y1, w1, h1) in combinations(boxes, 2):
        assert x0 + w0 < x1 or x1 + w1 < x0 or y0 + h0 < y1 or y1 + h1 < y0
    (group,) = [g for g in svg.iter(f"{SVG}g") if g.get("data-role") == "edges"]
    found = set()
    for path in group:
        curve = points(path)
        (x0, y0), (x1, y1) = curve[0], curve[-1]
        (source,) = [i for i, (x, y, w, h) in enumerate(boxes) if abs(x + w / 2 - x0) < 2 and abs(y + h - y0) < 2]
        (target,) = [i for i, (x, y, w, h) in enumerate(boxes) if abs(x + w / 2 - x1) < 2 and abs(y - y1) < 2]
        found.add((source, target))
        way = list(along(curve))
        assert y0 < y1
        assert all(y0 - 2 <= y <= y1 + 2 for _, y in way)
        assert laid_out == "graphviz" or all(a[1] <= b[1] + 0.2 for a, b in pairwise(way))  # its splines swing
        for i, (x, y, w, h) in enumerate(boxes):
            assert i in (source, target) or not any(x + 1 < a < x + w - 1 and y + 1 < b < y + h - 1 for a, b in way)
    assert found == {(int(a), int(b)) for a, b in re.findall(r"n(\d+) -> n(\d+);", dot)}


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("echo no such font >&2; exit 3", "no such font"),
        ("exit 3", "exit status 3"),
        ("echo graph 1 2 2; echo node n0 1 1; echo stop", "other nodes or edges"),
        ("echo node n0 here there", "could not convert"),
        ("printf '\\377'", "can't decode"),
    ],
)
def test_a_graphviz_that_fails_is_named_and_done_without(script, why, tmp_path, monkeypatch):
    p, _ = pictures()["gpt2"]
    with without_graphviz(), warnings.catch_warnings():
        warnings.simplefilter("error")
        expected = p.graph()
    (tmp_path / "dot").write_text(f"#!/bin/sh\ncat >/dev/null\n{script}\n")
    (tmp_path / "dot").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.warns(PlanWarning, match=rf"Graphviz \(.*/dot\) failed, and the graph is drawn without it: .*{why}"):
        assert p.graph() == expected


def test_what_graphviz_draws_too_wide_is_laid_out_in_rows(laid_out):
    """Text on it would be too small to read."""
    graph = nx.DiGraph((0, i) for i in range(1, 30))
    dot = f"digraph {{ node [shape=box]; {' '.join(f'n{a} -> n{b};' for a, b in graph.edges)} }}"
    found = layout(graph, dot, 150, 40)
    assert found.width <= WIDEST
    assert len(set(found.places.values())) == len(graph)
    assert layout(nx.DiGraph(), "digraph {}", 150, 40).places == {}


def test_what_cannot_be_drawn():
    p, _ = pictures()["gpt2"]
    with pytest.raises(OptionError, match=r"'transformer.h.77' is no module of the model; the nearest .*transformer"):
        p.graph("transformer.h.77")
    with pytest.raises(OptionError, match="'png' is not known; the known ones are svg, dot, networkx"):
        p.graph(format="png")
    with pytest.raises(OptionError, match="No such file or directory"):
        p.to_html("/nowhere/plan.html")
    with pytest.raises(OptionError, match="path=5 must be the path of a file"):
        p.to_html(5)


def test_a_plan_that_is_not_made_yet():
    model = nn.Linear(4, 4)
    p = plan(model, budget_gb=1)
    assert "made at the first training step" in p._repr_html_()
    assert "made at the first training step" in p.to_html()
    for what in (p.graph, lambda: p.curve, lambda: p.verification, lambda: p.known_curve):
        with pytest.raises(ApplyError, match="not known yet"):
            what()
    p.apply()
    batch = torch.zeros(2, 4)
    model(batch).sum().backward()
    model.zero_grad()
    assert p.verification is p.known_curve is None
    seen = p.verify()
    assert p.verification is applied_plan(model).verification is seen
    assert f"A real step took {gb(seen.measured_bytes)}" in str(p).replace("\n", " ")
    assert p.repair().verification.within_budget


def luminance(colour):
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear(colour), strict=True))


# what the colour-blind see of linear red, green and blue: Machado, Oliveira and Fernandes 2009, of full severity
SEEN = {
    "all": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "no red": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "no green": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.01182, 0.04294, 0.968881)),
    "no blue": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.3039)),
}


def linear(colour):
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]


def lab(colour, sight):
    """CIE L*a*b*, of daylight."""
    r, g, b = (min(1.0, max(0.0, sum(w * c for w, c in zip(row, linear(colour), strict=True)))) for row in sight)
    white = (0.4124 * r + 0.3576 * g + 0.1805 * b) / 0.9505, 0.2126 * r + 0.7152 * g + 0.0722 * b
    x, y, z = (
        t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116
        for t in (*white, (0.0193 * r + 0.1192 * g + 0.9505 * b) / 1.089)
    )
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


@pytest.mark.parametrize("sight", SEEN)
def test_colours_of_areas_can_be_told_apart_by_all(sight):
    for one, other in combinations([colour for colour, _ in KINDS.values()], 2):
        assert math.dist(lab(one, SEEN[sight]), lab(other, SEEN[sight])) > 15, (one, other)


@pytest.mark.parametrize("page", ["#ffffff", "#0d1117"])
def test_colours_stand_out(page):
    """Web Content Accessibility Guidelines 2.1, 1.4.11: graphics need a contrast of 3 to 1."""
    for colour in {BUDGET, *(c for c, _ in KINDS.values()), *(c for c, _ in ACTIONS.values())}:
        dark, light = sorted((luminance(colour), luminance(page)))
        assert (light + 0.05) / (dark + 0.05) >= 3, colour
