"""Python's collector, which pauses while a plan is made and compiled."""

import gc
import weakref

import pytest
import torch
from torch import nn

from planner import plan

pytestmark = pytest.mark.usefixtures("short_searches")


class Checked(nn.Module):
    """Two layers, with a check between that torch.compile does not see, and that refuses what it is told to."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        self.refuses = False
        self.seen = []

    @torch.compiler.disable
    def check(self, x):
        self.seen.append(weakref.ref(x))
        if self.refuses:
            raise ValueError("not this batch")
        return x * 1

    def forward(self, x):
        return self.second(self.check(self.first(x).relu())).square().mean()


def test_what_calls_that_fail_have_made_does_not_stay():
    model = Checked().train()
    plan(model, budget_gb=1, mode="aten").apply()
    for rows in (256, 128):  # each kind of calls has a plan of its own
        x = torch.randn(rows, 64)
        model(x).backward()
        model.refuses = True
        with pytest.raises(ValueError, match="not this batch"):
            model(x)
        model.refuses = False
        failed = model.seen[-1]
        model(torch.randn(rows // 2 + 1, 64)).backward()  # by a new plan
        assert failed() is None
    assert gc.isenabled()


def test_a_collector_that_is_off_stays_off():
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    gc.disable()
    try:
        plan(model, budget_gb=1, mode="aten").apply()
        model(torch.randn(64, 64)).sum().backward()
        assert not gc.isenabled()
    finally:
        gc.enable()
