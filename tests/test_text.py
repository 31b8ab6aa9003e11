"""A plan as text: its figures are the plan's, its bars are where they belong, and it fits the page."""

import re

import pytest
import torch
from torch import nn

from planner import plan
from planner.errors import gb
from planner.report.terminal import BARS, Style
from planner.report.text import sparkline, summary
from planner.report.words import cells, clip, pad, wrapped
from tests.plans import changed


@pytest.fixture(scope="module")
def tight():
    model = nn.Sequential(*[layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.GELU())])
    return plan(model, torch.zeros(512, 64), budget_gb=0.0016, loss_fn=torch.Tensor.mean, solver="chen")


def in_bytes(text):
    size, unit = re.fullmatch(r"([\d.]+) (bytes|kB|MB|GB)", text.strip()).groups()
    return float(size) * {"bytes": 1, "kB": 2**10, "MB": 2**20, "GB": 2**30}[unit]


def test_the_figures_are_the_plans(tight):
    lines = str(tight).splitlines()
    assert re.match(r"Fits: peak ([\d.]+ \w+) of ([\d.]+ \w+), ([\d.]+)% more time", lines[0])
    rows = {line[:12].strip(): line[-12:] for line in lines if set(line) & set(BARS)}
    assert in_bytes(rows.pop("total")) == pytest.approx(tight.peak_bytes, rel=0.01)
    assert {"kept", "recomputed"} <= rows.keys()
    rows["passing"] = rows.pop("temporary", gb(max(m.held.passing for m in tight.timeline)))
    for kind, most in rows.items():
        assert in_bytes(most) == pytest.approx(max(getattr(m.held, kind) for m in tight.timeline), rel=0.01)
    table = lines[next(i for i, line in enumerate(lines) if line.startswith("module")) + 1 :]
    kept = sum(d.nbytes for d in tight.decisions if d.action == "keep")
    assert sum(in_bytes(line[45:55]) for line in table) == pytest.approx(kept, rel=0.01)


def test_bars_are_as_high_as_what_is_held(tight):
    held = [m.held_bytes for m in tight.timeline]
    bars = sparkline(held, len(held), tight.budget_bytes)
    for size, bar in zip(held, bars, strict=True):
        assert abs(BARS.index(bar) / 7 - size / tight.budget_bytes) <= 0.5 / 7
    few = sparkline(held, 10, tight.budget_bytes)
    assert len(few) == 10
    assert BARS.index(max(few)) == BARS.index(max(bars))  # the peak is not averaged away
    assert sparkline([], 5) == ""
    assert sparkline([0, 0], 5) == "  "


def test_what_does_not_fit_says_so(tight):
    over = changed(tight, budget_bytes=tight.peak_bytes - 1)
    assert str(over).startswith("Does not fit: ")
    assert summary(over.record, Style(colour=True)).startswith("\x1b[31mDoes not fit")


def test_a_string_is_plain_wherever_it_is_made(tight, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b[" in tight.summary()
    assert "\x1b[" not in f"{tight}{tight.explain('')}"
    coloured = re.sub(r"\x1b\[\d+m", "", tight.summary())
    assert coloured == str(tight) == tight.summary(colour=False)


def test_long_names_take_time_in_proportion():
    marks = "a" + "\u0301" * 10**5
    assert clip("b" * 50 + marks, 40) == "..." + "b" * 36 + marks
    assert "".join(wrapped("x" * 10**6)) == "x" * 10**6


def test_columns_hold_names_of_any_width():
    for text in ("層" * 30, "a" * 90, "é" * 30, "e\u0301" * 60, ""):
        assert cells(pad(text, 40)) in (39, 40)  # a wide character may not fill the last column
        assert cells(clip(text, 40)) <= 40
        for line in wrapped(f"{text} and {text}", indent="    ", first="  "):
            assert cells(line) <= 80
        assert "".join(wrapped(text)).replace(" ", "") == text
