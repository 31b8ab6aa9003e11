"""What changed between two plans, counted again from their decisions."""

import re
from collections import Counter

import pytest
import torch
from torch import nn

from planner import OptionError, compare, plan
from planner.core.plan import Decision
from planner.report.words import cells
from tests.plans import changed, for_budget

pytestmark = pytest.mark.usefixtures("short_searches")


def layers(width=64, count=8):
    return nn.Sequential(*[layer for _ in range(count) for layer in (nn.Linear(width, width), nn.Tanh(), nn.GELU())])


def planned(model, batch, share=None, **options):
    options = {"loss_fn": torch.Tensor.mean, "solver": "chen", **options}
    top = plan(model, batch, budget_gb=1, **options)
    return top if share is None else for_budget(top, share * top.peak_bytes / 2**30)


@pytest.fixture(scope="module")
def two():
    model, batch = layers(), torch.zeros(512, 64)
    return planned(model, batch), planned(model, batch, 0.8), model


def test_one_plan_twice(two):
    _, p, _ = two
    c = compare(p, p)
    assert c.modules == ()
    assert c.account == {}
    assert c.differences == {}
    assert c.unchanged == len(p.decisions)
    assert all(f.a == f.b for f in c.facts)
    assert str(c).startswith(f"The plans decide the same for all {len(p.decisions)} saved activations.")


def test_every_number_is_of_one_of_the_plans(two):
    a, b, _ = two
    c = compare(a, b)
    facts = {f.name: (f.a, f.b) for f in c.facts}
    assert facts["budget"] == (a.budget_bytes, b.budget_bytes)
    assert facts["peak"] == (a.peak_bytes, b.peak_bytes)
    assert facts["everything kept"] == (a.baseline_peak_bytes, b.baseline_peak_bytes)
    assert facts["step"] == (a.step_seconds, b.step_seconds)
    assert facts["lower bound of the time"] == (a.bound, b.bound)
    assert facts["more time"] == (a.overhead, b.overhead)
    for name, (ours, theirs) in c.account.items():
        assert (a.account.get(name, 0), b.account.get(name, 0)) == (ours, theirs)
    assert sum(theirs - ours for ours, theirs in c.account.values()) == b.peak_bytes - a.peak_bytes


@pytest.mark.parametrize("backwards", [False, True])
def test_decisions_per_module(two, backwards):
    a, b, _ = two
    if backwards:
        a, b = b, a
    c = compare(a, b)
    assert len(a.decisions) == len(b.decisions)  # of one model and batch: they are in one order
    kept, recomputed = Counter(), Counter()
    for old, new in zip(a.decisions, b.decisions, strict=True):
        assert (old.module, old.nbytes) == (new.module, new.nbytes)
        if old.action != new.action:
            (kept if new.action == "keep" else recomputed)[re.sub(r"\d+", "*", old.module)] += old.nbytes
    assert {m.name: m.now_kept for m in c.modules if m.now_kept} == dict(kept)
    assert {m.name: m.now_recomputed for m in c.modules if m.now_recomputed} == dict(recomputed)
    assert sum(m.seconds for m in c.modules) == pytest.approx(
        sum(d.recompute_seconds for d in b.decisions) - sum(d.recompute_seconds for d in a.decisions)
    )
    assert (kept if backwards else recomputed).total() > 0
    assert c.unchanged == sum(x.action == y.action for x, y in zip(a.decisions, b.decisions, strict=True))


def test_a_row_is_of_the_modules_that_changed(two):
    def decided(*times):
        decisions = [Decision("x", "recompute", 2**20, t, f"layers.{i}", "", op="gelu") for i, t in enumerate(times)]
        return changed(two[1], decisions=tuple(decisions))

    (row,) = compare(decided(1.0, 2.0, 4.0), decided(1.0, 2.5, 4.75)).modules
    assert (row.name, row.count, row.seconds, row.now_recomputed) == ("layers.*", 2, 1.25, 0)
    c = compare(decided(1.0, 2.0), decided(1.0, 3.0))
    assert (c.modules[0].name, c.modules[0].count, c.unchanged) == ("layers.1", 1, 1)
    assert "takes another time; 1 saved activation is" in " ".join(str(c).split())
    assert re.search(r"layers\.1 .* \+1 s", str(c))


def test_another_model_batch_and_device_are_said_first(two):
    a, _, model = two
    wide = planned(model, torch.zeros(1024, 64))
    other = layers(32, 2)
    cases = {
        "batch": (wide, "0 512x64 float32; then 0 1024x64 float32"),
        "model": (planned(other, torch.zeros(512, 32)), "Sequential of 33,280 parameters; then Sequential of 2,112"),
        "device": (planned(model, torch.zeros(512, 64), device="h100"), "cpu; then h100"),
        "mode": (planned(model, torch.zeros(512, 64), mode="eager"), "aten; then eager"),
        "optimizer": (planned(model, torch.zeros(512, 64), optimizer="adamw"), "none; then adamw"),
    }
    for name, (b, said) in cases.items():
        c = compare(a, b)
        assert name in c.differences
        assert f"Other {name}: {said}" in " ".join(str(c).split("\n\n")[0].split())
    c = compare(a, cases["model"][0])
    assert "are in one of the plans only" in " ".join(str(c).split())
    assert sum(m.only_a for m in c.modules) == sum(
        d.nbytes for d in a.decisions if d.module not in {x.module for x in cases["model"][0].decisions}
    )


def test_it_fits_the_page_and_escapes_names():
    name = "層" * 50 + "<script>\x1b\r"
    plans = []
    for i, share in enumerate((None, 0.9)):
        model = nn.Sequential()
        model.add_module(name, layers())
        plans.append(planned(model, torch.zeros(512, 64), share, account_gb={f"{name} weights": 0.001 + i / 1e6}))
    c = compare(*plans)
    assert c.modules
    assert max(map(cells, str(c).splitlines())) <= 80
    assert not set("\x1b\r") & set(str(c) + c._repr_html_())
    assert "<script" not in c._repr_html_()
    assert "&lt;script&gt;" in c._repr_html_()


def test_what_is_no_plan_is_refused(two):
    _, p, model = two
    with pytest.raises(OptionError, match="given 3 of type int"):
        compare(p, 3)
    with pytest.raises(OptionError, match="made at the first training step"):
        compare(plan(model, budget_gb=1), p)
