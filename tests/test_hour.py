"""The program for the first hour on a card, without one: it goes on where it was stopped; its page says what held."""

import argparse
import json

import pytest

from benchmarks.cuda import Run
from benchmarks.cuda_hour import ON_CPU, outcomes, page, phases

JUNIT = """<testsuites><testsuite>
<testcase name="test_a" /><testcase name="test_b"><skipped message="no card" /></testcase>
<testcase name="test_c"><failure message="assert 1 == 2&#10;more">...</failure></testcase>
</testsuite></testsuites>"""
PLAN = {
    "model": "gpt2", "label": "plan, 60%", "way": "plan", "budget_bytes": 6 * 2**30, "predicted_bytes": 5 * 2**30,
    "predicted_allocated_bytes": 5 * 2**30, "allocated_bytes": 2**33, "requested_bytes": 5.1 * 2**30,
    "reserved_bytes": 2**33, "step_seconds": 0.1, "overhead": 0.1, "planning_seconds": 1.0, "out_of_memory": True,
}  # fmt: skip


@pytest.fixture
def run(tmp_path):
    options = argparse.Namespace(device="cpu", size="tiny", steps=1, output=str(tmp_path / "hour.json"), only=None)
    return Run(options, tmp_path, deadline=float("inf"))


def test_a_run_goes_on_where_one_was_stopped(run, monkeypatch):
    followed = []

    def follow(self, entry, row):
        followed.append(entry.label)
        row.update({"error": "it crashed"} if entry.label == "b" else {"skipped": "for the test"})

    monkeypatch.setattr(Run, "_follow", follow)
    for label in "ab":
        run.do(run.entry("gpt2", "eager", label))
    again = Run(run.options, run.scratch, deadline=float("inf"))
    again.resume()
    for label in "abc":
        again.do(again.entry("gpt2", "eager", label))
    assert followed == ["a", "b", "b", "c"]
    assert sorted(r["label"] for r in json.loads(run.path().read_text())["rows"]) == ["a", "b", "c"]


def test_a_run_without_time_starts_nothing_and_still_writes_its_page(run, monkeypatch):
    run.deadline, asked = 0.0, []
    monkeypatch.setattr("benchmarks.cuda_hour.pytest_row", lambda run: None)
    phases(run, lambda names: asked.append(tuple(names)), lambda names: asked.append(tuple(names)))
    assert asked == [ON_CPU[:2], ON_CPU[2:], ON_CPU]
    assert all(r["error"].startswith("not run") for r in run.rows)
    assert "No plan has been measured yet" in run.path().with_suffix(".md").read_text()


def test_the_page_says_first_whether_plans_held(tmp_path):
    report = tmp_path / "junit.xml"
    report.write_text(JUNIT)
    found = outcomes(report)
    assert (found["tests"], found["skipped_tests"], found["failed"]) == (3, 1, {"test_c": "assert 1 == 2"})
    tests = {"model": "tests", "label": "tests/cuda", "way": "tests", "seconds": 3.0, **found}
    constants = {"model": "device", "label": "constants", "way": "constants", "context_bytes": 2**29}
    text = page({"name": "a card"}, [constants, PLAN, tests])
    held, rest = text.split("## Constants")
    assert "1 plans ran, 1 of them out of memory" in held
    assert "+2.0%" in held
    assert "512.00 MB" in rest
    assert "1 passed, 1 failed, 1 skipped" in rest
    assert "- test_c: assert 1 == 2" in rest


def test_as_many_processes_as_the_card_has_room_for(run):
    for gib, workers in ((None, 1), (24, 2), (80, 5)):
        run.device = {} if gib is None else {"memory_bytes": gib * 2**30}
        assert run.workers() == workers
