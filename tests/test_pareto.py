"""The curve of peak against cost: monotone, proven, and its plans hold on a real model."""

import itertools
import math
from contextlib import suppress

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from planner import BatchError, ModelError, OptionError, pareto
from solvers import InfeasibleError, ProblemError, SolverError, chen, every_op_once, minimum_peak, simulate, validate
from solvers import pareto as solve_all
from solvers.search.curve import curve

from .brute_force import cheapest
from .measure import held_before, results, step_peak
from .problems import random_training_graph, reused_problems, small_problems
from .real_models import SMALL, llama

quick = settings(max_examples=25, deadline=None, derandomize=True)
medium = st.builds(random_training_graph, st.integers(0, 99), st.integers(4, 8), st.booleans())
any_problem = st.one_of(small_problems(), reused_problems(), medium)


@pytest.fixture(scope="module", autouse=True)
def _short(short_searches):
    """What is said of a curve holds for any work that went into it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("solvers.search.effort.CHANGES", 400)
        yield


@quick
@given(any_problem, st.integers(2, 4))
def test_more_memory_never_costs_more_and_less_never_peaks_higher(problem, points):
    once = simulate(problem, every_op_once(problem))
    found = curve(problem, points, progress=False)
    assert len(found) == points
    for budget, s in found:
        assert validate(problem.with_budget(budget), s.schedule) == s.timeline
        assert s.bound <= s.timeline.cost
        with suppress(InfeasibleError):
            assert s.timeline.cost <= simulate(problem, chen(problem.with_budget(budget))).cost
    for (budget, less), (larger, more) in itertools.pairwise(found):
        assert budget <= larger
        assert less.timeline.peak <= more.timeline.peak
        assert less.timeline.cost >= more.timeline.cost
        assert less.bound >= more.bound
    assert found[0][1].timeline.peak == min(s.timeline.peak for _, s in found)
    assert found[-1][0] == once.peak
    assert found[-1][1].timeline.cost == problem.total_cost


def test_the_lowest_budget_is_the_lowest_peak_found():
    problem = random_training_graph(2, 20)
    assert curve(problem, 2, progress=False)[0][0] <= minimum_peak(problem, progress=False).peak


@quick
@given(small_problems(6, 8))
def test_bounds_hold(problem):
    for budget, s in curve(problem, 4, progress=False):
        best = cheapest(problem.with_budget(budget))
        assert best is not None
        assert s.bound <= best + 1e-6 * (1 + best)


def test_the_same_problem_has_the_same_curve():
    problem = random_training_graph(5, 12)
    once, again = (solve_all(problem, 3, progress=False) for _ in range(2))
    assert [s.schedule for s in once] == [s.schedule for s in again]
    assert [s.bound for s in once] == [s.bound for s in again]


def test_a_time_limit_leaves_a_valid_curve():
    problem = random_training_graph(7, 60)
    found = solve_all(problem, 4, time_limit=0.01, progress=False)
    assert len(found) == 4
    assert found[-1].timeline.cost == problem.total_cost


@pytest.mark.parametrize("points", [1, 0, -3, 2.5, "10", None, True, math.nan])
def test_points_that_are_no_number_of_points_are_refused(points):
    with pytest.raises(ProblemError, match="is not a whole number of at least 2; give"):
        solve_all(random_training_graph(0, 4), points)
    with pytest.raises(OptionError, match="is not a whole number of at least 2; give"):
        pareto(nn.Linear(4, 4), torch.zeros(2, 4), points=points)


@pytest.mark.parametrize("time_limit", [0, -1.0, math.inf, math.nan])
def test_time_limits_that_are_none_are_refused(time_limit):
    with pytest.raises(SolverError, match="not a positive number of seconds"):
        solve_all(random_training_graph(0, 4), time_limit=time_limit)
    with pytest.raises(OptionError, match="time_limit"):
        pareto(nn.Linear(4, 4), torch.zeros(2, 4), time_limit=time_limit)


def test_a_curve_needs_a_model_and_a_batch():
    with pytest.raises(ModelError, match=r"needs a torch\.nn\.Module; it was given 3"):
        pareto(3)
    with pytest.raises(BatchError, match=r"no batch was given for Linear.*pareto\(model, batch\)"):
        pareto(nn.Linear(4, 4))
    with pytest.raises(BatchError, match="no batch was given for ResNet"):
        pareto(SMALL["resnet50"]().model)


@pytest.mark.parametrize("option", [{"mode": "eager"}, {"solver": "ilp"}, {"on_failure": "warn"}, {"budget_gb": 1}])
def test_what_is_for_one_plan_is_refused(option):
    with pytest.raises(OptionError, match=next(iter(option))):
        pareto(nn.Linear(4, 4), torch.zeros(2, 4), **option)


def test_a_problem_gives_its_solutions():
    problem = random_training_graph(1, 8)
    ours, theirs = pareto(problem, points=3, progress=False), solve_all(problem, 3, progress=False)
    assert [s.schedule for s in ours] == [s.schedule for s in theirs]
    with pytest.raises(OptionError, match=r"shard, batch: of a model, and a solvers\.Problem was given"):
        pareto(problem, torch.zeros(2, 4), shard=2)


@pytest.mark.thorough
def test_the_plans_of_a_real_model_hold(tmp_path):
    case = llama(layers=1)
    eager = results(case)
    plans = pareto(case.model, case.batch, points=4, progress=False)
    assert len(plans) == 4
    assert plans[-1].overhead == 0
    for less, more in itertools.pairwise(plans):
        assert less.budget_bytes < more.budget_bytes
        assert less.peak_bytes <= more.peak_bytes <= more.budget_bytes
        assert less.overhead >= more.overhead
        assert less.bound >= more.bound
    plans[-1].apply()
    same_graph = results(case)
    plans[-1].remove()
    middle = plans[1]
    assert middle.overhead > 0
    middle.apply()
    measured = held_before(case) + step_peak(case, tmp_path)
    assert measured <= middle.budget_bytes
    assert measured == pytest.approx(middle.peak_bytes, rel=0.02)
    ours = results(case)
    assert ours.keys() == same_graph.keys() == eager.keys()
    for key, theirs in same_graph.items():
        assert torch.equal(ours[key], theirs), key
        torch.testing.assert_close(ours[key], eager[key])
