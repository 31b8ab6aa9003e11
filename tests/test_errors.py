"""What bad input gets: an error of the project's own, naming what was given, and a model left as it was."""

import math
import re

import pytest
import torch
from torch import nn

import planner
from planner import plan
from planner.requests.budget import read

from .measure import held_before
from .real_models import gpt2

pytestmark = pytest.mark.usefixtures("short_searches")


def small():
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4)), torch.randn(8, 16)


@pytest.mark.parametrize("budget", [0, -1, math.inf, math.nan, "12", None, True])
def test_a_budget_that_is_not_a_positive_number(budget):
    model, x = small()
    with pytest.raises(planner.BudgetError) as e:
        plan(model, x, budget_gb=budget)
    assert repr(budget) in str(e.value)


def test_a_budget_under_the_minimum_says_what_would_do():
    case = gpt2(layers=1)
    before = {k: v.clone() for k, v in case.model.state_dict().items()}
    with pytest.raises(planner.InfeasibleBudgetError) as e:
        plan(case.model, case.batch, budget_gb=1e-3)
    assert e.value.minimum_gb * 2**30 > held_before(case)
    assert "parameters" in str(e.value)
    assert "0.001" in str(e.value)
    assert e.value.takes["parameters"] == sum(p.numel() * 4 for p in case.model.parameters())
    p = plan(case.model, case.batch, budget_gb=e.value.minimum_gb)
    assert p.peak_bytes <= p.budget_bytes
    assert case.model._compiled_call_impl is None
    for k, v in case.model.state_dict().items():
        assert torch.equal(v, before[k])


@pytest.mark.parametrize("least", [10_142_700, 2**20, 3 * 2**30 + 1, 5123])
def test_the_least_budget_is_enough_in_either_of_the_words_that_name_it(least):
    error = planner.InfeasibleBudgetError(1e-6, least, {})
    named = re.search(r"minimum_gb=(\S+) \((.*?)\)", str(error))
    assert named is not None
    assert all(read(each, 0) * 2**30 >= least for each in (float(named[1]), named[2]))


@pytest.mark.parametrize("thing", [None, 3, "model", lambda x: x, nn.Linear], ids=lambda thing: type(thing).__name__)
def test_something_that_is_not_a_module(thing):
    with pytest.raises(planner.ModelError, match=r"torch\.nn\.Module"):
        plan(thing, torch.zeros(1), budget_gb=1)


class Yields(nn.Linear):
    def forward(self, x):
        yield super().forward(x)


def test_a_forward_pass_that_is_a_generator_is_refused_in_words():
    with pytest.raises(planner.ModelError, match=r"Yields\.forward\(\) is a generator.*Return a list"):
        planner.plan(Yields(8, 8), budget_gb=1)


@pytest.mark.parametrize("thing", [None, "model"])
def test_only_modules_have_plans(thing):
    with pytest.raises(planner.ModelError, match=r"a torch\.nn\.Module has plans; this is"):
        planner.applied_plan(thing)
    with pytest.raises(planner.ModelError, match=r"a torch\.nn\.Module has plans; this is"):
        planner.applied_plans(thing)
    with pytest.raises(planner.ApplyError, match=r"remove\(\) needs a torch\.nn\.Module"):
        planner.plan(nn.Linear(2, 2), budget_gb=1).remove(thing or 3)


@pytest.mark.parametrize("mode", ["aten", "eager"])
def test_a_part_that_torch_jit_has_compiled_is_named(mode):
    model = nn.Sequential(nn.Linear(8, 8), torch.jit.trace(nn.Linear(8, 8), torch.randn(2, 8)))
    with pytest.raises(planner.ModelError, match=r"Sequential has a part, '1', that torch\.jit has"):
        planner.plan(model, budget_gb=1, mode=mode)
    with pytest.raises(planner.ModelError, match=r"is what torch\.jit has compiled"):
        planner.plan(model[1], budget_gb=1, mode=mode)


def test_a_model_with_nothing_to_train():
    model, x = small()
    model.requires_grad_(False)
    with pytest.raises(planner.ModelError, match="needs a gradient"):
        plan(model, x, budget_gb=1)


def test_a_model_whose_outputs_need_no_gradient():
    class Cut(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            return self.layer(x).detach()

    with pytest.raises(planner.ModelError, match="no output"):
        plan(Cut(), torch.zeros(2, 4), budget_gb=1)


def test_a_batch_that_the_model_does_not_accept():
    model, _ = small()
    with pytest.raises(planner.BatchError, match=r"\(8, 17\)"):
        plan(model, torch.randn(8, 17), budget_gb=1)
    with pytest.raises(planner.BatchError, match="unexpected"):
        plan(model, {"unexpected": torch.randn(8, 16)}, budget_gb=1)
    with pytest.raises(planner.BatchError, match="int"):
        plan(model, 3, budget_gb=1)
    assert model._compiled_call_impl is None


def test_a_first_call_that_fails_in_the_model_changes_what_it_changes_without_a_plan():
    class Fails(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers, self.head = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout()), nn.Linear(8, 4)

        def forward(self, x):
            return self.head(self.layers(x)[:, :7])

    seen = []
    for planned in (False, True):
        torch.manual_seed(0)
        model = Fails()
        if planned:
            planner.plan(model, budget_gb=1).apply()
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model(torch.randn(4, 8))
        seen.append([torch.get_rng_state(), *(b.clone() for b in model.buffers())])
    assert all(map(torch.equal, *seen))


def test_a_loop_that_leaves_out_a_batch_that_its_model_refuses_goes_on():
    """The model's own error comes, as without a plan."""
    model, batch = small()
    plan(model, budget_gb=1).apply()
    model(batch).sum().backward()
    with pytest.raises(RuntimeError, match="mat1 and mat2") as error:
        model(torch.randn(8, 17))
    assert not isinstance(error.value, planner.PlannerError)
    model(batch).sum().backward()
    assert planner.applied_plan(model) is not None


@pytest.mark.parametrize(
    ("loss_fn", "error"),
    [(3, planner.OptionError), (lambda y: y, planner.BatchError), (lambda y: y.nothing, planner.BatchError)],
)
def test_a_loss_that_is_not_a_scalar(loss_fn, error):
    model, x = small()
    with pytest.raises(error, match="loss_fn"):
        plan(model, x, budget_gb=1, loss_fn=loss_fn)


@pytest.mark.parametrize(
    "options", [{"solver": "magic"}, {"device": "abacus"}, {"optimizer": "magic"}, {"time_limit": 0}], ids=str
)
def test_an_unknown_option_lists_the_known_ones(options):
    model, x = small()
    (value,) = options.values()
    with pytest.raises(planner.OptionError) as e:
        plan(model, x, budget_gb=1, **options)
    assert repr(value) in str(e.value)


def test_apply_twice():
    model, x = small()
    p = plan(model, x, budget_gb=1)
    p.apply()
    with pytest.raises(planner.ApplyError, match="already"):
        p.apply()
    planner.applied_plan(model).remove()
    p.apply()


def test_the_budget_that_a_refusal_names_can_be_given_to_the_same_model():
    model, x = small()
    plan(model, budget_gb="40 kB").apply()
    with pytest.raises(planner.InfeasibleBudgetError) as e:
        model(x.expand(256, 8, 16)).square().mean().backward()
    plan(model, budget_gb=e.value.minimum_gb).apply()
    model(x.expand(256, 8, 16)).square().mean().backward()
    assert planner.applied_plan(model).record.peak_bytes <= e.value.minimum_gb * 2**30


def test_a_plan_applied_to_another_model():
    model, x = small()
    p = plan(model, x, budget_gb=1)
    other = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
    with pytest.raises(planner.ApplyError, match="Sequential"):
        p.apply(other)
    with pytest.raises(planner.ApplyError, match="Module"):
        p.apply(3)
    assert other._compiled_call_impl is None
    twin, _ = small()
    assert p.apply(twin) is twin
    twin(x).sum().backward()
    assert p.remove(twin)._compiled_call_impl is None


def test_a_budget_too_small_for_a_later_batch_is_refused_at_that_batch():
    model, x = small()
    p = plan(model, x, budget_gb=1e-4)
    p.apply()
    with pytest.raises(planner.InfeasibleBudgetError):
        model(torch.randn(4096, 16))
    model(x).sum().backward()


def test_never_silently_unplanned():
    model, x = small()
    plan(model, x, budget_gb=1).apply()
    with torch.compiler.set_stance("force_eager"), pytest.raises(planner.ApplyError, match="without its plan"):
        model(x)


def test_every_error_is_a_planner_error():
    errors = [getattr(planner, name) for name in planner.__all__ if name.endswith("Error")]
    assert len(errors) >= 7
    assert all(issubclass(e, planner.PlannerError) for e in errors)


@pytest.mark.parametrize("wrong", ["inference mode", "another width", "another name"])
def test_a_batch_with_which_no_step_can_be_taken_is_named_by_verify(wrong):
    model, x = small()
    p = plan(model, x, budget_gb=1)
    with torch.inference_mode():
        made = torch.randn(8, 16)
    batch = {"inference mode": made, "another width": torch.randn(8, 5), "another name": {"inputs": x}}[wrong]
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(planner.BatchError, match=r"a step of Sequential without the plan fails with the batch \(\(8, "):
        p.verify(batch)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert p.verify(x).gradients_agree
