"""Solvers that know no torch: on random graphs, and on published instances where they are to be had."""

import contextlib
import json
import math
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from solvers import (
    SOLVERS,
    InfeasibleError,
    Op,
    Problem,
    ProblemError,
    Schedule,
    UnknownSolverError,
    auto,
    chen,
    every_op_once,
    from_json,
    load,
    minimum_peak,
    simulate,
    solve,
    to_json,
    validate,
)
from solvers.schedule import to_steps
from solvers.search import effort
from solvers.search.rounds import search

from .brute_force import cheapest, lowest_peak
from .problems import random_training_graph, reused_problems, shorten, small_problems
from .variants import keeping

INSTANCES = Path(__file__).parents[2] / "shared" / "instances"
WHOLE = {"resnet50_184_6gb", "un_11_5gb"}  # take the default's work; a quarter of it does for the others
PUBLISHED = sorted(INSTANCES.glob("*gb.json"))
SHORT = [path for path in PUBLISHED if path.stem not in {*WHOLE, "resnet50_184_5gb"}]
published = pytest.mark.skipif(not INSTANCES.is_dir(), reason=f"the published instances are not at {INSTANCES}")
quick = settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=tuple(HealthCheck))
any_small = st.one_of(small_problems(), reused_problems())


@pytest.fixture
def short(monkeypatch):
    """Searches of a few steps, for small problems."""
    shorten(monkeypatch)
    monkeypatch.setattr("solvers.search.effort.STEPS", 1e5)


@pytest.fixture
def shorter(short, monkeypatch):
    """For problems of which models prove the best schedules, whatever was found before."""
    monkeypatch.setattr("solvers.search.effort.RATE", 1e4)


def chain(layers: int, budget: int | None = None) -> Problem:
    """A plain network: every activation of 10 bytes is needed by its own layer's backward op, in reverse order."""
    forward = [Op(f"f{i}", (i - 1,) if i else (), (i,), 1.0) for i in range(layers)]
    backward = []
    for i in reversed(range(layers)):
        reads = (i, *((len(forward) + len(backward) - 1,) if backward else ()))
        backward.append(Op(f"b{i}", reads, (len(forward) + len(backward),), 1.0))
    return Problem((*forward, *backward), (10,) * 2 * layers, layers, budget=budget)


@pytest.mark.usefixtures("shorter")
@quick
@given(any_small)
def test_auto_equals_exhaustive_search(problem):
    best = cheapest(problem)
    if best is None:
        with pytest.raises(InfeasibleError) as caught:
            auto(problem, progress=False)
        assert caught.value.bound <= caught.value.minimum == lowest_peak(problem)
        problem = problem.with_budget(caught.value.minimum)
        validate(problem, auto(problem, progress=False).schedule)
        return
    answer = auto(problem, progress=False)
    assert validate(problem, answer.schedule).cost == pytest.approx(best)
    assert answer.bound <= best * (1 + 1e-9)
    with contextlib.suppress(InfeasibleError):
        assert best <= simulate(problem, chen(problem)).cost * (1 + 1e-9)


@pytest.mark.usefixtures("shorter")
@settings(quick, max_examples=5)
@given(reused_problems())
def test_more_budget_never_costs_more(problem):
    budgets = range(lowest_peak(problem), simulate(problem, every_op_once(problem)).peak + 1)
    found = [solve(problem.with_budget(b), progress=False).timeline.cost for b in budgets]
    assert all(more <= less + 1e-9 for less, more in pairwise(found))
    assert found[-1] == problem.total_cost


@pytest.mark.usefixtures("short")
def test_the_search_by_itself_finds_most_optima_of_small_problems():
    found = []

    @settings(quick, max_examples=150)
    @given(any_small)
    def look(problem):
        best, refused = cheapest(problem), None
        try:
            answer = search(problem, progress=False)
        except InfeasibleError as e:
            refused = e
        if refused is not None:
            peak = validate(problem.with_budget(None), refused.schedule).peak
            assert refused.bound <= lowest_peak(problem) <= refused.minimum == peak
            found.append(best is None)
            return
        assert best is not None
        cost = validate(problem, answer.schedule).cost
        assert answer.bound <= best * (1 + 1e-9)
        assert cost >= best * (1 - 1e-9)
        with contextlib.suppress(InfeasibleError):
            assert cost <= simulate(problem, chen(problem)).cost * (1 + 1e-9)
        found.append(cost == pytest.approx(best))

    look()
    assert sum(found) >= 0.94 * len(found)


@pytest.mark.parametrize("layers", [16, 64])
def test_chen_needs_about_twice_sqrt_l(layers):
    problem = chain(layers)
    peak = simulate(problem, chen(problem)).peak
    assert peak <= 10 * (2 * math.sqrt(layers) + 4)
    assert simulate(problem, every_op_once(problem)).peak >= 10 * layers


def test_more_budget_takes_fewer_segments():
    problem = chain(64)
    least = simulate(problem, chen(problem)).peak
    most = simulate(problem, every_op_once(problem)).peak
    costs = [simulate(problem, chen(problem.with_budget(b))).cost for b in range(least, most + 1, (most - least) // 8)]
    assert costs == sorted(costs, reverse=True)
    assert simulate(problem, chen(problem.with_budget(most))).cost == problem.total_cost


def test_values_of_another_region_are_never_made_again():
    problem = Problem(
        ops=(
            Op("f", (), (0,), 1.0, region=0),
            Op("g", (0,), (1,), 1.0, region=1),
            Op("loss", (1,), (2,), 0.0, recomputable=False, region=-1),
            Op("g'", (0, 1, 2), (3,), 1.0, region=1),
            Op("f'", (3,), (4,), 1.0, region=0),
        ),
        sizes=(10, 10, 1, 1, 1),
        boundary=2,
    )
    assert 0 in problem.lasting
    validate(problem, minimum_peak(problem, progress=False).schedule)
    validate(problem, chen(problem))


@published
@pytest.mark.parametrize("path", keeping(*SHORT, of=PUBLISHED), ids=lambda p: p.stem)
def test_published_instances_pass_their_own_checker(path, tmp_path, monkeypatch):
    for steps in () if path.stem in WHOLE else ("STEPS", "STEPS_PER_OP"):
        monkeypatch.setattr(f"solvers.search.effort.{steps}", getattr(effort, steps) / 4)
    problem, published = load(path), json.loads(path.read_text())["published"]
    answer = auto(problem, progress=False)
    out = tmp_path / "schedule.json"
    out.write_text(json.dumps({"steps": to_steps(problem, answer.schedule)}))
    checker = INSTANCES / "check_schedule.py"
    found = subprocess.run([sys.executable, checker, path, out], capture_output=True, text=True, check=False)
    report = json.loads(found.stdout.splitlines()[-1])
    assert found.returncode == 0, report
    cost = simulate(problem, answer.schedule).cost
    assert report["overhead_percent"] == pytest.approx(100 * (cost / problem.total_cost - 1), abs=0.001)
    assert report["overhead_percent"] <= published["overhead_percent"] + 1  # found in 24 hours
    assert answer.bound <= min(cost, published["cost"]) * (1 + 1e-9)


def test_a_problem_survives_json():
    problem = random_training_graph(1, 12, 2).with_budget(1000)
    assert from_json(json.loads(json.dumps(to_json(problem)))) == problem


@pytest.mark.parametrize(
    ("ops", "sizes", "words"),
    [
        ((Op("a", (1,), (0,), 1.0), Op("b", (0,), (1,), 1.0)), (1, 1), "op 0 .a. reads value 1.* cycle, 0 -> 1 -> 0"),
        ((Op("a", (1,), (0,), 1.0), Op("b", (), (1,), 1.0)), (1, 1), "out of order"),
        ((Op("a", (1,), (0,), 1.0),), (1, 1), "no op writes it"),
        ((Op("a", (), (0,), -1.0),), (1,), "cost -1.0"),
        ((Op("a", (), (0,), math.nan),), (1,), "cost nan"),
        ((Op("a", (), (0,), 1.0),), (-1,), "size -1"),
        ((Op("a", (), (0,), 1.0),), (1, 1), "value 1 has no op"),
        ((Op("a", (), (0,), 1.0), Op("b", (), (0,), 1.0)), (1,), "written twice"),
        ((Op("a", (), (7,), 1.0),), (1,), "no value 7"),
    ],
)
def test_a_malformed_problem_names_the_place(ops, sizes, words):
    with pytest.raises(ProblemError, match=words):
        Problem(ops, sizes, 0)


def test_bad_schedules_are_refused():
    problem = chain(3)
    for steps, words in [
        ((0, 1, 2, 3, 4), "never runs"),
        ((0, 2), "runs before|not held"),
        ((0, 1, 2, 9), "no op 9"),
        ((0, 1, 2, 3, 0, 5), "runs before|not held"),
    ]:
        with pytest.raises(ProblemError, match=words):
            validate(problem, Schedule(steps))
    with pytest.raises(ProblemError, match="above the budget"):
        validate(problem.with_budget(1), every_op_once(problem))


def test_bad_calls_are_refused(tmp_path):
    problem = chain(3, budget=1000)
    with pytest.raises(UnknownSolverError, match="auto, chen, ilp"):
        solve(problem, "magic")
    for limit in (0, -1, math.nan):
        with pytest.raises(ProblemError, match="time limit"):
            solve(problem, "ilp", time_limit=limit)
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(ProblemError, match=r"bad\.json"):
        load(tmp_path / "bad.json")
    with pytest.raises(ProblemError, match="neither"):
        from_json([1])
    assert set(SOLVERS) >= {"auto", "chen", "ilp"}
    assert auto(chain(3)).schedule == every_op_once(problem)
