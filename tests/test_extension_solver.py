"""A fourth solver from outside the package: this one file adds it, for `planner.plan` and the command lines too."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from planner import InfeasibleBudgetError, OptionError, plan
from planner.cli.arguments import parser
from solvers import (
    SOLVERS,
    Answer,
    InfeasibleError,
    Problem,
    Schedule,
    SolverError,
    UnknownSolverError,
    every_op_once,
    minimum_peak_bound,
    register_solver,
    simulate,
    solve,
    to_json,
    validate,
)
from solvers.__main__ import main

from .measure import peak_of
from .problems import in_regions, random_training_graph, transformer


def late(problem: Problem) -> Schedule:
    """Drop each forward value at the end of the forward pass, and recompute it just before each op that reads it."""
    dropped = {v for v, i in enumerate(problem.producer) if i < problem.boundary} - problem.lasting
    steps = list(range(problem.boundary))
    for i in range(problem.boundary, len(problem.ops)):
        again: set[int] = set()
        needed = [v for v in problem.ops[i].reads if v in dropped]
        while needed:
            producer = problem.producer[needed.pop()]
            if producer not in again:
                again.add(producer)
                needed += [v for v in problem.ops[producer].reads if v in dropped]
        steps += [*sorted(again), i]
    return Schedule(tuple(steps))


def last_resort(problem: Problem, *, time_limit: float | None = None, progress: bool | None = None) -> Answer:
    """Keep everything where that fits; else recompute everything as late as possible."""
    schedules = (every_op_once(problem), late(problem))
    peaks = [simulate(problem, s).peak for s in schedules]
    for schedule, peak in zip(schedules, peaks, strict=True):
        if problem.budget is None or peak <= problem.budget:
            return Answer(schedule, note="the last resort" if schedule is schedules[1] else "")
    leanest = schedules[peaks.index(min(peaks))]
    raise InfeasibleError(problem.budget or 0, min(peaks), minimum_peak_bound(problem), leanest)


@pytest.fixture
def mine() -> Iterator[None]:
    register_solver("mine", last_resort)
    yield
    del SOLVERS["mine"]


@pytest.mark.usefixtures("mine")
@pytest.mark.parametrize(
    "problem", [transformer(4), in_regions(random_training_graph(3, 20))], ids=["blocks", "random"]
)
def test_solve_finds_it_and_judges_its_answer(problem: Problem) -> None:
    most = simulate(problem, every_op_once(problem)).peak
    solution = solve(problem.with_budget(most), "mine")
    assert solution.timeline.cost == problem.total_cost

    least = simulate(problem, late(problem)).peak
    assert least < most
    budgeted = problem.with_budget((least + most) // 2)
    solution = solve(budgeted, "mine")
    assert (solution.solver, solution.note) == ("mine", "the last resort")
    assert solution.timeline == validate(budgeted, solution.schedule)
    assert problem.total_cost < solution.bound < solution.timeline.cost  # a bound that it did not prove itself

    with pytest.raises(InfeasibleError) as caught:
        solve(problem.with_budget(least - 1), "mine")
    assert caught.value.minimum == least


@pytest.mark.usefixtures("mine")
def test_a_model_is_planned_and_trained_by_it() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.GELU())))
    x = torch.randn(512, 64)
    model(x).sum().backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()

    options = {"loss_fn": torch.sum, "solver": "mine", "costs": "roofline", "progress": False}
    with pytest.raises(InfeasibleBudgetError) as refused:
        plan(model, x, budget_gb=1e-6, **options)
    p = plan(model, x, budget_gb=refused.value.minimum_gb, **options)
    assert p.solver == "mine"
    assert "mine" in str(p)
    assert p.overhead > 0
    assert p.problem is not None
    assert p.schedule is not None
    assert validate(p.problem, p.schedule).cost > p.problem.total_cost

    p.apply()
    model(x).sum().backward()
    assert all(torch.equal(a, b.grad) for a, b in zip(gradients, model.parameters(), strict=True))


class Wide(nn.Module):
    """Takes much room for a moment: the forward pass peaks here."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + x.detach().repeat(64, 1).abs().view(64, *x.shape).sum(0)


def twice(problem: Problem, *, time_limit: float | None = None, progress: bool | None = None) -> Answer:
    """Run again, before the last op of the forward pass, all ops but the last four, and keep these results alone."""
    own = [i for i, op in enumerate(problem.ops[: problem.boundary]) if op.region == problem.ops[0].region]
    again = [i for i in own[:-4] if problem.ops[i].recomputable]
    every = list(range(len(problem.ops)))
    schedule = Schedule((*every[: own[-1]], *again, *every[own[-1] :]))
    if problem.budget is not None and (peak := simulate(problem, schedule).peak) > problem.budget:
        raise InfeasibleError(problem.budget, peak, minimum_peak_bound(problem), schedule)
    return Answer(schedule)


def test_statistics_of_layers_that_run_again_in_the_forward_pass_stay_for_its_end(tmp_path) -> None:
    layers = [layer for _ in range(12) for layer in (nn.BatchNorm1d(2048, affine=False), nn.Tanh())]
    model, x = nn.Sequential(nn.Linear(1, 2048), *layers, Wide()), torch.randn(2, 1)
    register_solver("twice", twice)
    try:
        p = plan(model, x, budget_gb=1, loss_fn=torch.sum, solver="twice", progress=False)
    finally:
        del SOLVERS["twice"]
    before = x.nbytes + sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    p.apply()
    assert before + peak_of(lambda: model(x).sum().backward(), tmp_path) == p.peak_bytes


@pytest.mark.usefixtures("mine")
def test_the_command_lines_list_it(tmp_path, capsys) -> None:
    options = parser().parse_args(["plan", "train.py:make", "--budget-gb", "1", "--solver", "mine"])
    assert options.solver == "mine"

    problem = transformer(2)
    path = tmp_path / "problem.json"
    path.write_text(json.dumps(to_json(problem.with_budget(simulate(problem, late(problem)).peak))))
    assert main([str(path), "--solver", "mine", "--quiet"]) == 0
    assert "the last resort" in capsys.readouterr().out


def test_where_it_is_not_registered_nobody_knows_it() -> None:
    problem = transformer(1)
    with pytest.raises(UnknownSolverError, match="'mine' is not known; the known ones are auto, chen, ilp"):
        solve(problem, "mine")
    with pytest.raises(OptionError, match="solver='mine' is not known; give one of auto, chen, ilp"):
        plan(nn.Linear(4, 4), torch.ones(2, 4), budget_gb=1, loss_fn=torch.sum, solver="mine")


@pytest.mark.usefixtures("mine")
def test_registrations_and_answers_that_cannot_be_used_are_refused(monkeypatch) -> None:
    register_solver("mine", last_resort)  # the same one again is no conflict
    for name in ("auto", "mine"):
        with pytest.raises(SolverError, match=f"another solver has the name '{name}'"):
            register_solver(name, lambda problem, **_: Answer(every_op_once(problem)))
    with pytest.raises(SolverError, match="not empty"):
        register_solver("", last_resort)
    with pytest.raises(SolverError, match="cannot be called"):
        register_solver("other", None)

    problem = transformer(1)
    monkeypatch.setitem(SOLVERS, "mine", lambda problem, **_: every_op_once(problem))
    with pytest.raises(SolverError, match=r"returned Schedule.*returns solvers\.Answer"):
        solve(problem, "mine")
    monkeypatch.setitem(SOLVERS, "mine", lambda problem, **_: Answer(Schedule((0, 1))))
    with pytest.raises(SolverError, match="never runs"):
        solve(problem, "mine")
