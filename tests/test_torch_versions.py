"""A torch that was not tested: too old, too new, or without a private part; and where the versions stand."""

import ast
import importlib
import re
import sys
import tomllib
import types
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import planner
from planner import Plan, PlanWarning, TorchError, plan
from planner.compat import self_check, versions

from .test_compat import is_private, pokes

pytestmark = pytest.mark.compat

ROOT = Path(__file__).parent.parent
NOT_TORCH = {"lightning.py"}
ELSEWHERE = {  # read where they are there, written for others to read, or Python's
    "_accelerator_getAllocatorSettings",
    "_cuda_clearCublasWorkspaces",
    "_current_frames",
    "_dynamo_propagated_dynamic_indices",
    "_dynamo_source",
    "_dynamic",
    "_fsdp_param_groups",
    "_getframe",
    "_param_name_to_source",
    "_tensors_no_vc_check",
}


@pytest.fixture
def unchecked(monkeypatch):
    for cached in (self_check._missing, self_check._warn_of_newer):
        cached.cache_clear()
    yield monkeypatch
    monkeypatch.undo()
    for cached in (self_check._missing, self_check._warn_of_newer):
        cached.cache_clear()


def tiny():
    return nn.Linear(2, 1), torch.ones(1, 2)


def test_an_older_torch_is_refused_in_one_sentence_when_planner_is_imported(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.10.1")
    with pytest.raises(
        TorchError, match=r"^planner works with torch 2.11 to [^.]*\.\d+, and torch 2.10.1 is installed"
    ):
        importlib.reload(planner.compat)


def test_a_newer_torch_is_warned_of_once(unchecked):
    unchecked.setattr(torch, "__version__", "99.0.0a0+git")
    with pytest.warns(PlanWarning, match=r"torch 99.0.0a0\+git is newer .* tested with \(2.11 to "):
        plan(*tiny(), budget_gb=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error", PlanWarning)
        plan(*tiny(), budget_gb=1)


def test_a_private_part_that_is_gone_is_named_at_first_use(unchecked, tmp_path):
    model, batch = tiny()
    plan(model, batch, budget_gb=1).save(tmp_path / "plan.json")
    self_check._missing.cache_clear()
    unchecked.setitem(self_check.PARTS, "torch:Tensor", "_version _renamed")
    unchecked.setitem(self_check.PARTS, "torch._ops:Renamed", "_schema")
    words = r"does not have: (torch._ops.Renamed|torch.Tensor._renamed), torch\.\S+. It is known to work with"
    for use in (lambda: plan(model, batch, budget_gb=1), lambda: Plan.load(tmp_path / "plan.json").apply(model)):
        with pytest.raises(TorchError, match=words):
            use()


def test_an_import_that_fails_in_torch_is_put_in_words(monkeypatch):
    class Module(types.ModuleType):
        def __getattr__(self, name):
            raise ImportError("cannot import name '_renamed' from 'torch._x'", name=of)

    monkeypatch.setitem(sys.modules, "planner.api.compare", Module("planner.api.compare"))
    of = "torch._x"
    with pytest.raises(TorchError, match=r"does not have: cannot import name '_renamed' from 'torch._x'. It is known"):
        importlib.reload(planner)
    of = "pulp"
    with pytest.raises(ImportError, match=r"^cannot import name"):
        importlib.reload(planner)


def test_the_self_check_names_every_private_attribute_that_is_read():
    used = set()
    for path in (ROOT / "planner" / "compat").glob("*.py"):
        if path.name not in NOT_TORCH:
            for what in pokes(path.read_text()):
                tree = ast.parse(what.split(": ", 1)[1])
                used.update(n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute))
                used.update(n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str))
    named = {name for names in self_check.PARTS.values() for name in names.split()}
    assert {name for name in used if is_private(name)} - named - ELSEWHERE == set()


def test_the_versions_are_those_that_the_documents_name():
    oldest, *_, newest = versions.TESTED
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert "torch>={}.{}".format(*versions.release(oldest)) in dependencies
    assert list(map(versions.release, versions.TESTED)) == sorted(map(versions.release, versions.TESTED))
    assert f"torch {versions.tested_in_words()}" in (ROOT / "README.md").read_text()
    assert re.search(r"^TESTED = \(\"", (ROOT / "planner/compat/versions.py").read_text(), re.MULTILINE)  # for make
    assert versions.release(newest) >= versions.release("2.15")
