"""Lower bounds: never above what an exhaustive search finds, never below the simple ones."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from solvers import load, simulate
from solvers.bounds.cost import cost_bound, knapsack, points, relax, relaxation_bound
from solvers.bounds.peak import minimum_peak_bound
from solvers.bounds.relaxation import build, solve
from solvers.schedule import every_op_once
from solvers.search.lp_starts import lp_starts

from .brute_force import cheapest, lowest_peak
from .problems import random_training_graph, reused_problems, small_problems, transformer

INSTANCES = Path(__file__).parents[2] / "shared" / "instances"
published = pytest.mark.skipif(not INSTANCES.is_dir(), reason=f"the published instances are not at {INSTANCES}")
quick = settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.filter_too_much])


def tight(seed, share, forward=40):
    """A training graph with a budget between its lowest bound and what it takes with nothing recomputed."""
    problem = random_training_graph(seed, forward, True)
    most, least = simulate(problem, every_op_once(problem)).peak, minimum_peak_bound(problem)
    return problem.with_budget(least + int(share * (most - least)))


@quick
@given(st.one_of(small_problems(), reused_problems()), st.integers(0, 4))
def test_cost_bounds_are_below_the_optimum_and_above_the_simple_bound(problem, spare):
    problem = problem.with_budget(lowest_peak(problem) + spare)
    best = cheapest(problem)
    assert best is not None
    simple, fast, strong = knapsack(problem), cost_bound(problem), relaxation_bound(problem)
    assert simple <= fast <= strong <= best * (1 + 1e-9) + 1e-9


@quick
@given(st.one_of(small_problems(), reused_problems()), st.data())
def test_any_points_give_a_bound(problem, data):
    problem = problem.with_budget(lowest_peak(problem))
    at = sorted(data.draw(st.sets(st.integers(0, len(problem.ops) - 1), min_size=1)))
    best = cheapest(problem)
    assert best is not None
    for nodes in (0, 50):
        assert problem.total_cost + solve(problem, build(problem, at), nodes).bound <= best * (1 + 1e-9) + 1e-9


@quick
@given(st.one_of(small_problems(), reused_problems()))
def test_the_peak_bound_is_below_the_lowest_peak_and_above_every_first_run(problem):
    bound = minimum_peak_bound(problem)
    assert bound <= lowest_peak(problem)
    for op in problem.ops:
        values = set(op.reads) | set(op.writes)
        assert bound >= problem.resident + op.workspace + sum(problem.sizes[v] for v in values)


@quick
@given(reused_problems())
def test_more_budget_never_raises_the_bound(problem):
    budgets = range(minimum_peak_bound(problem), simulate(problem, every_op_once(problem)).peak + 2)
    found = [cost_bound(problem.with_budget(b)) for b in budgets]
    assume(len(found) > 1)
    assert all(low >= high - 1e-9 for low, high in pairwise(found))
    assert found[-1] == problem.total_cost


@pytest.mark.parametrize("seed", range(3))
def test_bounds_of_larger_graphs(seed):
    found = [tight(seed, share) for share in (0.2, 0.4, 0.6, 0.8, 1.0)]
    fast = [cost_bound(p) for p in found]
    assert fast == sorted(fast, reverse=True)
    for problem, quickly in zip(found, fast, strict=True):
        relaxed = relax(problem)
        assert relaxed == relax(problem)  # no clock: the same answer every time
        assert knapsack(problem) <= quickly <= relaxation_bound(problem, relaxed)


def test_one_point_is_enough_for_a_transformer():
    """Its guide is a schedule that costs what the bound says: optimal, and proven so."""
    problem = transformer(3)
    problem = problem.with_budget(round(0.6 * simulate(problem, every_op_once(problem)).peak))
    relaxed = relax(problem)
    assert relaxed.bound > 1.05 * (knapsack(problem) - problem.total_cost)
    kept = next(lp_starts(problem, relaxed))
    assert kept == relaxed.kept(problem, 0.5)
    again = {problem.producer[v] for v in range(len(problem.sizes)) if v not in kept}
    assert sum(problem.ops[i].cost for i in again) == pytest.approx(relaxed.bound, rel=1e-3)


def test_without_a_limit_nothing_runs_again():
    problem = random_training_graph(0, 10, True)
    most = simulate(problem, every_op_once(problem)).peak
    for budget in (None, most):
        free = problem.with_budget(budget)
        assert cost_bound(free) == relaxation_bound(free) == problem.total_cost
        assert not relax(free).points
        assert not list(lp_starts(free, relax(free)))
    assert points(problem.with_budget(most - 1))


@published
@pytest.mark.parametrize("path", sorted(INSTANCES.glob("*gb.json")), ids=lambda p: p.stem)
def test_published_schedules_cost_no_less_than_the_bounds(path):
    problem, answer = load(path), json.loads(path.read_text())["published"]
    achieved = problem.total_cost * (1 + (answer["overhead_percent"] + 6e-4) / 100)  # it is rounded
    simple, fast, strong = knapsack(problem), cost_bound(problem), relaxation_bound(problem)
    assert simple <= fast <= strong <= achieved
    # what is left of the published overhead is proven, but for the tightest budgets
    assert strong - problem.total_cost >= 0.6 * (achieved - problem.total_cost)
