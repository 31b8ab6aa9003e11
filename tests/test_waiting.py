"""Microbatches in flight, for solvers: what waits is counted, and as much of it as is worth it is given up."""

import json
from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from solvers import (
    InfeasibleError,
    Op,
    Problem,
    ProblemError,
    Waiting,
    cost_bound,
    every_op_once,
    from_json,
    minimum_peak_bound,
    relaxation_bound,
    simulate,
    solve,
    to_json,
    validate,
)
from solvers.exact.checkmate import ilp
from solvers.schedule import Schedule, kept_bytes
from solvers.search.annealing import Search
from solvers.search.rounds import search

from .brute_force import cheapest, lowest_peak
from .problems import shorten, small_problems, transformer


@st.composite
def in_flight(draw, most_ops=6):
    problem = draw(small_problems(most_ops=most_ops, most_values=7))
    boundary = draw(st.integers(0, len(problem.ops) - 1))
    pairs = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), min_size=1, max_size=2).map(tuple)
    until = draw(st.integers(boundary + 1, len(problem.ops)))
    waiting = Waiting(draw(pairs), draw(pairs), until)
    problem = replace(problem, boundary=boundary, waiting=waiting, budget=None)
    return problem.with_budget(lowest_peak(problem) + draw(st.integers(0, 12)))


@settings(max_examples=25, deadline=None, phases=[Phase.generate], derandomize=True)
@given(in_flight())
def test_no_solver_beats_an_exhaustive_search_and_the_exact_one_equals_it(problem):
    truth = cheapest(problem)
    assert truth is not None
    assert cost_bound(problem) <= truth + 1e-6
    assert relaxation_bound(problem) <= truth + 1e-5
    assert minimum_peak_bound(problem) <= lowest_peak(problem) <= problem.budget
    found = ilp(problem)
    assert validate(problem, found.schedule).cost == pytest.approx(truth)
    assert found.bound <= truth + 1e-6
    if simulate(problem, every_op_once(problem)).peak > problem.budget:
        with suppress(InfeasibleError):
            answer = search(problem)
            assert validate(problem, answer.schedule).cost >= truth - 1e-9
            assert answer.bound <= truth + 1e-5


def test_a_search_counts_what_waits_as_the_simulator_does():
    problem = transformer(6)
    waiting = Waiting(((3, 7),), ((3, 7), (2, 10**9)), len(problem.ops))
    problem = replace(problem, waiting=waiting)
    assert (
        simulate(problem, every_op_once(problem)).peak
        > simulate(replace(problem, waiting=None), every_op_once(problem)).peak
    )
    made = Search(problem, lambda _: None)
    for keep in (None, (), range(0, len(problem.sizes), 3)):
        found = made.keep_only(keep)
        assert found is not None
        assert found.peak == simulate(problem, made.schedule(found)).peak


def test_what_waits_is_what_is_kept_and_none_of_it_where_the_optimizer_steps():
    forward = Op("f", (), (0,), 1.0), Op("g", (0,), (1,), 1.0)
    backward = Op("dg", (1,), (2,), 1.0), Op("df", (0, 2), (3,), 1.0), Op("step", (), (), 0.0, 4, False, 1)
    waiting = Waiting(((1, 0),), ((2, 5), (0, 15)), until=4)
    problem = Problem((*forward, *backward), (8, 2, 1, 1), 2, frozenset({3}), 100, waiting=waiting)
    assert simulate(problem, every_op_once(problem)).held == (118, 120, 136, 135, 105)
    again = Schedule((0, 1, 2, 0, 3, 4))  # keeps 2 bytes of 10
    assert simulate(problem, again).held == (110, 112, 118, 124, 125, 105)


def test_a_second_backward_pass_finds_the_gradients_of_the_first_and_the_first_one_frees_nothing_saved():
    forward = Op("f", (), (0,), 1.0), Op("g", (0,), (1,), 1.0)
    backward = Op("dg", (1,), (2,), 1.0), Op("df", (0, 2), (3,), 1.0), Op("step", (), (), 0.0, 4, False, 1)
    waiting = Waiting(((0, 0),), ((0, 0),), until=4, again=1)
    problem = Problem((*forward, *backward), (8, 2, 1, 1), 2, frozenset({3}), 100, waiting=waiting)
    assert simulate(problem, every_op_once(problem)).held == (108, 110, 112, 112, 105)
    again = Schedule((0, 1, 2, 0, 3, 4))  # the first copy of value 0 is not saved
    assert simulate(problem, again).held == (108, 110, 104, 111, 112, 105)
    with pytest.raises(InfeasibleError):
        ilp(problem.with_budget(111), time_limit=1)


@pytest.mark.parametrize("again", [0, 10**9, 3 * 10**9])
def test_a_search_counts_a_second_backward_pass_as_the_simulator_does(again):
    problem = transformer(4)
    for until in (len(problem.ops), len(problem.ops) - 3):
        counted = replace(problem, waiting=Waiting(((1, 7),), ((0, 0),), until, again))
        made = Search(counted, lambda _: None)
        for keep in (None, (), range(0, len(problem.sizes), 3)):
            found = made.keep_only(keep)
            assert found is not None
            assert found.peak == simulate(counted, made.schedule(found)).peak


def test_a_schedule_gives_up_more_where_more_of_it_waits(monkeypatch):
    shorten(monkeypatch)
    problem = transformer(4)
    alone = simulate(problem, every_op_once(problem)).peak
    kept = []
    for number in (0, 1, 3):
        waiting = Waiting(((number, 0),), ((number, 0),), len(problem.ops))
        budgeted = replace(problem, waiting=waiting, budget=2 * alone)
        schedule = solve(budgeted).schedule
        kept.append(kept_bytes(problem, schedule.steps))
        assert simulate(problem, schedule).peak + number * kept[-1] <= 2 * alone
    assert kept[0] >= kept[1] > kept[2]


def test_a_problem_with_what_waits_is_read_as_it_was_written():
    problem = transformer(1)
    problem = replace(problem, waiting=Waiting(((3, 7),), ((3, 7), (2, 9)), len(problem.ops)))
    assert from_json(json.loads(json.dumps(to_json(problem)))) == problem
    problem = replace(problem, waiting=replace(problem.waiting, again=5))
    assert from_json(json.loads(json.dumps(to_json(problem)))) == problem


@pytest.mark.parametrize(
    "waiting",
    [
        Waiting((), ((1, 0),), 4),
        Waiting(((1, 0),), ((1, 0),), 4, -1),
        Waiting(((1,),), ((1, 0),), 4),
        Waiting(((-1, 0),), ((1, 0),), 4),
        Waiting(((1, 0),), ((1, 0),), 2),
        Waiting(((2**62, 0),), ((1, 0),), 4),
        "two",
    ],
)
def test_what_cannot_wait_is_refused(waiting):
    ops = [Op("f", (), (0,), 1.0), Op("g", (0,), (1,), 1.0), Op("dg", (1,), (2,), 1.0), Op("df", (0, 2), (3,), 1.0)]
    with pytest.raises(ProblemError, match="wait"):
        Problem(tuple(ops), (1, 1, 1, 1), boundary=2, waiting=waiting)
