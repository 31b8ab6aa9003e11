"""The log line after the first step, where there is something to measure."""

import torch

from planner import PlanWarning, plan

from .cases import needs_cuda

pytestmark = needs_cuda


def test_the_first_step_is_measured_and_within_3_percent(caplog, recwarn):
    caplog.set_level("INFO", "planner")
    layers = [layer for _ in range(8) for layer in (torch.nn.Linear(1024, 1024), torch.nn.GELU())]
    model = torch.nn.Sequential(*layers).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    plan(model, budget_gb="50%", optimizer=optimizer).apply()
    model(torch.randn(32768, 1024, device="cuda")).square().mean().backward()
    (line,) = [r.message for r in caplog.records if r.name == "planner"]
    assert "measured (" in line
    assert [w for w in recwarn if w.category is PlanWarning] == []
