"""`python -m solvers` and `python -m benchmarks.solvers`: what they print, what they write, and how they refuse."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import solvers.__main__ as cli
from solvers import InfeasibleError, Problem, Schedule, from_json, simulate, to_json
from solvers.__main__ import main, size
from solvers.schedule import to_steps as steps

from .problems import random_training_graph, small_problems

sys.path.append(str(Path(__file__).parent.parent))  # benchmarks are not installed

from benchmarks import solvers as bench

CHECKER = bench.INSTANCES / bench.CHECKER
published = pytest.mark.skipif(not CHECKER.is_file(), reason=f"the published instances are not at {bench.INSTANCES}")


def chain(layers: int = 8, budget: int = 70) -> dict[str, Any]:
    """A published instance: every activation of 10 bytes is read by its own layer's backward op."""
    ops = [{"inputs": [i - 1] if i else [], "bytes": 10, "cost": 1} for i in range(layers)]
    for i in reversed(range(layers)):
        ops.append({"inputs": [i, *([len(ops) - 1] if i < layers - 1 else [])], "bytes": 10, "cost": 2})
    answer = {"overhead_percent": 12.5, "proven_bound_percent": None}
    return {"name": "", "budget_bytes": budget, "last_forward_op": layers - 1, "ops": ops, "published": answer}


@pytest.fixture
def instance(tmp_path: Path) -> Path:
    path = tmp_path / "chain8.json"
    path.write_text(json.dumps(chain()))
    return path


def run(*arguments: object) -> int:
    return main([*map(str, arguments), "--quiet", "--time-limit", "2"])


def rows(text: str) -> dict[str, str]:
    """The report's rows by their first word."""
    return dict(line.split(maxsplit=1) for line in text.splitlines()[2:])


def replay(problem: Problem, done: list[list[Any]]) -> tuple[float, int]:
    """Cost and peak of compute and free steps, by the letter: nothing is computed while it is held."""
    held: set[int] = set()
    ran: list[int] = []
    cost, live, peak = 0.0, problem.resident, problem.resident
    for what, at in done:
        if what == "free":
            held.remove(at)
            live -= problem.sizes[at]
            continue
        assert what == "compute"
        op = problem.ops[at]
        assert held >= set(op.reads)
        assert not held & set(op.writes)
        held.update(op.writes)
        live += sum(problem.sizes[v] for v in op.writes)
        cost, peak = cost + op.cost, max(peak, live + op.workspace)
        ran.append(at)
    assert set(ran) == set(range(len(problem.ops)))
    assert held == problem.pinned  # nothing is forgotten
    return cost, peak


def test_the_report_says_what_the_schedule_does(instance, tmp_path, capsys):
    out = tmp_path / "schedule.json"
    assert run(instance, "--solver", "chen", "--output", out) == 0
    said = capsys.readouterr()
    assert not said.err
    cost, peak = replay(from_json(chain()), json.loads(out.read_text())["steps"])
    assert peak <= 70
    assert cost > 24  # 70 bytes do not hold everything
    assert said.out.startswith("chain8: 16 ops, 8 of them forward\n\n")  # it has no name but its file's
    found = rows(said.out)
    assert found["solver"].startswith("chen, ")
    assert found["budget"] == "70 bytes"
    assert found["peak"] == f"{peak} bytes, {100 * peak / 70:.2f} % of the budget"
    assert found["overhead"] == f"{100 * (cost / 24 - 1):.3f} %   (published: 12.5 %)"
    assert found["cost"] == f"{cost:g}; 24 with every op once"
    assert found["re-runs"] == f"{cost - 24:g}"  # only ops that cost 1 run again
    bound, gap = (float(found[key].split()[0]) / 100 for key in ("bound", "gap"))
    assert (1 + bound) * (1 + gap) * 24 == pytest.approx(cost, rel=1e-4)
    assert "published" not in found["bound"]
    assert "note" not in found


def test_another_budget_takes_the_place_of_the_instances_own(instance, capsys):
    assert run(instance, "--budget", "1KB") == 0
    found = rows(capsys.readouterr().out)
    assert found["budget"] == "1.00 KB (1,024 bytes)"
    assert found["overhead"] == "0.000 %"  # what is published is of the other budget
    assert found["re-runs"] == "0"
    assert run(instance, "--budget", "70", "--solver", "chen") == 0
    assert "published: 12.5 %" in rows(capsys.readouterr().out)["overhead"]


def test_without_a_budget_nothing_runs_again(tmp_path, capsys):
    (tmp_path / "p.json").write_text(json.dumps(to_json(random_training_graph(1, 12))))
    assert run(tmp_path / "p.json") == 0
    found = rows(capsys.readouterr().out)
    assert (found["budget"], found["re-runs"]) == ("none", "0")
    assert "of the budget" not in found["peak"]


def test_problems_of_the_projects_own_format_are_solved_too(tmp_path, capsys):
    problem = random_training_graph(2, 30)
    once = simulate(problem, Schedule(tuple(range(len(problem.ops))))).peak
    path, out = tmp_path / "p.json", tmp_path / "schedule.json"
    path.write_text(json.dumps(to_json(problem.with_budget(once * 3 // 4))))
    assert run(path, "--output", out) == 0
    cost, peak = replay(problem, json.loads(out.read_text())["steps"])
    assert peak <= once * 3 // 4
    assert rows(capsys.readouterr().out)["cost"].startswith(f"{cost:,.10g};")


def test_an_infeasible_budget_says_which_would_do(instance, tmp_path, capsys):
    out = tmp_path / "schedule.json"
    assert run(instance, "--budget", "29", "--output", out) == 1
    said = capsys.readouterr()
    assert not said.out
    assert not out.exists()
    (line,) = said.err.splitlines()
    assert line.startswith("infeasible: budget of 29 bytes")
    minimum = re.search(r"raise the budget to (\d+) bytes", line)
    assert minimum
    assert run(instance, "--budget", minimum[1]) == 0


@published
def test_the_published_checker_agrees(tmp_path, capsys):
    path, out = bench.INSTANCES / "un_11_8gb.json", tmp_path / "schedule.json"
    assert run(path, "--output", out) == 0
    done = subprocess.run([sys.executable, CHECKER, path, out], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    found = rows(capsys.readouterr().out)
    assert found["overhead"].startswith(f"{json.loads(done.stdout)['overhead_percent']:.3f} %   (published: 3.484 %)")


@settings(max_examples=150, deadline=None, derandomize=True)
@given(small_problems(), st.lists(st.tuples(st.integers(0, 20), st.integers(0, 7)), max_size=6))
def test_steps_do_what_the_schedule_does(problem, again):
    order = list(range(len(problem.ops)))
    for at, i in again:  # an op may run again anywhere after its first run
        if i < len(problem.ops):
            order.insert(max(order.index(i) + 1, min(at, len(order))), i)
    timeline = simulate(problem, Schedule(tuple(order)))
    done = steps(problem, Schedule(tuple(order)))
    cost, peak = replay(problem, done)
    assert [at for what, at in done if what == "compute"] == order
    assert cost == pytest.approx(timeline.cost)
    assert peak <= timeline.peak
    if not again:
        assert peak == timeline.peak


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "required: INSTANCE"),
        (["no.json"], r"no\.json: No such file"),
        (["."], "directory"),
        (["{}", "--solver", "magic"], "magic.*auto.*chen.*ilp"),
        (["{}", "--frobnicate"], "--frobnicate"),
        *(
            (["{}", "--time-limit", t], "positive number of seconds")
            for t in ("0", "-1", "nan", "inf", "1e999", "soon")
        ),
        *((["{}", "--budget", b], "is not a size") for b in ("", "-5", "nan", "inf", "5XB", "GB", "1e9", "9" * 200)),
        (["{}", "--output", "{}"], "the instance itself"),
        (["{}", "--output", "{}/schedule.json"], "Not a directory"),
        (["{}", "--output", "no/schedule.json"], "No such file or directory"),
        (["{}", "--output", "."], "no regular file"),
        (["{}", "--output", os.devnull], "no regular file"),
        (["{}", "--output", "x" * 300], "too long"),
    ],
)
def test_bad_arguments_are_refused_before_the_search(arguments, words, instance, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli, "solve", lambda *a, **k: pytest.fail("it searched"))
    before = instance.read_bytes()
    assert main([a.replace("{}", str(instance)) for a in arguments]) == 2
    refused(capsys, words)
    assert instance.read_bytes() == before
    assert list(tmp_path.iterdir()) == [instance]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "not JSON"),
        ("[1, 2]", "neither a published instance"),
        (json.dumps({**chain(), "ops": []}), "last_forward_op 7"),
        (json.dumps({**chain(), "budget_bytes": math.nan}), "budget nan"),
        (json.dumps({**chain(), "last_forward_op": 16}), "last_forward_op 16"),
        (json.dumps(chain()).replace('"inputs": [0]', '"inputs": [15]'), "cycle"),
        (json.dumps(chain()).replace('"cost": 1', '"cost": "a\\nb"'), "op 0 has cost"),
        (json.dumps({**chain(), "name": ["a\nb"]}), "name must be a str"),
    ],
)
def test_bad_files_are_refused_in_one_line(content, words, tmp_path, capsys):
    path = tmp_path / "bad.json"
    path.write_text(content)
    assert run(path) == 2
    refused(capsys, rf"bad\.json: .*{words}")


def refused(capsys: pytest.CaptureFixture[str], words: str) -> None:
    said = capsys.readouterr()
    assert not said.out
    (line,) = said.err.splitlines()
    assert re.match(f"error: .*{words}", line), line


def test_a_strange_name_does_not_break_the_report(tmp_path, capsys):
    path = tmp_path / "p.json"
    path.write_text(json.dumps({**chain(), "name": "a\nb \ud800", "published": {"overhead_percent": "?"}}))
    assert run(path, "--solver", "chen") == 0
    out = capsys.readouterr().out
    assert out.startswith(r"'a\nb \ud800': 16 ops")
    assert "published" not in out


@pytest.mark.parametrize("moment", ["search", "write", "replace"])
def test_an_interruption_leaves_the_old_file(moment, instance, tmp_path, capsys, monkeypatch):
    def interrupt(*arguments: object, **named: object) -> None:
        if moment == "write":  # half of it
            with open(str(arguments[0]), "w") as f:
                f.write('{"st')
        raise KeyboardInterrupt

    out = tmp_path / "schedule.json"
    out.write_text("old")
    owner, name = {"search": (cli, "solve"), "write": (Path, "write_text"), "replace": (os, "replace")}[moment]
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, interrupt)
        assert run(instance, "--solver", "chen", "--output", out) == 130
    assert capsys.readouterr().err == "interrupted\n"
    assert out.read_text() == "old"
    assert sorted(tmp_path.iterdir()) == [instance, out]


def test_a_full_disk_costs_the_file_but_not_the_report(instance, tmp_path, capsys, monkeypatch):
    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        assert run(instance, "--solver", "chen", "--output", tmp_path / "schedule.json") == 2
    said = capsys.readouterr()
    assert "No space left on device" in said.err
    assert "overhead" in said.out
    assert list(tmp_path.iterdir()) == [instance]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], ("auto", 60.0, None)),
        (["--quiet", "--time-limit", "2.5", "--solver", "ilp"], ("ilp", 2.5, False)),
    ],
)
def test_what_is_asked_for_reaches_the_solver(arguments, expected, instance, monkeypatch):
    asked = []

    def solve(problem: Problem, solver: str, *, time_limit: float, progress: bool | None) -> None:
        asked.append((solver, time_limit, progress))
        raise InfeasibleError(1, 2, 2, Schedule(()))

    monkeypatch.setattr(cli, "solve", solve)
    assert main([str(instance), *arguments]) == 1
    assert asked == [expected]


def test_a_link_is_followed(instance, tmp_path):
    (tmp_path / "real.json").write_text("old")
    (tmp_path / "link.json").symlink_to("real.json")
    assert run(instance, "--solver", "chen", "--output", tmp_path / "link.json") == 0
    assert (tmp_path / "link.json").is_symlink()
    assert json.loads((tmp_path / "real.json").read_text())["steps"]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0),
        ("5053251584", 5053251584),
        ("9007199254740993", 9007199254740993),  # not by way of a float
        ("5GB", 5 << 30),
        ("5 gib", 5 << 30),
        ("1.5MB", 3 << 19),
        (".5kb", 512),
        ("2TB", 2 << 40),
        ("7b", 7),
    ],
)
def test_sizes(text, value):
    assert size(text) == value


def test_a_size_is_refused_by_its_text():
    with pytest.raises(argparse.ArgumentTypeError, match="5 parsecs"):
        size("5 parsecs")


def test_the_module_runs_as_a_command(instance):
    command = [sys.executable, "-m", "solvers", instance, "--solver", "chen"]
    root = Path(__file__).parent.parent
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "overhead" in done.stdout
    done = subprocess.run([*command, "--budget", "1"], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("infeasible: ")


def judge(folder: Path, code: str) -> None:
    """Put instances and a checker that does as told into a folder."""
    for at, budget in ((9, 60), (10, 70)):
        (folder / f"chain_{at}gb.json").write_text(json.dumps(chain(budget=budget)))
    (folder / bench.CHECKER).write_text(code)


HONEST = """
import json, sys
ops = json.load(open(sys.argv[1]))["ops"]
steps = json.load(open(sys.argv[2]))["steps"]
cost = sum(ops[i]["cost"] for what, i in steps if what == "compute")
print(json.dumps({"valid": True, "fits": True, "overhead_percent": round(100 * (cost / 24 - 1), 3)}))
"""


def test_the_benchmark_puts_both_answers_side_by_side(tmp_path, capsys):
    judge(tmp_path, HONEST)
    out = tmp_path / "out" / "results.json"
    asked = [tmp_path, "--solver", "chen", "--time-limit", 1, 2, "--output", out]
    assert bench.main(list(map(str, asked))) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[0] for line in lines[:4]] == ["| instance", "| ---", "| chain_9gb", "| chain_10gb"]
    assert {line.count("|") for line in lines[:4]} == {15}
    results = json.loads(out.read_text())["results"]
    assert [(r["instance"], r["time_limit"]) for r in results] == [
        ("chain_9gb", 1),
        ("chain_9gb", 2),
        ("chain_10gb", 1),
        ("chain_10gb", 2),
    ]
    first = results[0]
    assert first["published_percent"] == 12.5
    assert first["difference_points"] == pytest.approx(first["overhead_percent"] - 12.5)
    assert f"| {first['overhead_percent']:.3f} | {first['difference_points']:+.3f} |" in lines[2]
    assert lines[5].startswith("chen, 1 s: 2 of 2 checked")
    assert lines[6].startswith("chen, 2 s: 2 of 2 checked")


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (HONEST.replace("100 *", "101 *"), "the checker finds"),
        (HONEST.replace('"valid": True', '"valid": False, "why": "step 3"'), "step 3"),
        (HONEST + "sys.exit(1)", "fits: True"),
        ("raise SystemExit('broken')", "the checker failed: broken"),
    ],
)
def test_the_benchmark_believes_the_checker(code, words, tmp_path, capsys):
    judge(tmp_path, code)
    assert bench.main([str(tmp_path), "--solver", "chen"]) == 1
    assert words in capsys.readouterr().out.splitlines()[2]


def test_the_benchmark_goes_on_after_an_infeasible_instance(tmp_path, capsys, monkeypatch):
    judge(tmp_path, HONEST)
    real = bench.solve

    def solve(problem: Problem, *arguments: Any, **named: Any) -> Any:
        if problem.budget == 60:
            raise InfeasibleError(60, 65, 62, Schedule(()))
        return real(problem, *arguments, **named)

    monkeypatch.setattr(bench, "solve", solve)
    assert bench.main([str(tmp_path), "--solver", "chen"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "infeasible: " in lines[2]
    assert lines[3].endswith("| ok |")
    assert "1 of 2 checked" in lines[5]


def test_a_bound_above_what_was_published_is_called_wrong(tmp_path, capsys):
    judge(tmp_path, HONEST)
    path = tmp_path / "chain_9gb.json"
    path.write_text(json.dumps({**chain(budget=70), "published": {"overhead_percent": 0.0}}))
    assert bench.main([str(tmp_path), "--solver", "chen"]) == 1
    assert "bound is above the published answer" in capsys.readouterr().out.splitlines()[2]


def test_the_benchmark_needs_a_folder_with_a_checker(tmp_path, capsys):
    (tmp_path / "a.json").write_text(json.dumps(chain()))
    for folder in (tmp_path, tmp_path / "none"):
        assert bench.main([str(folder)]) == 2
        said = capsys.readouterr()
        assert said.err == f"error: {folder} is no folder of instances (*.json) with their check_schedule.py\n"
