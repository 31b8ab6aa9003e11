"""The survey of models: its models build, and its rows say what happened."""

import math

import pytest
import torch

from benchmarks.models_report import page
from benchmarks.survey import differing, error, survey
from benchmarks.zoo import FAMILIES, build, cases

NAMES = [(family, name) for family in FAMILIES for name in cases(family)]


def test_every_name_is_there_once():
    names = [name for _, name in NAMES]
    assert len(names) == len(set(names)) >= 80
    assert len(cases("plain")) >= 20


@pytest.mark.parametrize("family", FAMILIES)
def test_every_model_of_a_family_builds(family):
    classes = set()
    for name in cases(family):
        if name == "lora":
            pytest.importorskip("peft")
        case = build(family, name)
        assert any(p.requires_grad for p in case.model.parameters()), name
        classes.add(type(case.model))
    libraries = [c.__module__.split(".")[0] for c in classes]
    if family not in ("plain", "awkward"):
        assert set(libraries) <= {"transformers", "diffusers"}
        assert len(libraries) >= 10


def test_the_row_of_a_model_that_can_be_planned():
    row = survey("plain", "perceptron")
    assert (row.verdict, row.bitwise, row.regions, row.feasible) == ("planned", True, 1, True), row
    assert 0 < row.measured_bytes <= row.budget_bytes < row.baseline_bytes
    assert row.parameters == 6 * (128 * 128 + 128)
    assert "perceptron" in page(_report(row))


def test_the_row_of_a_model_that_cannot():
    row = survey("awkward", "double_backward")
    assert row.verdict == "refused", row
    assert row.why.split(":")[0].endswith("Error")
    assert row.measured_bytes is None
    assert row.why in page(_report(row))


def test_a_wrong_result_is_seen():
    right = {"gradient of a": torch.tensor([1.0, -4.0]), "random state": torch.tensor([1, 2])}
    assert differing(right, {n: t.clone() for n, t in right.items()}) == []
    off = {**right, "gradient of a": torch.tensor([1.0, -4.0 + 2**-21])}
    assert differing(off, right) == ["gradient of a"]
    assert error(off, right) == 2**-23
    drawn = {**right, "random state": torch.tensor([1, 3])}
    assert differing(drawn, right) == ["random state"]
    assert error(drawn, right) == math.inf
    assert differing({"gradient of a": right["gradient of a"]}, right) == ["random state"]


def _report(row):
    from dataclasses import asdict

    return {"device": "", "platform": "", "torch": "", "pairs": 5, "models": [asdict(row)]}
