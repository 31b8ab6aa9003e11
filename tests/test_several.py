"""Calls of several kinds in one step, before one backward pass: planned together, each by graphs of its own."""

import copy

import pytest
import torch
from torch import nn

from planner import Plan, applied_plan, applied_plans, plan
from planner.core.maxima import Maxima
from planner.errors import gb
from planner.planning.together import joined
from planner.runtime.learnt_shapes import LearntShapes
from planner.runtime.together import Together

from .loops import mlp
from .variants import more

pytestmark = pytest.mark.usefixtures("short_searches", "always_compiled")
A, B, C = ("a",), ("b",), ("c",)


def step(together, *kinds):
    return [together.call_begins(kind, first=not at) for at, kind in enumerate(kinds)]


def after(*kinds, **recorded):
    together = Together()
    step(together, *kinds)
    together.recorded(**{"passes": 1, "roles": 1, **recorded})
    return together


def test_a_step_of_several_kinds_is_planned_together_where_one_backward_pass_goes_through_all():
    assert after(A, B).kinds == (A, B)
    assert after(A, B, A).kinds == (A, B, A)
    assert after(A, A).kinds == after(A).kinds == after(A, B, passes=2).kinds == after(A, B, roles=2).kinds == ()


def test_steps_that_leave_calls_out_are_of_the_same_plan_and_others_end_it():
    together = after(A, B, C)
    assert not any(step(together, A, C) + step(together, B) + step(together, ("d",)))
    assert together.kinds
    assert step(together, B, A) == [False, True]
    assert not together.kinds
    step(together, A, B)
    together.recorded(passes=1, roles=1)
    assert not together.kinds  # nor is it planned together again


def test_a_step_with_several_backward_passes_ends_a_plan_for_one():
    together = after(A, B)
    step(together, A)
    together.recorded(passes=1, roles=1)
    assert together.kinds
    step(together, A, B)
    together.recorded(passes=2, roles=1)
    assert step(together, A, B) == [True, False]


def test_sizes_that_one_step_has_together_do_not_change_from_step_to_step():
    shapes, sizes = LearntShapes(Maxima({}), tells=False), [Maxima({"x": {0: n}}) for n in (40, 30, 20)]
    for at, each in enumerate(sizes):
        shapes.note((), each, together=at > 0)
    assert shapes.free == {}
    assert not shapes.shrunk((), sizes[2])
    shapes.note((), Maxima({"x": {0: 25}}))
    assert shapes.free == {"x": {0}}


def rows(n):
    return torch.randn(n, 64)


def train(model, batches, *, between=lambda: None):
    """Steps on pairs of batches; the gradients of the last."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for pair in batches:
        losses = [model(x).square().mean() for x in pair]
        optimizer.zero_grad()
        sum(losses).backward()
        optimizer.step()
        between()
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize("last", [(96, 32), (32, 96), (96,), *more(((48, 32),))], ids=str)
def test_whatever_step_comes_next_gradients_are_those_of_eager(last):
    model = mlp(64, 3, 8)
    twin = copy.deepcopy(model)
    batches = [[rows(n) for n in sizes] for sizes in ((96, 32), (96, 32), last)]
    plan(model, budget_gb="280 kB").apply()
    assert all(map(torch.equal, train(model, batches), train(twin, batches)))


@pytest.fixture
def trained():
    """A model that trains by a plan for steps of two calls, with sizes of their own."""
    model = mlp(64, 3, 8)
    plan(model, budget_gb="280 kB").apply()
    train(model, [[rows(96), rows(32)] for _ in range(2)])
    return model


def test_plans_of_a_step_have_its_peak_and_their_own_graphs(trained):
    one, other = applied_plans(trained)
    assert one.peak_bytes == other.peak_bytes <= one.budget_bytes
    assert {t.shape for p in (one, other) for t in p.step.batch} == {(96, 64), (32, 64)}
    assert one.recipe != other.recipe


def test_a_plan_of_a_step_is_shown_and_saved_as_others_are(trained, tmp_path):
    planned = applied_plan(trained)
    assert "planned together" in planned._repr_html_()
    assert f"peaks at {gb(planned.peak_bytes)}" in str(planned.explain())
    planned.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").peak_bytes == planned.peak_bytes


def test_parameters_that_calls_share_have_one_gradient():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    step = joined([plan(model, torch.randn(n, 8), budget_gb=1).source.captured for n in (4, 6)])
    assert sorted(len(link.uses) for link in step.links) == [2] * 4
    assert step.outputs == ((0, 0), (1, 0))
