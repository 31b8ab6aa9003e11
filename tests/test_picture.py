"""The numbers on the picture are the numbers of the plan: read back out of the HTML and the SVG."""

import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from itertools import pairwise

import networkx as nx
import pytest
import torch
from torch import nn

from planner import ApplyError, OptionError, applied_plan, pareto, plan
from planner.cli.commands import facts
from planner.core.plan import Held
from planner.errors import gb
from planner.planning.curve import blocks_of
from planner.report.svg import ACTIONS, BUDGET, KINDS
from planner.runtime.verify import Verification
from solvers import every_op_once, simulate, validate
from solvers.search.blocks import checkpointed
from solvers.search.quick_curve import quick_curve

from .pictures import HOSTILE, pictures, square
from .problems import random_training_graph

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
    assert kept == pytest.approx(between.kept, rel=0.35)
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


def test_names_are_escaped_and_small():
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
    q = replace(p, timeline=tuple(several), decisions=tuple(layers), peak_bytes=peak, budget_bytes=peak)
    html = q._repr_html_()
    assert len(html) < 150_000
    assert re.search(r"layers 0–79, \d patterns", html)


def test_what_a_real_step_showed():
    p, _ = pictures()["regions"]
    assert "not verified on a real step" in p._repr_html_()
    seen = Verification(p.peak_bytes, p.budget_bytes + 2**20, None, p.budget_bytes, 0.0, True, 1.0, None)
    q = replace(p, verification=seen)
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
    for svg in re.findall(r"<svg.*?</svg>", replace(p, **figures)._repr_html_(), flags=re.DOTALL):
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


def test_graph_of_ops():
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


@pytest.mark.parametrize("name", NAMES)
def test_graphs_are_bounded(name):
    p, _ = pictures()[name]
    svg = ET.fromstring(p.graph())
    assert 3 <= len([g for g in svg.iter(f"{SVG}g") if g.get("data-action") is not None]) <= 52
    assert p.graph()._repr_html_() == p.graph()


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
    model(torch.zeros(2, 4)).sum().backward()
    model.zero_grad()
    assert p.verification is p.known_curve is None
    seen = p.verify()
    assert p.verification is applied_plan(model).verification is seen
    assert f"A real step took {gb(seen.measured_bytes)}" in str(p).replace("\n", " ")
    assert p.repair().verification.within_budget


def luminance(colour):
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("page", ["#ffffff", "#0d1117"])
def test_colours_stand_out(page):
    """Web Content Accessibility Guidelines 2.1, 1.4.11: graphics need a contrast of 3 to 1."""
    for colour in {BUDGET, *(c for c, _ in KINDS.values()), *(c for c, _ in ACTIONS.values())}:
        dark, light = sorted((luminance(colour), luminance(page)))
        assert (light + 0.05) / (dark + 0.05) >= 3, colour
