"""A call without gradients that takes more than the budget is said, with all that it takes."""

import re
import warnings
from functools import partial

import pytest
import torch
from torch import nn

from planner import PlanWarning

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
    said = [text for each in caught if "without gradients take" in (text := str(each.message))]
    assert len(said) == 1
    assert seen.peak > seen.budget == budget
    number, unit = re.search(r"take ([\d.]+) (\w+)", said[0]).groups()
    taken = float(number) * {"kB": 2**10, "MB": 2**20, "GB": GB}[unit]
    assert taken == pytest.approx(seen.peak, rel=0.01)


def test_a_call_without_gradients_that_fits_is_not_said():
    with warnings.catch_warnings(), torch.backends.mkldnn.flags(enabled=False):
        warnings.simplefilter("error", PlanWarning)
        loop = Loop(validated)
        peak = run(loop).peak
        assert run_within(loop, 1.02 * peak).peak == peak
