"""The examples run, and a plan changes nothing that they print."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(name, *arguments):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(EXAMPLES.parent)}
    command = [sys.executable, EXAMPLES / name, *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)


def losses(ran):
    assert ran.returncode == 0, ran.stderr
    return [line for line in ran.stdout.splitlines() if ": loss " in line]


def test_plain_loop(tmp_path):
    usual = losses(run("plain_loop.py", "--epochs", 2, "--save", tmp_path / "usual.pt"))
    planned = run("plain_loop.py", "--epochs", 2, "--budget-gb", "0.012", "--save", tmp_path / "planned.pt")
    assert len(usual) == 2
    assert losses(planned) == usual
    assert planned.stderr.count("first step: peak") == 1
    a, b = (torch.load(tmp_path / f"{name}.pt") for name in ("usual", "planned"))
    assert list(a) == list(b)
    for name in a:
        torch.testing.assert_close(a[name], b[name])
    refused = run("plain_loop.py", "--budget-gb", "0.001")
    assert refused.returncode == 1
    assert refused.stderr.startswith("InfeasibleBudgetError: budget_gb=0.001 ")


def test_trainer(tmp_path):
    pytest.importorskip("accelerate")
    usual = losses(run("trainer.py", tmp_path / "usual"))
    assert len(usual) == 4
    planned = losses(run("trainer.py", tmp_path / "planned", "--budget-gb", "0.009"))
    assert planned == usual
    assert (tmp_path / "planned" / "plan.json").exists()
