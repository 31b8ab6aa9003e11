"""Planned graphs round as eager mode does: gradients to the last bit, with and without recomputation."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from planner import applied_plan, plan

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
        (lambda x: F.dropout(x, 0.3).sin(), torch.float16, False),
        (lambda x: F.dropout(x, 0.04).sin(), torch.float32, False),  # 1 / 0.96 is another float than in doubles
        (lambda x: F.dropout(x, 0.1).sin(), torch.float32, True),
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
