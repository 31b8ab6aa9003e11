"""Solvers that know no torch: on random graphs, and on published instances where they are to be had."""

import contextlib
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings

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
    cost_bound,
    every_op_once,
    from_json,
    load,
    minimum_peak,
    minimum_peak_bound,
    simulate,
    solve,
    to_json,
    validate,
)
from solvers.schedule import to_steps

from .brute_force import cheapest
from .problems import random_training_graph, small_problems

INSTANCES = Path(__file__).parents[2] / "shared" / "instances"
published = pytest.mark.skipif(not INSTANCES.is_dir(), reason=f"the published instances are not at {INSTANCES}")
quick = settings(max_examples=150, deadline=None, derandomize=True)


def chain(layers: int, budget: int | None = None) -> Problem:
    """A plain network: every activation of 10 bytes is needed by its own layer's backward op, in reverse order."""
    forward = [Op(f"f{i}", (i - 1,) if i else (), (i,), 1.0) for i in range(layers)]
    backward = []
    for i in reversed(range(layers)):
        reads = (i, *((len(forward) + len(backward) - 1,) if backward else ()))
        backward.append(Op(f"b{i}", reads, (len(forward) + len(backward),), 1.0))
    return Problem((*forward, *backward), (10,) * 2 * layers, layers, budget=budget)


@quick
@given(small_problems())
def test_auto_is_valid_and_between_its_bound_and_chen(problem):
    best = cheapest(problem)
    refused = solution = None
    try:
        solution = solve(problem, "auto", progress=False)
    except InfeasibleError as e:
        refused = e
    if refused is not None:
        again = solve(problem.with_budget(refused.minimum), "auto", progress=False)
        assert refused.bound <= again.timeline.peak <= refused.minimum
        return
    assert best is not None
    assert solution.bound <= best * (1 + 1e-9) + 1e-9
    assert solution.timeline.cost >= best * (1 - 1e-9) - 1e-9
    with contextlib.suppress(InfeasibleError):
        segments = simulate(problem, chen(problem))
        assert problem.budget is None or solution.timeline.cost <= segments.cost * (1 + 1e-9)


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


@pytest.mark.parametrize("seed", range(3))
def test_auto_on_larger_graphs(seed):
    problem = random_training_graph(seed, 40, 6)
    base = simulate(problem, every_op_once(problem)).peak
    floor = minimum_peak_bound(problem)
    leanest = simulate(problem, minimum_peak(problem, progress=False).schedule).peak
    assert floor <= leanest <= base
    for share in (0.9, 0.6, 0.3):
        budget = round(leanest + share * (base - leanest))
        tight = problem.with_budget(budget)
        solution = solve(tight, "auto", progress=False)
        assert solution.timeline.peak <= budget
        assert cost_bound(tight) <= solution.timeline.cost
        assert solve(tight, "auto", progress=False).schedule == solution.schedule  # the same input, the same answer


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
@pytest.mark.parametrize("path", sorted(INSTANCES.glob("*gb.json")), ids=lambda p: p.stem)
def test_published_instances_pass_their_own_checker(path, tmp_path):
    problem = load(path)
    try:
        solution = solve(problem, "auto", progress=False)
    except InfeasibleError as e:
        pytest.fail(f"a published answer exists: {e}")
    out = tmp_path / "schedule.json"
    out.write_text(json.dumps({"steps": to_steps(problem, solution.schedule)}))
    checker = INSTANCES / "check_schedule.py"
    found = subprocess.run([sys.executable, checker, path, out], capture_output=True, text=True, check=False)
    report = json.loads(found.stdout.splitlines()[-1])
    assert found.returncode == 0, report
    assert report["overhead_percent"] == pytest.approx(
        100 * (solution.timeline.cost / problem.total_cost - 1), abs=0.01
    )
    bound = json.loads(path.read_text())["published"]["proven_bound_percent"]
    if bound is not None:  # a bound of ours above what someone achieved would be wrong
        achieved = json.loads(path.read_text())["published"]["cost"]
        assert cost_bound(problem) <= achieved


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
    assert set(SOLVERS) == {"auto", "chen", "ilp"}
    assert auto(chain(3)).schedule == every_op_once(problem)
