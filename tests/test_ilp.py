"""The MILP against exhaustive search, and what every answer must keep to."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pulp
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from solvers import InfeasibleError, chen, ilp, minimum_peak, minimum_peak_bound
from solvers.auto import auto
from solvers.exact import checkmate_model, highs
from solvers.exact.coarsen import coarsen, expand, prune, trim
from solvers.problem import Op, Problem
from solvers.protocol import Solver
from solvers.schedule import Schedule, every_op_once, simulate, validate
from tests.brute_force import cheapest, lowest_peak
from tests.problems import random_training_graph, reused_problems, shorten, small_problems, transformer

CHECKS = tuple(HealthCheck)
any_small = st.one_of(small_problems(), reused_problems())


@pytest.fixture(scope="module", autouse=True)
def _short() -> Iterator[None]:
    """The searches that a model starts from are not what is tested here."""
    with pytest.MonkeyPatch.context() as patch:
        shorten(patch)
        yield


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing to start from: what the models do not find, nothing does."""
    monkeypatch.setattr("solvers.exact.checkmate._start", lambda problem, _: None)
    monkeypatch.setattr("solvers.exact.checkmate._lean", every_op_once)


def reproducible(examples: int) -> settings:
    return settings(max_examples=examples, deadline=None, derandomize=True, database=None, suppress_health_check=CHECKS)


def out_of_order() -> Problem:
    """Optimal only when a stage runs op 0, 1, 3, then 0 again, 2, 4: out of index order, and op 0 twice."""
    sizes = (4, 4, 4, 1, 1, 1, 8, 1)
    reads: tuple[tuple[int, ...], ...] = ((), (0,), (0,), (1,), (2,), (3, 4), (5,), (3, 4, 5))
    ops = tuple(Op(f"op{i}", r, (i,), 1.0) for i, r in enumerate(reads))
    return Problem(ops, sizes, 6, budget=9)


@pytest.mark.usefixtures("alone")
@reproducible(500)
@given(any_small)
def test_equals_exhaustive_search(problem: Problem) -> None:
    truth = cheapest(problem)
    if truth is None:
        with pytest.raises(InfeasibleError) as caught:
            ilp(problem, progress=False)
        minimum = caught.value.minimum
        assert minimum == lowest_peak(problem)
        assert caught.value.bound <= minimum
        validate(problem.with_budget(minimum), ilp(problem.with_budget(minimum), progress=False).schedule)
    else:
        answer = ilp(problem, progress=False)
        assert validate(problem, answer.schedule).cost == pytest.approx(truth)
        assert answer.bound <= truth + 1e-6
        assert not answer.note


@pytest.mark.parametrize(("solver", "forward"), [(ilp, 6), (auto, 20)])
def test_the_least_budget_that_one_time_limit_names_is_enough_for_another(solver: Solver, forward: int) -> None:
    problem = random_training_graph(4, forward, skips=True)
    for limit in (0.01, 0.5):
        with pytest.raises(InfeasibleError) as refused:
            solver(problem.with_budget(problem.resident + 1), time_limit=limit, progress=False)
        enough = problem.with_budget(refused.value.minimum)
        validate(enough, solver(enough, time_limit=0.01, progress=False).schedule)


@pytest.mark.usefixtures("alone")
def test_several_rounds_are_needed() -> None:
    problem = out_of_order()
    truth = cheapest(problem)
    assert truth is not None
    assert validate(problem, ilp(problem, progress=False).schedule).cost == pytest.approx(truth)


@reproducible(200)
@given(any_small)
def test_chen_is_valid(problem: Problem) -> None:
    try:
        validate(problem, chen(problem))
    except InfeasibleError as e:
        validate(problem.with_budget(e.minimum), chen(problem.with_budget(e.minimum)))


@pytest.mark.parametrize(
    ("seed", "forward", "skips", "share"), [(1, 6, True, 0.2), (2, 9, False, 0.3), (3, 11, True, 0.5)]
)
def test_proven_on_medium_graphs(seed: int, forward: int, skips: bool, share: float) -> None:
    problem = between(random_training_graph(seed, forward, skips), share)
    answer = ilp(problem, progress=False)
    assert validate(problem, answer.schedule).cost <= simulate(problem, chen(problem)).cost
    assert not answer.note


@pytest.mark.parametrize(("seed", "forward", "skips"), [(4, 20, True), (5, 29, False), (6, 29, True)])
def test_never_costlier_than_chen(seed: int, forward: int, skips: bool) -> None:
    problem = between(random_training_graph(seed, forward, skips), 0.25)
    answer = ilp(problem, time_limit=1.0, progress=False)
    timeline = validate(problem, answer.schedule)
    assert timeline.cost <= simulate(problem, chen(problem)).cost
    assert answer.bound <= timeline.cost * (1 + 1e-9)


def between(problem: Problem, share: float) -> Problem:
    """The problem with a budget `share` of the way from the leanest schedule's peak to that of keeping everything."""
    least, most = (simulate(problem, s).peak for s in (chen(problem), every_op_once(problem)))
    return problem.with_budget(int(least + share * (most - least)))


@pytest.mark.thorough
def test_large_graph_within_a_time_limit() -> None:
    problem = between(transformer(50), 0.2)
    assert len(problem.ops) > 1500
    answer = ilp(problem, time_limit=2.0, progress=False)
    timeline = validate(problem, answer.schedule)
    assert timeline.cost <= simulate(problem, chen(problem)).cost
    assert f"coarsened {len(problem.ops)} ops to" in answer.note
    assert answer.bound == 0.0


def test_large_graph_that_does_not_fit() -> None:
    problem = transformer(4)
    problem = problem.with_budget(minimum_peak_bound(problem) - 1)
    with pytest.raises(InfeasibleError) as caught:
        ilp(problem, time_limit=1.0, progress=False)
    again = problem.with_budget(caught.value.minimum)
    validate(again, ilp(again, time_limit=1.0, progress=False).schedule)


def test_no_budget_runs_every_op_once() -> None:
    problem = transformer(1)
    answer = ilp(problem)
    assert answer.schedule == every_op_once(problem)
    assert answer.bound == problem.total_cost


def test_the_answer_is_repeatable() -> None:
    problem = between(random_training_graph(7, 9), 0.2)
    assert ilp(problem, progress=False) == ilp(problem, progress=False)


@pytest.mark.usefixtures("alone")
def test_bytes_are_exact_at_real_sizes() -> None:
    """A schedule one byte above the budget is not an answer, however large the numbers."""
    gib = 1 << 30
    sizes = (3 * gib + 1, 2 * gib + 7, 4 * gib + 3, gib + 11, gib)
    ops = tuple(Op(f"op{i}", (i - 1,) if i < 4 else (0, 2, 3), (i,), 1.0 + i) for i in range(1, 5))
    problem = Problem((Op("op0", (), (0,), 1.0), *ops), sizes, 4)
    for problem in (problem.with_budget(lowest_peak(problem) + extra) for extra in (-1, 0, 1)):
        truth = cheapest(problem)
        if truth is None:
            with pytest.raises(InfeasibleError):
                ilp(problem, progress=False)
        else:
            assert validate(problem, ilp(problem, progress=False).schedule).cost == pytest.approx(truth)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("seed", range(4))
def test_cbc_agrees_with_highs(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = between(random_training_graph(seed, 4), 0.2)
    first = simulate(problem, ilp(problem, progress=False).schedule)
    monkeypatch.setattr(pulp.HiGHS, "available", lambda self: False)
    assert validate(problem, ilp(problem, progress=False).schedule).cost == pytest.approx(first.cost)


@pytest.mark.parametrize("name", ["highs", "cbc"])
def test_an_infeasible_model_is_called_infeasible(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "cbc":
        monkeypatch.setattr(pulp.HiGHS, "available", lambda self: False)
    problem = between(random_training_graph(1, 4), 0.5)
    problem = problem.with_budget(minimum_peak_bound(problem) - 1)
    assert problem.budget is not None
    model = checkmate_model.build(problem, checkmate_model.positions(problem, 1), problem.budget)
    assert highs.solve(problem, model, 10.0).status == "infeasible"


def test_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    ilp(between(random_training_graph(3, 8), 0.2), progress=False)
    assert capfd.readouterr() == ("", "")


def test_shows_its_progress(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    ilp(between(random_training_graph(3, 8), 0.2), progress=True)
    assert capfd.readouterr().err == ""  # of what takes no time
    monkeypatch.setattr("solvers.progress.DELAY", 0.0)
    ilp(between(random_training_graph(3, 8), 0.2), progress=True)
    assert "solving" in capfd.readouterr().err


@pytest.mark.parametrize(("forward", "backward"), [(8, 4), (30, 15), (1000, 1000)])
def test_coarse_schedules_expand_to_valid_ones(forward: int, backward: int) -> None:
    problem = random_training_graph(11, 60)
    coarse = coarsen(problem, forward, backward)
    assert coarse.starts[-1] == len(problem.ops)
    assert problem.boundary in coarse.starts
    assert coarse.problem.resident == problem.resident
    for schedule in (
        every_op_once(coarse.problem),
        chen(coarse.problem),
        minimum_peak(coarse.problem, progress=False).schedule,
    ):
        fine = expand(coarse, schedule)
        timeline = validate(problem, fine)
        loose = problem.with_budget(timeline.peak + (timeline.peak >> 3))
        trimmed = validate(loose, trim(loose, fine, float("inf")))
        assert trimmed.cost <= timeline.cost


def test_coarse_peaks_are_never_too_low() -> None:
    """Where every op may run again."""
    plain = random_training_graph(11, 60)
    ops = tuple(Op(o.name, o.reads, o.writes, o.cost, o.workspace) for o in plain.ops)
    problem = Problem(ops, plain.sizes, plain.boundary, plain.pinned, plain.resident)
    for groups in (8, 30):
        coarse = coarsen(problem, groups, groups // 2)
        for schedule in (
            every_op_once(coarse.problem),
            chen(coarse.problem),
            minimum_peak(coarse.problem, progress=False).schedule,
        ):
            peak = simulate(coarse.problem, schedule).peak
            assert simulate(problem, expand(coarse, schedule)).peak <= peak


def test_regions_are_never_mixed() -> None:
    plain = random_training_graph(12, 30)
    ops = tuple(
        Op(o.name, o.reads, o.writes, o.cost, o.workspace, o.recomputable, int(12 <= i < len(plain.ops) - 12))
        for i, o in enumerate(plain.ops)
    )
    problem = Problem(ops, plain.sizes, plain.boundary, plain.pinned, plain.resident)
    coarse = coarsen(problem, 10, 6)
    for a, b in zip(coarse.starts, coarse.starts[1:], strict=False):
        assert len({op.region for op in problem.ops[a:b]}) == 1


def test_prune_leaves_out_what_nothing_reads() -> None:
    problem = out_of_order()
    steps = (0, 1, 2, 0, 3, 1, 4, 5, 0, 6, 7)
    assert prune(problem, Schedule(steps)).steps == (0, 1, 2, 3, 4, 5, 6, 7)


def test_interrupting_stops_the_search() -> None:
    problem = between(random_training_graph(1, 14), 0.2)
    model = checkmate_model.build(problem, checkmate_model.positions(problem, 1), problem.budget)

    def interrupt(best: float, bound: float) -> None:
        raise KeyboardInterrupt

    before = set(threading.enumerate())
    with pytest.raises(KeyboardInterrupt):
        highs.solve(problem, model, 20.0, None, interrupt)
    assert set(threading.enumerate()) <= before  # those of earlier tests may end
