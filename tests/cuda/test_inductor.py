"""Plans in graphs that Inductor compiles to Triton's kernels: their exact peak, and what they compute."""

import pytest
import torch
from torch import nn

from planner import InfeasibleBudgetError, applied_plan, plan

from ..measure import step
from .cases import ROOM_TO_SPARE, measured, needs_cuda, on_cuda, predicted

pytestmark = needs_cuda


def fused(case, budget_gb):
    return plan(case.model, case.batch, budget_gb=budget_gb, loss_fn=case.loss_fn, mode="inductor")


def settled(case):
    """As `measured()`, after a step that shows the loop: its plan is compiled in the next one."""
    step(case)
    case.model.zero_grad(set_to_none=True)
    return measured(case)


@pytest.mark.parametrize("share", [0.6, None])
@pytest.mark.parametrize("name", ["gpt2", "gpt2_dropout", "llama", "resnet50"])
def test_the_budget_holds_and_the_peak_is_as_predicted(name, share):
    """At a share of what torch.compile takes, and at the smallest feasible budget."""
    case = on_cuda(name)
    everything = fused(case, ROOM_TO_SPARE)
    context = everything.account["CUDA context"] / 2**30
    try:
        p = fused(case, share * everything.peak_bytes / 2**30 if share else context)
    except InfeasibleBudgetError as e:
        p = fused(case, e.minimum_gb)
    assert p.overhead > 0
    p.apply()
    peak = settled(case)
    now = applied_plan(case.model)
    assert now.options.mode == "inductor"
    assert peak <= now.budget_bytes - now.account["CUDA context"]
    assert peak == pytest.approx(predicted(now), rel=0.02)


@pytest.mark.parametrize("name", ["gpt2_dropout", "resnet50"])
def test_with_room_to_spare_the_model_runs_as_torch_compile_runs_it(name):
    case = on_cuda(name)
    case.model.compile()
    alone = settled(case)
    case = on_cuda(name)
    case.model.compile()
    p = fused(case, ROOM_TO_SPARE).apply()
    assert p.options.mode == "inductor"
    peak = settled(case)
    assert peak == pytest.approx(alone, rel=0.02)
    assert peak == pytest.approx(predicted(p), rel=0.02)


def test_a_plan_is_verified_on_a_real_step_under_bf16_autocast():
    model = nn.Sequential(*(m for _ in range(8) for m in (nn.Linear(1024, 1024), nn.GELU(), nn.LayerNorm(1024)))).cuda()
    x = torch.randn(8192, 1024, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        everything = plan(model, x, budget_gb=ROOM_TO_SPARE, loss_fn=torch.Tensor.mean, mode="inductor")
        p = plan(model, x, budget_gb=0.8 * everything.peak_bytes / 2**30, loss_fn=torch.Tensor.mean, mode="inductor")
        seen = p.verify()
    assert seen.within_budget
    assert seen.gradients_agree
    assert abs(seen.prediction_error) < 0.02
