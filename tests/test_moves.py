"""Values that leave over a link: `simulate` against a naive replay, `auto` against brute force, and what must hold."""

import random
from dataclasses import replace

import numpy as np
import pytest

from solvers import (
    InfeasibleError,
    Link,
    Move,
    Op,
    Problem,
    ProblemError,
    Schedule,
    auto,
    every_op_once,
    from_json,
    minimum_peak,
    minimum_peak_bound,
    relaxation_bound,
    simulate,
    solve,
    to_json,
    validate,
)
from solvers.exact.moving import cheapest_with_moves
from solvers.schedule import to_steps
from solvers.search.offload import MoveSearch
from solvers.search.policy import keep_only
from solvers.search.wires import AWAY

from .brute_force_moves import least_time
from .naive import replay_moves
from .problems import in_regions, random_training_graph, shorten, transformer, with_side_outputs

OPS = (Op("a", (), (0,), 1.0), Op("b", (0,), (1,), 4.0), Op("c", (1,), (2,), 4.0), Op("d", (0, 2), (3,), 1.0))
SMALL = Problem(OPS, (8, 4, 4, 4), 2, link=Link(4.0, 2.0, least=0), movable=frozenset({0}))
THERE_AND_BACK = (Move("send", 0, 1), Move("free", 0, 2), Move("fetch", 0, 3))


def tiny(rng: random.Random, forward: int) -> Problem:
    """Some forward ops and their backward ops; whole costs, and whole times of copies."""
    ops: list[Op] = []
    sizes: list[int] = []

    def add(reads: list[int]) -> int:
        sizes.append(rng.randrange(1, 4))
        cost, workspace = float(rng.randrange(2, 7)), rng.choice((0, 0, 1))
        ops.append(Op("", tuple(dict.fromkeys(reads)), (len(sizes) - 1,), cost, workspace, rng.random() > 0.3))
        return len(sizes) - 1

    kept: list[int] = []
    for _ in range(forward):
        kept.append(add(kept[-1:]))
    gradient = add([kept[-1]])
    for v in reversed(kept[:-1]):
        gradient = add([gradient, v])
    problem = Problem(tuple(ops), tuple(sizes), forward, frozenset({gradient}))
    once = simulate(problem, every_op_once(problem)).peak
    least = max(op.workspace + sum(sizes[v] for v in {*op.reads, *op.writes}) for op in ops)
    link = Link(
        rng.choice((1.0, 0.5)),
        rng.choice((1.0, 0.5)),
        latency=float(rng.randrange(2)),
        host=rng.choice((2, None)),
        least=0,
    )
    movable = frozenset(v for v in range(len(sizes)) if v != gradient and rng.random() < 0.9)
    return replace(problem, budget=max(least, once - rng.randrange(1, 3)), link=link, movable=movable)


def linked(seed: int, both: float = 1.0) -> Problem:
    """A training graph with a link, most of its values movable; some have regions, some ops with two outputs."""
    rng = random.Random(seed)
    problem = random_training_graph(seed, rng.randrange(3, 20))
    problem = (problem, in_regions(problem), with_side_outputs(problem))[seed % 3]
    movable = frozenset(v for v in range(len(problem.sizes)) if v not in problem.pinned and rng.random() < 0.8)
    host = rng.choice((None, sum(problem.sizes) // 4))
    rates = (10 ** rng.uniform(3, 5) for _ in range(2))
    link = Link(*rates, both, rng.choice((0.0, 0.1)), host, least=0)
    budget = int(simulate(problem, every_op_once(problem)).peak * rng.uniform(0.5, 1))
    return replace(problem, link=link, movable=movable, budget=budget)


def random_schedule(problem: Problem, seed: int) -> tuple[Schedule, int, float] | None:
    """A random policy's schedule, with the peak and the cost that the search believes it has."""
    search = MoveSearch(problem, lambda _: None)
    rng, t = np.random.default_rng(seed), search.tables
    policy = keep_only(problem, t)
    policy.keep[(search.wires.movable[t.value] == 1) & (rng.random(len(t.value)) < 0.6)] = AWAY
    policy.keep[(search.wires.lasting[t.value] == 0) & (rng.random(len(t.value)) < 0.3)] = 0
    found = search.judge(policy)
    return found and (search.schedule(found), found.peak, problem.total_cost + found.extra)


def with_rates(problem: Problem, **changes: object) -> Problem:
    return replace(problem, link=replace(problem.link, **changes))


def cost_of(problem: Problem) -> float:
    """What `auto` answers, validated; infinite where nothing fits."""
    try:
        return validate(problem, auto(problem).schedule).cost
    except InfeasibleError:
        return float("inf")


@pytest.fixture
def short(monkeypatch):
    shorten(monkeypatch)
    monkeypatch.setattr("solvers.search.effort.STEPS", 5e5)


def test_a_value_that_leaves_takes_no_room_and_what_reads_it_waits_until_it_is_back():
    timeline = validate(SMALL, Schedule((0, 1, 2, 3), THERE_AND_BACK))
    assert timeline.held == (8, 12, 8, 16)
    assert (timeline.cost, timeline.stall, timeline.moved, timeline.host_peak) == (14.0, 4.0, 16, 8)
    assert [(c.kind, c.begin, c.end) for c in timeline.copies] == [("send", 1.0, 3.0), ("fetch", 9.0, 13.0)]


@pytest.mark.parametrize(
    ("moves", "says"),
    [
        ([("free", 0, 2)], "follows no move"),
        ([("send", 0, 1), ("fetch", 0, 3)], "follows send"),
        ([("send", 0, 1)], "never freed"),
        ([("send", 0, 0), ("free", 0, 0), ("fetch", 0, 3)], "not held"),
        ([("send", 0, 1), ("free", 0, 1), ("fetch", 0, 3)], "reads the value before"),
        ([("send", 0, 1), ("free", 0, 2), ("fetch", 0, 2), ("free", 0, 3)], "follows fetch"),
        ([("send", 1, 2), ("free", 1, 3)], "not movable"),
        ([("send", 0, 2), ("free", 0, 1), ("fetch", 0, 3)], "in order"),
        ([("send", 0, 1), ("free", 0, 2), ("fetch", 0, 4)], "before steps 0..3"),
        ([("lend", 0, 1)], "no kind of move"),
    ],
)
def test_illegal_moves_are_named(moves, says):
    with pytest.raises(ProblemError, match=says):
        validate(SMALL, Schedule((0, 1, 2, 3), tuple(Move(*move) for move in moves)))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"link": Link(0.0, 1.0)}, "out 0.0"),
        ({"link": Link(1.0, 1.0, both=0.4)}, "both 0.4"),
        ({"link": Link(1.0, 1.0, host=-1)}, "host -1"),
        ({"movable": frozenset({9})}, "movable value 9"),
        ({"pinned": frozenset({0})}, "pinned, so that it cannot be movable"),
    ],
)
def test_links_that_cannot_be_are_named(change, says):
    with pytest.raises(ProblemError, match=says):
        replace(SMALL, **change)


def test_a_schedule_with_moves_needs_a_link_and_room_on_the_host():
    schedule = Schedule((0, 1, 2, 3), THERE_AND_BACK)
    with pytest.raises(ProblemError, match="no link"):
        validate(SMALL.without_link(), schedule)
    with pytest.raises(ProblemError, match="8 bytes on the host"):
        validate(with_rates(SMALL, host=7), schedule)


def test_files_hold_links_and_moves():
    assert from_json(to_json(SMALL)) == SMALL
    assert "link" not in to_json(SMALL.without_link())
    steps = to_steps(SMALL, Schedule((0, 1, 2, 3), THERE_AND_BACK))
    assert [step for step in steps if step[1] == 0 and step[0] != "compute"][:3] == [
        ["send", 0],
        ["free", 0],
        ["fetch", 0],
    ]


def test_the_search_the_judge_and_a_naive_replay_agree_on_every_layout():
    moved = 0
    for seed in range(60):
        problem = linked(seed)
        if (found := random_schedule(problem, seed)) is None:
            continue
        schedule, peak, cost = found
        timeline = validate(problem.with_budget(None), schedule)
        assert timeline.peak == peak
        assert timeline.cost == pytest.approx(cost, rel=1e-12)
        held, time, host = replay_moves(problem, schedule)
        assert list(timeline.held) == held
        assert timeline.cost == pytest.approx(time, rel=1e-12)
        assert timeline.host_peak == host
        moved += timeline.moved
    assert moved


def test_a_slower_link_never_finishes_a_schedule_sooner_and_the_judge_is_never_below_a_fluid_replay():
    for seed in range(40):
        problem = linked(seed, both=random.Random(seed).choice((0.5, 0.8, 1.0)))
        if (found := random_schedule(problem, seed)) is None:
            continue
        problem = problem.with_budget(None)
        cost = validate(problem, found[0]).cost
        assert replay_moves(problem, found[0])[1] <= cost * (1 + 1e-12)
        for change in (
            {"out": problem.link.out / 1.5},
            {"back": problem.link.back / 1.5},
            {"both": 0.5},
            {"latency": problem.link.latency + 0.2},
        ):
            assert validate(with_rates(problem, **change), found[0]).cost >= cost * (1 - 1e-12)


def test_auto_is_optimal_on_tiny_problems_and_bounds_hold():
    helped = 0
    for seed, forward in (*((seed, 2) for seed in range(8)), (1, 3), (8, 3)):
        problem = tiny(random.Random(seed), forward)
        best = least_time(problem)
        found = cost_of(problem)
        assert found == (float("inf") if best is None else best)
        if best is not None:
            assert relaxation_bound(problem) <= best * (1 + 1e-9)
            assert minimum_peak_bound(problem) <= problem.budget
            helped += best < cost_of(problem.without_link())
    assert helped >= 3


def test_more_link_more_host_and_more_budget_never_cost_more():
    for seed in range(5):
        problem = replace(tiny(random.Random(seed), 3), link=Link(0.5, 0.5, host=3, least=0))
        cost = cost_of(problem)
        assert cost_of(with_rates(problem, out=1.0)) <= cost
        assert cost_of(with_rates(problem, back=1.0)) <= cost
        assert cost_of(with_rates(problem, host=None)) <= cost
        assert cost_of(problem.with_budget(problem.budget + 1)) <= cost


@pytest.mark.thorough
def test_moves_cost_less_than_recomputing_and_values_that_run_once_may_leave(short):
    plain = transformer(3)
    plain = plain.with_budget(int(0.5 * simulate(plain, every_op_once(plain)).peak))
    movable = frozenset(v for op in plain.ops[: plain.boundary] for v in op.writes)
    rate = 0.1 * sum(plain.sizes[v] for v in movable) / sum(op.cost for op in plain.ops[: plain.boundary])
    problem = replace(plain, link=Link(rate, rate, 0.9, host=100 << 20), movable=movable)
    without, found = solve(plain), solve(problem)
    assert found.timeline.moved > 0
    assert without.bound > found.bound
    assert found.bound <= found.timeline.cost < without.timeline.cost
    once = replace(plain, ops=tuple(replace(op, recomputable=False) for op in plain.ops))
    with pytest.raises(InfeasibleError):
        solve(once)
    stuck = replace(once, link=problem.link, movable=movable)
    assert minimum_peak(with_rates(stuck, host=None)).peak < minimum_peak(once).peak
    leanest = minimum_peak(stuck)
    timeline = validate(stuck.with_budget(leanest.peak), leanest.schedule)
    assert leanest.bound <= timeline.peak == leanest.peak
    assert solve(stuck.with_budget(leanest.peak)).timeline.peak <= leanest.peak


def test_a_useless_link_changes_no_answer(short):
    problem = random_training_graph(5, 12)
    problem = problem.with_budget(int(0.8 * simulate(problem, every_op_once(problem)).peak))
    movable = frozenset(range(len(problem.sizes))) - problem.pinned
    slow = replace(problem, link=Link(1e-3, 1e-3, least=0), movable=movable)
    assert solve(slow).timeline.cost <= solve(problem).timeline.cost
    none = replace(problem, link=Link(1e9, 1e9, host=0, least=0), movable=movable)
    assert solve(none).schedule.moves == ()


def test_solvers_without_moves_still_answer_problems_with_a_link():
    problem = replace(random_training_graph(5, 6), link=Link(1e9, 1e9, least=0))
    problem = problem.with_budget(int(0.9 * simulate(problem, every_op_once(problem)).peak))
    for solver in ("chen", "ilp"):
        assert solve(problem, solver).schedule.moves == ()


def test_the_exact_search_leaves_what_it_cannot_judge():
    assert cheapest_with_moves(with_rates(SMALL, both=0.9).with_budget(16)) is None


@pytest.mark.parametrize("seed", [35, 65, 81, 105, 111])
def test_the_leanest_schedule_with_moves_is_no_higher_than_without(seed, monkeypatch):
    monkeypatch.setattr("solvers.search.effort.STEPS", 2e5)
    monkeypatch.setattr("solvers.search.effort.STEPS_PER_OP", 0.0)
    problem = linked(seed)
    without = minimum_peak(problem.without_link(), progress=False)
    found = minimum_peak(problem, progress=False)
    assert found.peak <= without.peak
    assert validate(problem.with_budget(None), found.schedule).peak == found.peak
