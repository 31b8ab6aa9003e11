"""Planned graphs round as eager mode does: gradients to the last bit, with and without recomputation."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from planner import applied_plan, plan

from .plans import for_budget
from .variants import more

pytestmark = pytest.mark.usefixtures("short_searches")

WIDTH = 32


class Layers(nn.Module):
    def __init__(self, between):
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.between = between

    def forward(self, x):
        for linear in self.linears:
            x = self.between(linear(x))
        return x


def attention(x):
    heads = x.view(4, 2, -1, WIDTH)
    return F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.15).view(x.shape)


def distances(x):
    return torch.cdist(x, x.flip(0) + 1)[:, :WIDTH]


def step(model, x, autocast):
    """The loss and the gradients of one step; the backward pass is outside autocast, as torch's manual has it."""
    torch.manual_seed(1)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(x).float().square().mean()
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


@pytest.mark.parametrize(
    ("between", "dtype", "autocast"),
    [
        (lambda x: F.dropout(x, 0.1).sin(), torch.bfloat16, False),
        *more((lambda x: F.dropout(x, 0.3).sin(), torch.float16, False)),
        (lambda x: F.dropout(x, 0.04).sin(), torch.float32, False),  # 1 / 0.96 is another float than in doubles
        *more((lambda x: F.dropout(x, 0.1).sin(), torch.float32, True)),
        (attention, torch.float32, True),
        (distances, torch.float32, True),
    ],
    ids=["dropout-bf16", "dropout-fp16", "dropout-fp32", "dropout-autocast", "attention-autocast", "cdist-autocast"],
)
def test_gradients_are_those_of_eager_mode_to_the_last_bit(between, dtype, autocast):
    model, x = Layers(between).to(dtype), torch.randn(64, WIDTH, dtype=dtype)
    expected = step(copy.deepcopy(model), x, autocast)
    roomy = copy.deepcopy(model)
    plan(roomy, budget_gb=1).apply()
    assert all(map(torch.equal, step(roomy, x, autocast), expected))
    everything = applied_plan(roomy).baseline_peak_bytes
    plan(model, budget_gb=0.93 * everything / 2**30).apply()
    assert all(map(torch.equal, step(model, x, autocast), expected))
    assert applied_plan(model).overhead > 0


class Shared(nn.Module):
    """Eager mode casts a weight once in autocast, and adds its gradients in bfloat16; torch.compile does neither."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        for _ in range(4):
            x = torch.tanh(self.linear(x)) * 2
        return x


def mean_square(output):
    return output.float().square().mean()


def test_verify_runs_under_what_the_step_was_planned_under_and_says_whose_a_difference_is():
    model, x = Shared(), torch.randn(256, WIDTH)
    with torch.autocast("cpu", torch.bfloat16):
        everything = plan(model, x, budget_gb=1, loss_fn=mean_square)
        p = for_budget(everything, 0.9 * everything.baseline_peak_bytes / 2**30)
    assert p.overhead > 0
    model.eval()
    with torch.no_grad():
        seen = p.verify()
    assert not model.training
    assert not torch.is_autocast_enabled("cpu")
    assert abs(seen.prediction_error) < 0.01  # in float32, the step would take more
    assert seen.gradient_error == seen.capture_error > 0 == seen.plan_error
    assert "torch.compile's own" in str(seen)
    model.train()
    p.apply()
    step(model, x, autocast=True)
    assert applied_plan(model).solve_seconds == p.solve_seconds  # the one that was made


def test_verify_of_a_plan_made_under_autocast_at_the_first_step():
    model, x = Layers(lambda x: F.dropout(x, 0.1).sin()), torch.randn(64, WIDTH)
    plan(model, budget_gb=1, loss_fn=mean_square).apply()
    step(model, x, autocast=True)
    model.eval()
    seen = applied_plan(model).verify(x)
    assert abs(seen.prediction_error) < 0.01
    assert seen.gradient_error == 0
    assert not seen.cause
