"""Until the training loop is known, a plan is for a step or two, and is searched for briefly."""

import pytest
import torch
from torch import nn

from planner import Plan, applied_plan, plan
from planner.runtime.peaks import LONG
from planner.runtime.watch import Watch
from planner.session.provider import Provider
from solvers import BRIEF, InfeasibleError, Op, Problem, register_solver, simulate, solve
from solvers.solve import SOLVERS

pytestmark = pytest.mark.usefixtures("short_searches")

WIDTHS = (16, 48, 24, 64, 16, 40, 32, 16)


class Uneven(nn.Module):
    """Whose cheapest schedule takes a search: no two layers are of the same size."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(map(nn.Linear, WIDTHS[:-1], WIDTHS[1:]))

    def forward(self, x):
        y = x
        for layer in self.layers:
            y = layer(y).tanh().exp().sigmoid()
        return (y * x).square().mean()


def tight(model, x, *, share=0.7):
    peak = plan(model, x, budget_gb=1, progress=False).baseline_peak_bytes
    return f"{int(share * peak)} B"


def trained(model, x, steps):
    """The plans that it is trained by, one after each step."""
    optimizer, plans = torch.optim.SGD(model.parameters()), []
    for _ in range(steps):
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()
        plans.append(applied_plan(model))
    return plans


def test_a_loop_that_is_not_known_yet_has_a_brief_search_and_then_the_whole_one(monkeypatch):
    x = torch.randn(512, 16)
    budget = tight(Uneven(), x)
    first, *others = trained(plan(Uneven(), budget_gb=budget, progress=False).apply(), x, 3)
    assert first.solver == BRIEF
    assert "Searched briefly" in first.note
    assert {p.solver for p in others} == {"auto"}
    assert "briefly" not in others[-1].note
    assert others[-1].overhead < first.overhead
    monkeypatch.setattr(Provider, "_may_be_brief", lambda *_: False)
    whole = trained(plan(Uneven(), budget_gb=budget, progress=False).apply(), x, 2)
    assert {p.solver for p in whole} == {"auto"}
    assert whole[-1].schedule == others[-1].schedule


@pytest.mark.usefixtures("unwatched")
def test_a_loop_of_which_nothing_is_seen_has_a_whole_search_in_the_end(monkeypatch):
    x = torch.randn(512, 16)
    budget = tight(Uneven(), x)
    plans = trained(plan(Uneven(), budget_gb=budget, progress=False).apply(), x, 6)
    assert (plans[0].solver, plans[-1].solver) == (BRIEF, "auto")
    monkeypatch.setattr(Watch, "settled", property(lambda _: False))
    plans = trained(plan(Uneven(), budget_gb=budget, progress=False).apply(), x, LONG + 2)
    assert (plans[0].solver, plans[-1].solver) == (BRIEF, "auto")
    assert len({id(p.schedule) for p in plans}) == 2


def test_a_plan_for_a_known_batch_is_searched_for_in_full_and_one_from_a_file_that_was_not_serves_as_long(tmp_path):
    x, model = torch.randn(512, 16), Uneven()
    budget = tight(model, x)
    assert plan(model, x, budget_gb=budget, progress=False).solver == "auto"
    (brief,) = trained(plan(model, budget_gb=budget, progress=False).apply(), x, 1)
    brief.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    plans = trained(loaded.apply(Uneven()), x, 3)
    assert [p.solver for p in (brief, *plans)] == [BRIEF, BRIEF, "auto", "auto"]
    assert "Solved anew" in plans[-1].note


def chain(layers):
    """A chain of ops of different sizes and costs, and its backward pass."""
    forward = [Op(f"f{i}", (i - 1,) if i else (), (i,), 1 + i % 3) for i in range(layers)]
    backward = [
        Op(f"b{i}", (i, layers + n - 1) if n else (i,), (layers + n,), 2.0)
        for n, i in enumerate(reversed(range(layers)))
    ]
    sizes = (*(7 + (5 * i) % 11 for i in range(layers)), *[3] * layers)
    return Problem((*forward, *backward), sizes, boundary=layers)


def test_a_brief_solution_fits_and_says_whether_a_whole_search_may_find_more():
    problem = chain(40)
    for share in (0.9, 0.5):
        tighter = problem.with_budget(int(share * simulate(problem.with_budget(None), solve(problem).schedule).peak))
        brief, whole = solve(tighter, brief=True), solve(tighter)
        assert brief.timeline.peak <= tighter.budget
        assert whole.timeline.cost <= brief.timeline.cost
        assert brief.bound <= whole.timeline.cost
        assert brief.solver == BRIEF or brief.timeline.cost == pytest.approx(whole.timeline.cost, rel=1e-3)
    with pytest.raises(InfeasibleError):
        solve(problem.with_budget(20), brief=True)


def test_other_solvers_are_not_asked_to_be_brief():
    register_solver("own", lambda problem, *, time_limit=None, progress=None: SOLVERS["chen"](problem))
    try:
        assert solve(chain(10), "own", brief=True).solver == "own"
    finally:
        del SOLVERS["own"]
