"""Equal values become one where that holds nothing for longer; measured on real steps, and replayed."""

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from planner import plan
from planner.capture.passes import rewrite
from planner.capture.passes.duplicates import merge_duplicates

from .measure import held_before, results, step_peak
from .real_models import SMALL, Case
from .variants import more

pytestmark = pytest.mark.usefixtures("short_searches", "always_compiled")


class MixedPrecision(nn.Module):
    """Attention in bfloat16: each of three products casts the same input."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.norm = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64), nn.LayerNorm(64)

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            x = self.norm(x)
            q, k, v = (f(x).view(8, 64, 4, 16).transpose(1, 2) for f in (self.q, self.k, self.v))
            return F.scaled_dot_product_attention(q, k, v).float().square().mean()


def mixed_precision():
    return Case(MixedPrecision(), {"x": torch.randn(8, 64, 64)}, lambda loss: loss)


@pytest.mark.parametrize("make", [mixed_precision, *more(SMALL["unet"])], ids=["mixed precision", "unet"])
def test_a_step_with_equal_values_holds_less(make, tmp_path):
    case = make()
    eager = step_peak(case, tmp_path)
    p = plan(case.model, case.batch, budget_gb=1, loss_fn=case.loss_fn)
    p.apply()
    measured = step_peak(case, tmp_path)
    assert measured < 0.96 * eager
    assert held_before(case) + measured == pytest.approx(p.peak_bytes, rel=0.001)


def test_it_gives_the_same_to_the_bit(monkeypatch):
    case = mixed_precision()
    merged = plan(case.model, case.batch, budget_gb=1, loss_fn=case.loss_fn)
    merged.apply()
    ours = results(case)
    merged.remove()
    monkeypatch.setattr(rewrite, "merge_duplicates", lambda _graph, order: order)
    apart = plan(case.model, case.batch, budget_gb=1, loss_fn=case.loss_fn)
    assert merged.peak_bytes < apart.peak_bytes
    apart.apply()
    assert all(torch.equal(ours[key], value) for key, value in results(case).items())


class Recurring(nn.Module):
    """Adds the same noise, which no gradient needs, at both ends of a wide middle."""

    def __init__(self):
        super().__init__()
        self.wide, self.narrow = nn.Linear(64, 512), nn.Linear(512, 64)

    def forward(self, x):
        return (self.narrow(torch.tanh(self.wide(x + x.cos()))) + x.cos()).mean()


def test_a_value_that_is_gone_is_made_again():
    p = plan(Recurring(), torch.randn(64, 64), budget_gb=1)
    assert sum("cos" in moment.op for moment in p.timeline) == 2


def test_what_differs_or_is_written_or_returned_stays_apart():
    def step(x, y):
        first, noise = x.exp(), torch.rand_like(x)
        total = first @ y + x.exp().t() @ y + (noise - torch.rand_like(x))  # the second is equal, and transposed
        result, other = y.cos(), y.cos()
        wider = x.sum(0, keepdim=True) + x.sum(0)[0] + result
        written, read = y.sin(), y.sin()
        written.view(-1).add_(1)
        x.view(-1).mul_(2)
        after = x.exp()  # no longer equal
        return total, result, other, wider, written - read, after - first

    x, y = torch.randn(8, 8), torch.randn(8, 8)
    traced = make_fx(step, tracing_mode="fake")(x, y)
    before = [n for n in traced.graph.nodes if n.op == "call_function"]

    def run():
        torch.manual_seed(0)
        traced.recompile()
        return traced(x.clone(), y.clone())

    expected = run()
    left = merge_duplicates(traced.graph, before)
    found = run()
    assert all(map(torch.equal, found, expected))
    assert len({t.data_ptr() for t in found}) == len(found)
    assert [str(n.target) for n in before if n not in left] == ["aten.exp.default"]


def test_an_order_other_than_the_graphs_leaves_it_valid():
    def step(x):
        early = x.exp().sin()
        late = x.exp()
        return early, late * 2, late * 3

    traced = make_fx(step, tracing_mode="fake")(torch.randn(4))
    nodes = {n.name: n for n in traced.graph.nodes}
    order = [nodes[name] for name in ("exp_1", "mul", "exp", "sin", "mul_1")]
    merge_duplicates(traced.graph, order)
    traced.graph.lint()
