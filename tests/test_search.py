"""What the compiled search counts, against the judge of every answer and a naive replay of both."""

from __future__ import annotations

import gc
import math
import random
import signal
import threading
from contextlib import nullcontext
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from solvers import (
    InfeasibleError,
    Link,
    Problem,
    ProblemError,
    Schedule,
    auto,
    chen,
    every_op_once,
    lean_peak,
    minimum_peak,
    simulate,
    validate,
)
from solvers.search import annealing, effort, evaluation, rounds
from solvers.search.annealing import PAUSES, Search
from solvers.search.arrays import Journal, Policy, Scratch, Tables
from solvers.search.evaluation import Evaluator
from solvers.search.leanest import leanest_of
from solvers.search.machine import INTERPRETED, machine_code
from solvers.search.offload import search_of
from solvers.search.policy import choices, copy, keep_only, scratch, tables
from solvers.search.walk import move, put, take_back, tie

from .naive import replay
from .problems import (
    in_regions,
    random_training_graph,
    reused_problems,
    shorten,
    small_problems,
    transformer,
    with_side_outputs,
)
from .variants import more

quick = settings(max_examples=250, deadline=None, derandomize=True, suppress_health_check=tuple(HealthCheck))
randoms = st.randoms(use_true_random=False)
medium = st.builds(random_training_graph, st.integers(0, 99), st.integers(4, 14), st.booleans())
regional = st.builds(in_regions, medium)
sided = st.builds(with_side_outputs, st.one_of(medium, reused_problems()))
any_problem = st.one_of(small_problems(), small_problems(30, 40), reused_problems(), medium, regional, sided)


def random_policy(problem: Problem, t: Tables, rng: random.Random) -> Policy:
    """Any decision on any gap that a search may decide on."""
    policy = keep_only(problem, t)
    often = rng.random()
    for g in choices(problem, t).gaps.tolist():
        policy.keep[g], policy.hold[g] = rng.random() < often, rng.random() < 0.5
        inside = range(int(t.start[g]) + 1, int(t.uses[g]))
        made = problem.ops[problem.producer[int(t.value[g])]].region
        same = [i for i in inside if problem.ops[i].region == made]
        if rng.random() < 0.3:
            policy.drop[g] = rng.choice(inside)
        if same and rng.random() < 0.3:
            policy.make[g] = rng.choice(same)
    return policy


def judged(problem: Problem, t: Tables, policy: Policy, room: Scratch) -> tuple[int, float, int]:
    """Steps, cost of re-runs and peak, by the lists as they are; -1 steps where it is too long."""
    steps, extra = machine_code().unroll(t, policy, room, math.inf)
    return steps, extra, machine_code().peak_of(t, room, steps, problem.resident, math.inf) if steps >= 0 else -1


@quick
@given(any_problem, randoms)
def test_simulate_equals_a_naive_replay(problem, rng):
    """In any order of any ops, even one that is no valid schedule."""
    steps = [i for i in range(len(problem.ops)) if rng.random() < 0.98]
    for _ in range(rng.randrange(12)):
        at = rng.randrange(len(steps) + 1)
        steps.insert(at, rng.choice(steps[:at] or [0]))
    try:
        during, freed, cost = replay(problem, tuple(steps))
    except LookupError as e:
        with pytest.raises(ProblemError, match=f"{e}: .* is not held"):
            simulate(problem, Schedule(tuple(steps)))
        return
    timeline = simulate(problem, Schedule(tuple(steps)))
    assert list(timeline.held) == during
    assert [set(gone) for gone in timeline.frees] == freed
    assert timeline.peak == max(during, default=problem.resident)
    assert timeline.cost == pytest.approx(cost)


@quick
@given(any_problem, randoms)
def test_the_search_counts_as_simulate_does(problem, rng):
    evaluator = Evaluator(problem)
    t, room = evaluator.tables, evaluator.scratch
    policy = random_policy(problem, t, rng)
    schedule = evaluator.schedule(policy)
    assume(schedule is not None)
    timeline = validate(problem.with_budget(None), schedule)
    assert timeline.peak == max(replay(problem, schedule.steps)[0])
    INTERPRETED.link_all(policy, room)
    steps, extra, peak = judged(problem, t, policy, room)
    assert (steps, peak) == (len(schedule.steps), timeline.peak)
    assert problem.total_cost + extra == pytest.approx(timeline.cost)
    peak_of, unroll = machine_code().peak_of, machine_code().unroll
    for most in (peak, peak + 1, peak - 1, peak - 0.5, rng.uniform(0, 2 * peak)):
        assert peak_of(t, room, steps, problem.resident, most) == (peak if peak <= most else -1)
    for most in (extra, extra * (1 - 1e-15), extra / 2, rng.uniform(0, 2 * extra)):
        assert unroll(t, policy, room, most)[0] == (steps if extra <= most else -1)


@quick
@given(any_problem, randoms)
def test_interpreted_policies_cost_what_machine_code_says(problem, rng):
    evaluator = Evaluator(problem)
    policy = random_policy(problem, evaluator.tables, rng)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluation, "PATIENCE", -1)
        compiled = _found(evaluator, policy)
        patch.setattr(evaluation, "machine_code", lru_cache(_refused))
        patch.setattr(evaluation, "PATIENCE", 10**9)
        assert _found(evaluator, policy) == compiled


def _found(evaluator, policy):
    candidate = evaluator.judge(policy)
    return candidate and (candidate.peak, candidate.extra), evaluator.schedule(policy)


def _refused():
    raise AssertionError("numba is not needed for that")


@quick
@given(any_problem, randoms)
def test_moves_keep_to_the_rules_and_are_taken_back_exactly(problem, rng):
    t = tables(problem)
    room, other = scratch(t), scratch(t)
    policy = random_policy(problem, t, rng)
    INTERPRETED.link_all(policy, room)
    before, found = copy(policy), judged(problem, t, policy, room)
    journal = Journal(np.zeros(8, np.int32), np.zeros((8, 4), np.int64), np.zeros(1, np.int32))
    could = choices(problem, t)
    assume(len(could.gaps))
    for _ in range(10):
        if rng.random() < 0.5:
            with np.errstate(over="ignore"):  # its random numbers wrap around
                move(t, policy, room, could, journal, np.array([rng.randrange(1, 2**62)], np.uint64))
                tie(t, policy, room, could._replace(tied=rng.randrange(1, 4)), journal)
        else:
            journal.used[0] = 0
            for _ in range(rng.randrange(1, 10)):  # some more than once, and more than the journal has room for
                g = rng.choice(could.gaps[:3].tolist())
                at = [rng.randrange(-1, len(problem.ops) + 1) for _ in range(2)]
                put(t, policy, room, journal, g, rng.randrange(2), rng.randrange(2), *at)
        events = np.stack([policy.drop, policy.make])
        assert np.all((events == -1) | ((events > t.start) & (events < t.uses)))
        INTERPRETED.link_all(policy, other)
        if (schedule := Evaluator(problem).schedule(policy)) is not None:
            validate(problem.with_budget(None), schedule)
        assert judged(problem, t, policy, room) == judged(problem, t, policy, other)
        take_back(policy, room, journal)
        assert all(np.array_equal(a, b) for a, b in zip(policy, before, strict=True))
        assert judged(problem, t, policy, room) == found
        assert events_of(room) == events_of(other, before)


def events_of(room: Scratch, policy: Policy | None = None) -> list[set[int]]:
    """The gaps on each op's lists; made anew where a policy is given."""
    if policy is not None:
        INTERPRETED.link_all(policy, room)
    found = []
    for first, following in ((room.drop_first, room.drop_next), (room.make_first, room.make_next)):
        for g in first.tolist():
            on = []
            while g >= 0:
                on.append(g)
                g = int(following[g])
            assert len(set(on)) == len(on)
            found.append(set(on))
    return found


def test_repeated_blocks_are_known_by_their_structure():
    few, many = (choices(p, tables(p)) for p in map(transformer, (8, 24)))
    assert len(few.class_at) == len(many.class_at)
    assert len(many.gaps) > 2.5 * len(few.gaps)
    members = np.diff(many.class_at)
    assert members[members >= 24 - 4].sum() > 0.8 * len(many.gaps)
    assert sorted(many.members) == sorted(many.gaps)


def test_blocks_that_are_tied_are_decided_on_together():
    problem = transformer(8)
    t = tables(problem)
    policy, room = keep_only(problem, t), scratch(t)
    INTERPRETED.link_all(policy, room)
    journal = Journal(np.zeros(1024, np.int32), np.zeros((1024, 4), np.int64), np.zeros(1, np.int32))
    could, rng = choices(problem, t)._replace(tied=4), np.array([1], np.uint64)
    with np.errstate(over="ignore"):
        for _ in range(300):
            move(t, policy, room, could, journal, rng)
            tie(t, policy, room, could, journal)
    members = [could.members[a:b] for a, b in pairwise(could.class_at.tolist())]
    groups = [m[at : at + 4] for m in members for at in range(0, len(m), 4)]
    assert all(len(set(decided[group].tolist())) == 1 for decided in (policy.keep, policy.hold) for group in groups)
    assert any(len(set(policy.keep[m].tolist())) == 2 for m in members), "groups of a class are decided on apart"


def between(problem: Problem, share: float) -> Problem:
    """With a budget so far from the peak of the leanest segments to that of every op once."""
    low, high = (simulate(problem, s).peak for s in (chen(problem), every_op_once(problem)))
    return problem.with_budget(round(low + share * (high - low)))


@pytest.fixture
def short(monkeypatch):
    shorten(monkeypatch)


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("share", [0.6, 0.2])
@pytest.mark.parametrize("seed", range(4))
def test_larger_graphs(seed, share):
    plain = random_training_graph(seed, 40, seed % 2 == 0)
    problem = between(in_regions(plain) if seed > 1 else plain, share)
    answer = auto(problem, progress=False)
    timeline = validate(problem, answer.schedule)  # within the budget, too
    assert problem.total_cost < answer.bound <= timeline.cost * (1 + 1e-9)
    assert timeline.cost <= simulate(problem, chen(problem)).cost * (1 + 1e-9)
    assert not answer.note


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("seed", range(4))
def test_what_does_not_fit_names_a_budget_that_does(seed):
    plain = random_training_graph(seed, 30, seed % 2 == 0)
    problem = in_regions(plain) if seed > 1 else plain
    with pytest.raises(InfeasibleError) as caught:
        auto(problem.with_budget(problem.resident), progress=False)
    e = caught.value
    assert problem.resident < e.bound <= e.minimum <= simulate(problem, chen(problem)).peak
    assert validate(problem, e.schedule).peak == e.minimum
    enough = problem.with_budget(e.minimum)
    validate(enough, auto(enough, progress=False).schedule)


@pytest.mark.usefixtures("short")
def test_the_answer_depends_on_the_problem_alone():
    problem = between(random_training_graph(7, 40), 0.2)
    first = auto(problem, progress=False)
    beside: list[object] = []
    thread = threading.Thread(target=lambda: beside.append(minimum_peak(problem, progress=False)))
    thread.start()
    second = auto(problem, progress=False)
    thread.join()
    assert first == second
    assert beside == [minimum_peak(problem, progress=False)]


def test_what_relaxations_settle_needs_no_machine_code(monkeypatch):
    problem = between(random_training_graph(7, 40), 0.9)
    for module in (evaluation, annealing):
        monkeypatch.setattr(module, "machine_code", lru_cache(_refused))
    monkeypatch.setattr(rounds, "ENOUGH", 1e9)
    assert validate(problem, auto(problem, progress=False).schedule).cost > problem.total_cost


@pytest.mark.parametrize(("settled", "walked"), [(1e9, 1), (-1.0, len(rounds.ROUNDS))])
def test_near_the_bound_a_round_that_finds_nothing_is_the_last(settled, walked, monkeypatch):
    problem = between(random_training_graph(7, 40), 0.9)
    done = []
    monkeypatch.setattr(Search, "walk", lambda *args: done.append(args) or [])
    monkeypatch.setattr(rounds, "ENOUGH", -1.0)
    monkeypatch.setattr(rounds, "SETTLED", settled)
    validate(problem, auto(problem, progress=False).schedule)
    assert len(done) == walked


def test_out_of_time_there_is_an_answer_still(monkeypatch):
    monkeypatch.setattr(effort, "STEPS", 2e6)  # for the least budget, which is looked for without a limit
    monkeypatch.setattr(effort, "STEPS_PER_OP", 0.0)
    problem = between(random_training_graph(7, 40), 0.2)
    answer = auto(problem, time_limit=1e-3, progress=False)
    assert validate(problem, answer.schedule).cost <= simulate(problem, chen(problem)).cost * (1 + 1e-9)
    assert "time ran out" in answer.note
    with pytest.raises(InfeasibleError) as caught:
        auto(problem.with_budget(problem.resident), time_limit=1e-3, progress=False)
    segments = simulate(problem, chen(problem.with_budget(None))).peak
    assert problem.resident < caught.value.bound <= caught.value.minimum <= segments


@pytest.mark.parametrize("by_signal", [*more(False), True])
def test_interrupting_stops_every_walk(by_signal, monkeypatch):
    """Raised in a walk; or in the main thread, as Ctrl-C is, while walks run that would take minutes."""
    problem = between(random_training_graph(7, 40), 0.2)
    main = threading.main_thread().ident
    ticks = 0

    def tick(_: float) -> None:
        nonlocal ticks
        ticks += 1
        if not by_signal:
            raise KeyboardInterrupt
        if ticks == 1:
            signal.pthread_kill(main, signal.SIGINT)

    monkeypatch.setattr(rounds, "bar_of", lambda *_: nullcontext(SimpleNamespace(update=tick)))
    monkeypatch.setattr(effort, "CHANGES", 10 * effort.CHANGES)
    for module in ("bounds.cost", "search.lp_starts"):  # relaxations come before the walks
        monkeypatch.setattr(f"solvers.{module}.WORK", 1e4)
        monkeypatch.setattr(f"solvers.{module}.NODES", 0)
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)  # a process in the background ignores it
    before = set(threading.enumerate())
    gc.collect()  # what is raised while Python frees what other tests left is dropped
    try:
        with pytest.raises(KeyboardInterrupt):
            auto(problem, time_limit=300.0)
    finally:
        signal.signal(signal.SIGINT, usual)
    assert set(threading.enumerate()) <= before  # those of earlier tests may end
    assert ticks < PAUSES  # the first round alone has eight times as many


@pytest.mark.usefixtures("short")
def test_where_the_loss_leaves_no_room_the_lowest_peak_is_the_proven_one():
    """Nothing can be kept into the backward pass, and the re-run has too little room not to need its own segments."""
    problem = transformer(16)
    ops = list(problem.ops)
    first = ops[problem.boundary]
    ops[problem.boundary] = replace(first, workspace=90 << 20)
    least = minimum_peak(replace(problem, ops=tuple(ops)))
    assert least.peak == least.bound


@pytest.mark.thorough
def test_at_the_least_budget_the_answer_costs_much_less_than_the_leanest_schedule():
    """No start fits: walks go on from what nearly does, else they would not come far from the leanest schedule."""
    problem = random_training_graph(0, 80)
    least = minimum_peak(problem, progress=False)
    dearest = simulate(problem, least.schedule).cost - problem.total_cost
    answer = auto(problem.with_budget(least.peak), progress=False)
    assert validate(problem, answer.schedule).peak <= least.peak
    assert simulate(problem, answer.schedule).cost - problem.total_cost <= 0.6 * dearest


@pytest.mark.thorough
@pytest.mark.usefixtures("short")
def test_a_start_within_what_is_asked_for_ends_the_search_for_the_leanest(monkeypatch):
    plain = random_training_graph(3, 30)
    linked = replace(plain, link=Link(1.0, 1.0, least=0), movable=frozenset(range(len(plain.sizes))) - plain.pinned)
    for problem in (plain, linked):
        found = lean_peak(problem)
        search = search_of(problem, lambda steps: None)
        leaner = leanest_of(search, effort.Effort(1e4)).peak  # annealed
        assert leaner <= found
        with monkeypatch.context() as patch:
            patch.setattr(Search, "walk", None)  # nothing can be annealed
            assert leanest_of(search, effort.Effort(1e4), enough=found).peak == found
            with pytest.raises(TypeError):
                leanest_of(search, effort.Effort(1e4), enough=found - 1)
