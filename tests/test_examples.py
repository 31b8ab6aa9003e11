"""The examples run, and a plan changes nothing that they print."""

import logging
import runpy
import sys
from pathlib import Path

import pytest
import torch

from .forked import python, torchrun

pytestmark = pytest.mark.usefixtures("short_searches")

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs an example as a script; gives the losses that it prints."""
    torch.set_num_threads(1)
    log = logging.getLogger("planner")
    monkeypatch.setattr(log, "level", log.level)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def call(name, *arguments):
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return [line for line in capsys.readouterr().out.splitlines() if ": loss " in line]

    yield call
    log.manager._clear_cache()


def test_plain_loop(run, tmp_path, caplog):
    usual = run("plain_loop.py", "--epochs", 2, "--save", tmp_path / "usual.pt")
    planned = run("plain_loop.py", "--epochs", 2, "--budget-gb", "0.012", "--save", tmp_path / "planned.pt")
    assert len(usual) == 2
    assert planned == usual
    assert len([r for r in caplog.records if r.name == "planner" and "first step: peak" in r.message]) == 1
    a, b = (torch.load(tmp_path / f"{name}.pt") for name in ("usual", "planned"))
    assert list(a) == list(b)
    for name in a:
        torch.testing.assert_close(a[name], b[name])
    with pytest.raises(SystemExit, match=r"^InfeasibleBudgetError: budget_gb=0\.001 "):
        run("plain_loop.py", "--budget-gb", "0.001")


@pytest.mark.thorough
def test_trainer(run, tmp_path):
    usual = run("trainer.py", tmp_path / "usual")
    planned = run("trainer.py", tmp_path / "planned", "--budget-gb", "0.0075")
    assert len(usual) == 4
    assert planned == usual
    assert (tmp_path / "planned" / "plan.json").exists()


@pytest.mark.thorough
def test_lightning(run, tmp_path):
    usual = run("lightning_loop.py", tmp_path / "usual")
    planned = run("lightning_loop.py", tmp_path / "planned", "--budget-gb", "0.003")
    assert len(usual) == 8
    assert planned == usual
    assert (tmp_path / "planned" / "plan.json").exists()
    resumed = run("lightning_loop.py", tmp_path / "planned", "--epochs", 3, "--resume")
    assert len(resumed) == 4


@pytest.mark.thorough
def test_fsdp2_on_two_ranks():
    """The second process of torchrun prints nothing, and plans nothing."""

    example = (EXAMPLES / "fsdp2.py", "--steps", "2")
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    planned = python(*launcher, *example, "--budget-gb", "0.0045", OMP_NUM_THREADS="1")
    usual = torchrun(2, *example)
    assert planned.returncode == 0, planned.stderr
    assert [rank.returncode for rank in usual] == [0, 0], usual
    assert usual[0].stdout.count(": loss ") == 2
    assert planned.stdout == usual[0].stdout + usual[1].stdout
    assert planned.stderr.count("first step: peak to the end of the backward pass") == 1
