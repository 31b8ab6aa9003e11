"""A call without gradients that takes more than the budget is said, with all that it takes, and counts."""

import re
import warnings
from functools import partial

import pytest
import torch
from torch import nn

from planner import PlanWarning, plan

from .loop_harness import GB, STEPS, Loop, run, run_within

pytestmark = pytest.mark.usefixtures("short_searches")


def validated(put, ended, sanity=False):
    """A small volume trains, and a larger one validates: there, the workspace of a convolution is most of the peak."""
    model = put(nn.Sequential(nn.Conv3d(1, 16, 3), nn.ReLU(), nn.Conv3d(16, 2, 3)))
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(STEPS):
        if sanity and not step:
            with torch.no_grad():
                model(torch.randn(1, 1, 24, 24, 24))
        loss = model(torch.randn(1, 1, 12, 12, 12)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model(torch.randn(1, 1, 24, 24, 24))
        ended(loss)


@pytest.mark.parametrize("sanity", [False, True], ids=["after a step", "before the first, too"])
def test_workspaces_of_calls_without_gradients_are_counted(sanity):
    loop = Loop(partial(validated, sanity=sanity), share=0.9)
    with warnings.catch_warnings(), torch.backends.mkldnn.flags(enabled=False):
        warnings.simplefilter("ignore")
        budget = loop.share * run(loop).peak
    with pytest.warns(PlanWarning) as caught, torch.backends.mkldnn.flags(enabled=False):
        seen = run_within(loop, budget)
    *before, said = _said(caught)  # before the first step, what its optimizer holds is not known
    assert len(before) == sanity
    assert said == pytest.approx(seen.peak, rel=0.01)
    assert seen.infeasible == [budget]
    assert seen.budget >= seen.peak == pytest.approx(max(seen.predicted), rel=0.01)


def _said(caught):
    found = [re.search(r"without gradients take ([\d.]+) (\w+)", str(each.message)) for each in caught]
    return [float(each[1]) * {"kB": 2**10, "MB": 2**20, "GB": GB}[each[2]] for each in found if each]


class Rows(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.head = nn.LSTM(28, 64, batch_first=True), nn.Linear(64, 10)

    def forward(self, x):
        return self.head(self.layers(x)[0][:, -1])


def rows_of_images(put, ended):
    model = put(Rows())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(STEPS):
        loss = model(torch.randn(8, 28, 28)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            model(torch.randn(400, 28, 28))
        ended(loss)


def test_workspaces_that_recurrent_layers_have_without_gradients_are_counted():
    loop = Loop(rows_of_images)
    with pytest.warns(PlanWarning) as caught:
        seen = run_within(loop, 0.75 * run(loop).peak)
    assert _said(caught) == [pytest.approx(seen.peak, rel=0.03)]


def _perturbed(model):
    with torch.no_grad():
        for _ in range(STEPS):
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=1e-3)
            model(torch.randn(2048, 32))


def test_calls_of_a_model_that_is_trained_without_gradients_are_said():
    """As evolution strategies and zeroth-order optimizers do; no plan is ever made."""
    model = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 64))
    plan(model, budget_gb=(2 << 20) / GB).apply()
    with pytest.warns(PlanWarning, match=r"no plan is for such calls") as caught:
        _perturbed(model)
    assert _said(caught) == [pytest.approx(2048 * (32 + 256 + 256) * 4 + 100_608, rel=0.01)]


def test_a_call_without_gradients_that_fits_is_not_said():
    with warnings.catch_warnings(), torch.backends.mkldnn.flags(enabled=False):
        warnings.simplefilter("error", PlanWarning)
        loop = Loop(validated)
        peak = run(loop).peak
        assert run_within(loop, 1.02 * peak).peak == peak
