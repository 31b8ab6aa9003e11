"""The survey of models: its models build, and its rows say what happened."""

import json
import math
import sys
from dataclasses import asdict, replace

import pytest
import torch

from benchmarks import models
from benchmarks.models import listed
from benchmarks.models_report import libraries_page, page
from benchmarks.survey import Row, differing, error, survey
from benchmarks.zoo import FAMILIES, LIBRARIES, build, cases
from benchmarks.zoo.case import Case

NAMES = [(family, name) for family in FAMILIES for name in cases(family)]


def test_every_name_is_there_once():
    names = [name for _, name in NAMES]
    assert len(names) == len(set(names)) >= 80
    assert len(cases("plain")) >= 20


def test_libraries_that_are_not_here_are_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    monkeypatch.delitem(sys.modules, "benchmarks.zoo.libraries.timm", raising=False)
    todo, absent = listed(("timm", "plain"))
    assert absent.keys() == {"timm"}
    assert {family for family, _ in todo} == {"plain"}
    row = asdict(Row("plain/perceptron", "plain", "Sequential", "refused", why="no"))
    report = {"date": "2026-01-01", "versions": {"timm": "1"}, "skipped": absent}
    text = libraries_page({**_report_of(row), **report})
    assert f"timm was skipped ({absent['timm']})" in text
    assert "timm 1" in text


def test_the_version_of_a_library_that_is_not_here_is_that_of_its_rows(monkeypatch, tmp_path):
    here = {"timm": "2", "torchaudio": "1"}
    monkeypatch.setattr(models, "versions", lambda families: dict(here))
    survey = replace(models.OF_LIBRARIES, results=tmp_path / "rows.json", families=("timm", "torchaudio"))
    models.write(survey, {}, {})
    del here["torchaudio"]
    models.write(survey, {}, {"torchaudio": "no such module"})
    assert json.loads(survey.results.read_text())["versions"] == {"timm": "2", "torchaudio": "1"}


@pytest.mark.parametrize("family", LIBRARIES)
def test_the_models_of_a_library_have_names(family):
    pytest.importorskip("dynamic_network_architectures" if family == "nnunet" else family)
    assert all(name.startswith(f"{family}/") for name in cases(family))


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


def test_the_row_of_a_model_that_can_be_planned(short_searches):
    row = survey("plain", "perceptron")
    assert (row.verdict, row.bitwise, row.regions, row.feasible) == ("planned", True, 1, True), row
    assert 0 < row.measured_bytes <= row.budget_bytes < row.baseline_bytes
    assert row.parameters == 6 * (128 * 128 + 128)
    assert "perceptron" in page(_report(row))


def test_a_model_is_planned_for_what_its_loss_turns_out_to_hold(short_searches, monkeypatch):
    def build(family, name):
        targets = torch.zeros(512, 64)
        model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(6)], torch.nn.Tanh())
        return Case(model, {"input": torch.randn(512, 64)}, lambda y: ((y - targets).exp() * targets).sum())

    monkeypatch.setattr("benchmarks.survey.build", build)
    monkeypatch.setattr("benchmarks.survey.SHARE", 0.1)
    row = survey("plain", "with targets")
    assert (row.verdict, row.bitwise, row.feasible) == ("planned", True, False), row
    assert row.measured_bytes <= row.budget_bytes


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
    return _report_of(asdict(row))


def _report_of(row):
    return {"device": "", "platform": "", "torch": "", "pairs": 5, "models": [row]}
