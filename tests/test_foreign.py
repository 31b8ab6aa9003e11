"""Plans for cards that are not here: attention is that of the card's kernels, and the model still runs where it is."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from planner import PlanWarning, applied_plan, plan
from planner.capture.trace.attention import kernel_of
from planner.devices.specs import DEVICES

pytestmark = pytest.mark.usefixtures("short_searches")

LENGTH, HEADS, BATCH = 128, 4, 2


class Attention(nn.Module):
    """One layer of attention, between two products."""

    def __init__(self, dropout=0.1, dtype=torch.bfloat16, masked=False, width=16):
        super().__init__()
        self.inner = nn.Linear(64, 3 * HEADS * width, dtype=dtype)
        self.outer = nn.Linear(HEADS * width, 64, dtype=dtype)
        self.dropout = dropout
        # an input of the graph: nothing is known of what it says
        self.register_buffer("mask", torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril() if masked else None)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.inner(x).chunk(3, -1))
        out = functional.scaled_dot_product_attention(q, k, v, self.mask, self.dropout)
        return self.outer(out.transpose(1, 2).flatten(2)).float().square().mean()


def batch(dtype=torch.bfloat16, device="cpu"):
    return torch.zeros(BATCH, LENGTH, 64, dtype=dtype, device=device)


SCORES = BATCH * HEADS * LENGTH * LENGTH


@pytest.mark.compat
@pytest.mark.parametrize(
    ("options", "card", "kernel"),
    [
        ({}, "h100", "flash"),
        ({"width": 20}, "a100", "flash"),  # padded to a multiple of 8
        ({}, "mi300x", "flash"),
        ({"dtype": torch.float16}, "t4", "efficient"),  # no flash attention before Ampere
        ({"dtype": torch.float32}, "h100", "efficient"),
        ({"masked": True}, "h100", "efficient"),
    ],
)
def test_a_card_keeps_no_scores_of_attention_with_dropout(options, card, kernel):
    """Output, log-sum-exp, seed and offset, as with dropout there; the CPU's own graph keeps scores and masks."""
    dtype = options.get("dtype", torch.bfloat16)
    made = {"budget_gb": 4, "device": card, "progress": False}
    p = plan(Attention(**options).to("meta"), batch(dtype, "meta"), **made)
    kept = [d for d in p.decisions if f"_{kernel}_attention" in d.op]
    bias = SCORES * dtype.itemsize if options.get("masked") else 0
    assert 3 <= len(kept) <= 4
    assert max(d.nbytes for d in p.decisions) <= max(3 * BATCH * LENGTH * HEADS * 24 * dtype.itemsize, bias)
    assert p.eager_peak_bytes <= p.baseline_peak_bytes + 2**20
    on_cpu = plan(Attention(**options), batch(dtype), **made)
    assert on_cpu.peak_bytes == p.peak_bytes


def test_autocast_of_the_cards_kind_is_that_of_the_trace(monkeypatch):
    """On a machine without such a card, torch switches it off by itself, with a warning."""
    layers = [layer for _ in range(8) for layer in (torch.nn.Linear(64, 64), torch.nn.Tanh())]
    model, x = torch.nn.Sequential(*layers).to("meta"), torch.zeros(65536, 64, device="meta")
    options = {"budget_gb": 4, "device": "h100", "loss_fn": torch.Tensor.mean, "progress": False}
    whole = plan(model, x, **options).baseline_peak_bytes
    try:
        torch.set_autocast_enabled("cuda", True)
        torch.set_autocast_dtype("cuda", torch.bfloat16)
        cast = plan(model, x, **options).baseline_peak_bytes
    finally:
        torch.set_autocast_enabled("cuda", False)
    assert not torch.is_autocast_enabled("cpu")
    with torch.autocast("cpu", torch.bfloat16):
        assert plan(model, x, **options).baseline_peak_bytes == cast < whole


def test_a_model_that_is_planned_for_a_card_runs_where_it_is_by_its_own_kernels():
    torch.manual_seed(0)
    model, x = Attention(dtype=torch.float32), torch.randn(BATCH, LENGTH, 64)

    def gradients():
        torch.manual_seed(1)
        model(x).backward()
        found = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        return found

    eager = gradients()
    plan(model, x, budget_gb=4, device="h100", progress=False).apply()
    for _ in range(2):
        for ours, theirs in zip(gradients(), eager, strict=True):
            assert torch.allclose(ours, theirs, atol=1e-6)
    assert not any("efficient" in d.op or "flash" in d.op for d in applied_plan(model).decisions)


def qkv(width=64, dtype=torch.float16, heads=4, length=32, of_keys=None):
    q = torch.empty(2, heads, length, width, dtype=dtype, device="meta")
    k = torch.empty(2, of_keys or heads, 32, width, dtype=dtype, device="meta")
    return q, k, k


@pytest.mark.parametrize(
    ("given", "rest", "card", "kernel"),
    [
        (qkv(), {}, "v100", "efficient"),
        (qkv(dtype=torch.bfloat16), {}, "v100", "native"),
        (qkv(dtype=torch.float64), {}, "h100", "native"),
        (qkv(width=256), {}, "a100", "flash"),
        (qkv(width=256), {}, "rtx4090", "efficient"),  # no backward kernel so wide
        (qkv(width=320), {}, "h100", "efficient"),
        (qkv(of_keys=2), {"grouped": True}, "h100", "flash"),
        (qkv(of_keys=2, dtype=torch.float32), {"grouped": True}, "h100", "native"),
        (qkv(length=16), {"is_causal": True}, "h100", "efficient"),  # flash aligns causal masks at the other end
        (tuple(t[0] for t in qkv()), {}, "h100", "native"),
    ],
)
def test_the_kernel_is_that_of_torchs_rules(given, rest, card, kernel):
    assert kernel_of(DEVICES[card], *given, **rest) == kernel


def test_a_kernel_that_is_switched_off_is_not_taken(monkeypatch):
    monkeypatch.setattr(torch.backends.cuda, "flash_sdp_enabled", lambda: False)
    assert kernel_of(DEVICES["h100"], *qkv()) == "efficient"


def test_a_budget_above_the_card_is_said_before_anything_is_captured():
    linear = nn.Linear(4, 4, device="meta")
    with pytest.warns(PlanWarning, match=r"budget_gb=100 is more than the 23\.60 GB of rtx4090.*give at most") as seen:
        plan(linear, torch.zeros(2, 4, device="meta"), budget_gb=100, device="rtx4090", progress=False)
    assert [w.filename for w in seen] == [__file__]
