"""Models that cannot be planned: an error before the first step, or one warning and a step as it is."""

import copy
import logging
import warnings

import pytest
import torch
from torch import nn

from planner import (
    ApplyError,
    BudgetError,
    CaptureError,
    InfeasibleBudgetError,
    OptionError,
    PlanWarning,
    applied_plan,
    plan,
)

pytestmark = pytest.mark.usefixtures("short_searches")


class DataDependent(nn.Module):
    """No captured graph knows how many rows there are."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        y = self.linear(x)
        return y[y > 0].square().sum()


def layers():
    return nn.Sequential(*[m for _ in range(6) for m in (nn.Linear(64, 64), nn.GELU())])


TOO_LITTLE = {"budget_gb": 0.0006, "loss_fn": torch.Tensor.mean}  # parameters and gradients are 0.0002 GB
CASES = {
    "capture": (DataDependent, torch.randn(4, 8), {"budget_gb": 1, "mode": "aten"}, CaptureError, "nonzero"),
    "budget": (layers, torch.randn(512, 64), TOO_LITTLE, InfeasibleBudgetError, "too small"),
}


@pytest.mark.parametrize("with_batch", [True, False], ids=["batch", "first step"])
@pytest.mark.parametrize("case", CASES)
def test_a_model_without_a_plan_trains_as_it_is_after_one_warning_if_asked_for(case, with_batch):
    make, x, options, error, words = CASES[case]
    model = make()
    plain = copy.deepcopy(model)
    given = (x,) if with_batch else ()
    with pytest.raises(error, match=words):
        plan(model, *given, **options).apply()(x).mean().backward()
    if not with_batch:
        plan(model, **options).remove()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        p = plan(model, *given, on_failure="warn", **options)
        assert p.apply() is model
        for n in (4, 4, 3):  # of another shape, too
            model(x[:n] if case == "capture" else x).mean().backward()
            plain(x[:n] if case == "capture" else x).mean().backward()
    (said,) = [w for w in caught if issubclass(w.category, PlanWarning)]
    assert words in str(said.message)
    assert "on_failure" in str(said.message)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    assert applied_plan(model) is None
    if with_batch:
        assert words in repr(p)
        for use in (lambda: p.peak_bytes, p.verify, p.repair, lambda: p.save("nowhere")):
            with pytest.raises(ApplyError, match=words):
                use()
    assert p.remove() is model


@pytest.mark.usefixtures("always_compiled")
def test_a_model_that_changes_so_that_nothing_can_be_captured_goes_on_as_it_is_after_a_warning():
    """As Lightning's StochasticWeightAveraging has it: cumulative averages ask for the number of batches."""

    def trained(planned):
        torch.manual_seed(0)
        blocks = [m for _ in range(2) for m in (nn.Linear(32, 32), nn.BatchNorm1d(32), nn.GELU())]
        model, losses = nn.Sequential(*blocks), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if planned:
            plan(model, budget_gb=1, progress=False).apply()
        for step in range(5):
            if step == 3:
                for m in model.modules():
                    m.momentum = None
            loss = model(torch.randn(16, 32)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, model.state_dict()

    expected, state = trained(planned=False)
    with pytest.warns(PlanWarning, match="run without their plan from now on") as warned:
        losses, own = trained(planned=True)
    assert len(warned) == 1
    assert losses == expected
    assert all(torch.equal(own[name], t) for name, t in state.items())


def test_bad_arguments_are_errors_all_the_same():
    model, x = layers(), torch.randn(4, 64)
    for error, options in (
        (BudgetError, {"budget_gb": -1}),
        (OptionError, {"budget_gb": 1, "optimizer": "adamwn"}),
        (OptionError, {"budget_gb": 1, "on_failure": "ignore"}),
    ):
        with pytest.raises(error):
            plan(model, x, **{"on_failure": "warn", **options})


def test_a_model_that_can_be_planned_is():
    model = layers()
    plan(model, budget_gb=1, on_failure="warn").apply()
    model(torch.randn(4, 64)).mean().backward()
    assert applied_plan(model).options.on_failure == "warn"


@pytest.mark.parametrize("optimizer", [None, "adamw"])
def test_a_budget_that_no_batch_can_fit_is_refused_without_one(optimizer):
    model = layers()
    held = 2 * sum(p.nbytes for p in model.parameters()) * (1 if optimizer is None else 2)
    with pytest.raises(InfeasibleBudgetError, match="before a batch is known") as refused:
        plan(model, budget_gb=0.9 * held / 2**30, optimizer=optimizer)
    assert refused.value.minimum_bytes == pytest.approx(held, rel=0.01)
    assert refused.value.takes["gradients"] == sum(p.nbytes for p in model.parameters())
    plan(model, budget_gb=refused.value.minimum_gb, optimizer=optimizer)
    with pytest.warns(PlanWarning, match="trains without a plan"):
        plan(model, budget_gb=0.9 * held / 2**30, on_failure="warn", optimizer=optimizer)


def test_one_line_says_that_a_plan_was_made(caplog):
    caplog.set_level(logging.INFO, "planner")

    def said():
        lines = [r.getMessage() for r in caplog.records if r.name == "planner" and "planned" in r.getMessage()]
        caplog.clear()
        return lines

    model, x = layers(), torch.randn(64, 64)
    p = plan(model, x, budget_gb=1, loss_fn=torch.Tensor.mean)
    (line,) = said()
    assert line.startswith("planned in ")
    assert "of a budget of 1.00 GB, 0.0% more time" in line
    p.apply()
    model(x).mean().backward()
    assert not said()
    p.remove()
    plan(model, budget_gb=1).apply()
    model(x).mean().backward()
    (line,) = said()
    assert line.startswith("planned in ")
    model(torch.cat([x, x])).mean().backward()
    (line,) = said()
    assert line.startswith("planned anew, because gradients are there when a step begins")
