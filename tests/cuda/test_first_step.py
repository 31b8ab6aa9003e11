"""What the allocator shows: the log line after the first step, and what takes more than the budget later."""

import pytest
import torch

from planner import PlanWarning, plan

from .cases import needs_cuda

pytestmark = needs_cuda


def test_the_first_step_is_measured_and_within_3_percent(caplog, recwarn):
    caplog.set_level("INFO", "planner")
    layers = [layer for _ in range(8) for layer in (torch.nn.Linear(1024, 1024), torch.nn.GELU())]
    model = torch.nn.Sequential(*layers).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    plan(model, budget_gb="50%", optimizer=optimizer, loss_fn=lambda y: y.square().mean()).apply()
    model(torch.randn(32768, 1024, device="cuda")).square().mean().backward()
    (line,) = [r.message for r in caplog.records if "first step" in r.message]
    assert "measured (" in line
    assert [w for w in recwarn if w.category is PlanWarning] == []


def test_what_the_loop_holds_between_its_steps_beyond_the_budget_is_warned_of():
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 64)).cuda()
    plan(model, budget_gb="1 GB").apply()
    torch.cuda.reset_peak_memory_stats()

    def steps(number):
        for _ in range(number):
            model(torch.randn(8, 64, device="cuda")).mean().backward()

    steps(4)
    torch.empty(2**31, dtype=torch.uint8, device="cuda")
    with pytest.warns(PlanWarning, match=r"takes 2\.\d+ GB"):
        steps(12)
