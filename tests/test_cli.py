"""The command line, as its users meet it: what it prints, its exit status, and that nothing ends in a traceback."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from planner import Plan
from planner.__main__ import main
from planner.errors import CaptureError
from planner.report.terminal import ASCII_BARS, shows_colours, style_of
from planner.report.words import cells, shown

from .forked import python

ROOT = Path(__file__).parent.parent
TRAIN = """
import torch

def make():
    layers = [l for _ in range(8) for l in (torch.nn.Linear(64, 64), torch.nn.GELU())]
    return torch.nn.Sequential(*layers), torch.zeros(512, 64), torch.Tensor.mean

def loud():
    print("making")
    return make()

def raw():
    import os, subprocess
    os.write(1, b"raw ")
    subprocess.run(["echo", "child"])
    return make()

Kind = torch.nn.Linear

def only():
    return make()[0]

def batch():
    return torch.zeros(16, 64)

def named():
    model, batch, loss_fn = make()
    return {"model": model, "batch": batch, "loss_fn": loss_fn, "budget_gb": 1, "solver": "chen"}

def stray():
    return {**named(), "bugdet_gb": 1}

def number():
    return 3

def leaves():
    import sys
    sys.exit("no data here")

class Leaver(torch.nn.Linear):
    def forward(self, x):
        import sys
        sys.exit(0)

def leaver():
    return Leaver(8, 8), torch.zeros(2, 8), torch.Tensor.mean

def leaving_loss():
    return torch.nn.Linear(8, 8), torch.zeros(2, 8), Leaver(8, 8)

def fails():
    return int("no\\x1b[31m\\nnumber")

def stops():
    raise KeyboardInterrupt

model = only()
"""
TIGHT = ["--budget-gb", "0.0016", "--solver", "chen", "--quiet"]


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "broken.py").write_text("def make(:\n")
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    yield
    sys.modules.pop("train", None)


def run(capsys, *arguments):
    capsys.readouterr()
    status = main(arguments)
    return status, *capsys.readouterr()


@pytest.fixture
def saved(capsys):
    """Two plan files of one model."""
    for name, budget in (("a.json", "1"), ("b.json", "0.0016")):
        assert main(["plan", "train.py:make", *TIGHT, "--budget-gb", budget, "--save", name]) == 0
    return "a.json", "b.json"


@pytest.mark.parametrize("target", ["train.py:make", "train:make", "train.py:named"])
def test_plan_says_what_the_plan_says(capsys, target):
    status, out, err = run(capsys, "plan", target, *TIGHT)
    assert status == 0
    assert err == ""
    assert "Fits: peak 1." in out
    assert max(map(cells, out.splitlines())) <= 80
    assert "\x1b" not in out


def test_the_batch_may_come_from_elsewhere(capsys, tmp_path):
    torch.save(torch.zeros(16, 64), tmp_path / "batch.pt")
    for source in ("train.py:batch", "batch.pt"):
        status, out, _ = run(capsys, "plan", "train.py:make", *TIGHT, "--batch-from", source, "--json")
        assert status == 0
        assert json.loads(out)["account"]["batch"] == 16 * 64 * 4


def test_json_is_all_that_is_on_stdout(capsys, saved):
    status, out, err = run(capsys, "plan", "train.py:loud", *TIGHT, "--json")
    data = json.loads(out)
    assert status == 0
    assert err == "making\n"
    assert data["fits"]
    assert data["peak_bytes"] <= data["budget_bytes"] == round(0.0016 * 2**30)
    assert sum(data["account"].values()) == data["peak_bytes"]
    for command in (["show", "b.json"], ["show", "b.json", "--explain", "3"], ["compare", *saved], ["devices"]):
        status, out, _ = run(capsys, *command, "--json")
        assert status == 0
        assert json.loads(out)
    status, out, _ = run(capsys, "pareto", "train.py:named", "--points", "2", "--quiet", "--json", "--time-limit", "1")
    assert [p["fits"] for p in json.loads(out)] == [True, True]


def test_files_are_shown_explained_and_compared(capsys, saved, tmp_path):
    first, second = (Plan.load(path) for path in saved)
    status, out, _ = run(capsys, "show", "b.json", "--html", "page.html")
    assert status == 0
    assert out == second.summary(colour=False) + "\n"
    assert "<svg" in (tmp_path / "page.html").read_text()
    status, out, _ = run(capsys, "show", "b.json", "--explain", "3")
    assert out == f"{second.explain('3')}\n"
    status, out, _ = run(capsys, "plan", "train.py:make", *TIGHT, "--known", "b.json", "--json")
    assert json.loads(out)["peak_bytes"] == second.peak_bytes
    assert "b.json" in json.loads(out)["note"]
    status, out, _ = run(capsys, "compare", *saved)
    assert status == 0
    assert f"{first.budget_bytes / 2**30:.2f} GB" in out
    assert "now recomputed" in out


def test_pareto_and_devices(capsys, monkeypatch):
    status, out, _ = run(capsys, "pareto", "train.py:named", "--points", "3", "--quiet", "--time-limit", "1")
    rows = [line for line in out.splitlines() if line.count("%") == 2]
    assert status == 0
    assert len(rows) == 3
    assert " 0.0%" in rows[-1]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    card = type("Card", (), {"major": 9, "minor": 0, "name": "NVIDIA H200", "total_memory": 2**37})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: card)
    status, out, _ = run(capsys, "devices")
    assert status == 0
    assert "rtx4090" in out
    assert "cuda:0 is NVIDIA H200." in out
    assert max(map(len, out.splitlines())) <= 80


def test_the_version(capsys):
    with pytest.raises(SystemExit) as exit:
        main(["--version"])
    assert exit.value.code == 0
    assert re.fullmatch(r"checkpoint-planner [\w.]+\n", capsys.readouterr().out)


def test_doctor_tries_a_plan(capsys, monkeypatch, short_searches):
    status, out, _ = run(capsys, "doctor")
    assert status == 0
    assert re.search(r"^ok a plan on cpu +made and run; peak .* measured", out, flags=re.MULTILINE)
    assert re.search(r"^ok solver +its annealing is compiled", out, flags=re.MULTILINE)
    assert re.search(rf"^   torch +{re.escape(torch.__version__)}, (not )?tested", out, flags=re.MULTILINE)
    assert max(map(len, out.splitlines())) <= 80

    def refuse(*_, **__):
        raise CaptureError("nothing compiles here")

    monkeypatch.setattr("planner.cli.doctor.plan", refuse)
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    monkeypatch.setattr("planner.cli.doctor.OPTIONAL", {"no-such-package": "the test"})
    status, out, _ = run(capsys, "doctor", "--json")
    assert status == 1
    found = {f["what"]: f for f in json.loads(out)["findings"]}
    assert found["a plan on cpu"]["found"] == "failed: CaptureError: nothing compiles here"
    assert found["torch"]["found"].startswith("2.99.0, not tested; the tests ran with")
    assert found["no-such-package"]["found"] == "not installed; needed by the test"


BAD = {
    "plan train.py:mak": "train.py has no 'mak'; it has make",
    "plan gone.py:make": "gone.py: no such file",
    "plan gone.model:make": "loading gone.model: ModuleNotFoundError",
    "plan train.py": "names no function",
    "plan broken.py:make": "broken.py:1: ",
    "plan train.py:number": "returned 3 of type int",
    "plan train.py:stray": "'bugdet_gb', which is no argument of plan()",
    "plan train.py:leaves": "SystemExit at",
    "plan train.py:leaver --budget-gb 1": "train.py:43: 0",
    "plan train.py:leaving_loss --budget-gb 1 --quiet": "train.py:43: 0",
    "plan train.py:Kind": "calling train.py:Kind: TypeError: ",
    "plan train.py:fails": "train.py:52: invalid literal",
    "plan train.py:only --budget-gb 1": "gives no batch",
    "plan train.py:model --budget-gb 1": "gives no batch",
    "plan train.py:make --budget-gb much": "BudgetError: budget_gb='much'",
    "plan train.py:make --budget-gb nan": "BudgetError",
    "plan train.py:make --device abacus": "OptionError: device='abacus'",
    "plan train.py:make --optimizer magic --budget-gb 1": "magic",
    "plan train.py:make --budget-gb 1 --save gone/plan.json": "gone/plan.json cannot be written",
    "plan train.py:make --batch-from gone.pt": "gone.pt",
    "plan train.py:make --budget-gb 1 --explain 99": "OptionError: '99' is no module",
    "pareto train.py:make --points 1": "OptionError",
    "show gone.json": "gone.json",
    "show train.py": "train.py",
    "compare gone.json gone.json": "gone.json",
}


@pytest.mark.parametrize("command", BAD)
def test_bad_input_is_one_line(capsys, command):
    status, out, err = run(capsys, *command.split())
    assert status == 2
    assert BAD[command] in err
    assert err.count("\n") == 1
    assert "\x1b" not in err
    assert "Fits" not in out


@pytest.mark.parametrize(
    "command",
    ["", "plan", "fly", "plan x:y --solver magic", "pareto x:y --points many", "demo --steps 0", "demo --budget nan"],
)
def test_a_command_that_is_none_is_one_line(capsys, command):
    with pytest.raises(SystemExit) as e:
        main(command.split())
    assert e.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("command", ["", "plan", "show", "pareto", "compare", "devices", "demo"])
def test_help_has_an_example(capsys, command):
    with pytest.raises(SystemExit) as e:
        main([*command.split(), "--help"])
    out = capsys.readouterr().out
    assert e.value.code == 0
    assert f"python -m planner {command}" in out.split("example")[1]
    assert "exit status: 0" in out


def test_what_does_not_fit_is_not_bad_input(capsys):
    status, _, err = run(capsys, "plan", "train.py:make", "--budget-gb", "0.0001", "--solver", "chen")
    assert status == 1
    assert err.startswith("InfeasibleBudgetError: ")
    assert err.count("\n") == 1


def test_interrupts_and_debugging(capsys):
    assert run(capsys, "plan", "train.py:stops") == (130, "", "interrupted\n")
    for arguments in (["--debug", "plan", "train.py:fails"], ["plan", "train.py:fails", "--debug"]):
        status, _, err = run(capsys, *arguments)
        assert status == 2
        assert "Traceback" in err
        assert 'int("no' in err


def test_nothing_is_left_in_the_path(capsys):
    before = list(sys.path)
    run(capsys, "plan", "train.py:make", *TIGHT)
    assert sys.path == before


@pytest.mark.thorough
def test_a_terminal_without_bars():
    # the current folder is importable
    result = python("-m", "planner", "plan", "train:make", *TIGHT, PYTHONIOENCODING="ascii")
    assert result.returncode == 0, result.stderr
    assert result.stdout.isascii()
    assert set(result.stdout.split("total ")[1].split()[0]) <= set(ASCII_BARS)


def test_what_children_of_the_users_code_write_is_no_part_of_the_answer(capfd):
    status, out, err = run(capfd, "plan", "train.py:raw", *TIGHT, "--json")
    assert status == 0
    assert json.loads(out)["fits"]
    assert err == "raw child\n"


def test_streams_that_are_closed(saved):
    command = f"'{sys.executable}' -m planner show a.json --html page.html >&- 2>&-"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    assert subprocess.run(["sh", "-c", command], env=environment).returncode == 0
    assert Path("page.html").read_text().endswith("</html>")


def test_a_reader_that_leaves(monkeypatch, capfd):
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        assert main(["devices"]) == 141
        assert main(["devices"]) == 0  # nobody reads it, and nothing complains
    assert capfd.readouterr().err == ""


def test_colours_are_for_terminals_that_want_them(monkeypatch, capsys):
    class Terminal:
        encoding = "utf-8"

        def isatty(self):
            return True

    assert shows_colours(Terminal(), {})
    assert not shows_colours(Terminal(), {"NO_COLOR": "1"})
    assert not shows_colours(Terminal(), {"TERM": "dumb"})
    assert not shows_colours(None, {})
    assert shows_colours(None, {"FORCE_COLOR": "1"})
    assert not shows_colours(Terminal(), {"FORCE_COLOR": "1", "NO_COLOR": "1"})
    assert not shows_colours(Terminal(), {"FORCE_COLOR": "0"})
    monkeypatch.setenv("FORCE_COLOR", "1")
    _, out, _ = run(capsys, "plan", "train.py:make", *TIGHT)
    assert out.count("\x1b[") > 4
    assert style_of(colour=False).paint("x", "red") == "x"


def test_names_move_no_cursor():
    for text in ("\x1b[2J", "a\rb", "a\nb", "\u202edlo", "\x9b31m", "\ud800", "\u2028"):
        assert shown(text).isprintable()
        assert shown(text) == ascii(text)[1:-1]
    assert shown("層é") == "層é"
    assert shown("層", "ascii") == r"\u5c64"
