"""What must not simply run again is kept, or replayed exactly, and said: gradients are those of the step without it."""

import contextlib
from collections.abc import Callable
from functools import reduce

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from torch import nn
from torch.nn import functional as F

from planner import Plan, plan
from planner.costs import measured_ops as workspace
from planner.planning.decisions import REPLAYED

from .measure import held_before, results, step_peak
from .plans import leanest
from .real_models import Case
from .variants import more

pytestmark = pytest.mark.usefixtures("short_searches")


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.narrow = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        return x + self.narrow(torch.sigmoid(self.wide(x)))


class Around(nn.Module):
    """What is under test, between layers: all before it runs again where the budget is lean."""

    def __init__(self, middle: Callable):
        super().__init__()
        self.before, self.after, self.middle = Layer(), Layer(), middle

    def forward(self, x):
        return self.after(self.middle(self.before(x))).square().mean()


@torch.library.custom_op("planner_tests::noisy", mutates_args=())
def noisy(x: torch.Tensor, scale: float) -> torch.Tensor:
    return x + scale * torch.randn_like(x)


noisy.register_fake(lambda x, scale: torch.empty_like(x))
noisy.register_autograd(
    lambda ctx, gradient: (gradient * ctx.saved_tensors[0].cos(), None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output),
)


class Masked(torch.autograd.Function):
    """Draws, and keeps a number beside its tensors."""

    @staticmethod
    def forward(ctx, x, scale):
        mask = torch.rand_like(x) < 0.5
        ctx.save_for_backward(mask)
        ctx.scale = scale
        return x * mask * scale

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0] * ctx.scale, None


class Exponential(torch.autograd.Function):
    """Saves what it returns, and returns something without a gradient."""

    @staticmethod
    def forward(ctx, x):
        y, largest = x.exp(), x.argmax(-1)
        ctx.mark_non_differentiable(largest)
        ctx.save_for_backward(y)
        return y, largest

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient, _):
        return gradient * ctx.saved_tensors[0]


def exponential(x):
    y, largest = Exponential.apply(x * 0.1)
    return y + largest[:, None]


def attention(x):
    q = x.view(-1, 4, 8, 8)
    return F.scaled_dot_product_attention(q, q, q, dropout_p=0.2).reshape(x.shape)


def normal(x):
    return x.sin() * torch.normal(0.0, 1.0, x.shape) + torch.normal(x.detach(), 1.0).cos() * x


def stochastic_depth(x):
    return x + torch.sin(x) * (torch.rand(x.shape[0], 1) < 0.7) / 0.7


def drawn_in_place(x):
    return x.sin() * torch.empty_like(x).exponential_() + x.cos() * torch.empty_like(x).bernoulli_(0.5)


def routed(x):
    weights, chosen = torch.topk(x.softmax(-1), 4)
    return x + (weights * torch.gather(x, 1, chosen)).sum(-1, keepdim=True)


def in_order(x):
    values, order = torch.sort(x.sin(), -1)
    return values * order * 0.01


def unpooled(x):
    values, places = F.max_pool1d(x[None].sin(), 2, return_indices=True)
    return F.max_unpool1d(values, places, 2)[0].cos()


def in_place(x):
    x = x.sin()
    x[:, :8].mul_(2)
    return x.cos()


def sums(x):
    to = torch.arange(x.shape[0]) % 16
    return torch.zeros(16, 64).index_add(0, to, x.sin())[to].sin()


def blocks(dropout, *shape):
    return lambda x: dropout(x.view(-1, *shape), 0.3, True).reshape(x.shape).sin()


# one after the other; and words of the reasons
CASES: dict[str, tuple[list[Callable], list[str]]] = {
    "functions": ([lambda x: noisy(x, 0.1), lambda x: Masked.apply(x, 3), exponential], []),
    "draws": (
        [
            lambda x: x * torch.bernoulli(torch.sigmoid(x)),
            drawn_in_place,
            normal,
            lambda x: x[torch.randperm(len(x))].sin(),
            lambda x: F.rrelu(x, training=True).sin(),
            stochastic_depth,
            lambda x: x.sin()[torch.multinomial(torch.ones(len(x)), len(x), True)],
        ],
        ["multinomial"],
    ),
    "dropouts": (
        [
            blocks(F.alpha_dropout, 64),
            blocks(F.feature_alpha_dropout, 8, 8),
            blocks(F.dropout1d, 8, 8),
            blocks(F.dropout2d, 8, 4, 2),
            blocks(F.dropout3d, 8, 2, 2, 2),
            attention,
            lambda x: F.gumbel_softmax(x, hard=True) * x.sin(),
        ],
        [],
    ),
    "routing": ([routed, in_order, lambda x: x - x.sin().median(-1, keepdim=True)[0]], ["topk", "sort", "median"]),
    "first of equals": (
        [
            lambda x: x.sin().cummax(-1)[0] + x.max(-1, keepdim=True)[0].cos(),
            lambda x: x.sin() * torch.searchsorted(torch.linspace(-1, 1, 10), x.detach().sin()),
            unpooled,
            in_place,
            sums,
        ],
        [],
    ),
}


def checked(case: Case) -> Plan:
    """A lean plan whose step gives what the step that keeps everything gives, to the bit; and eager's, but rounding."""
    eager = results(case)
    full = plan(case.model, case.batch, budget_gb=1)
    full.apply()
    expected = results(case)
    full.remove()
    p = leanest(full, solver="chen")
    p.apply()
    ours = results(case)
    p.remove()
    assert p.overhead > 0
    for key, value in expected.items():
        assert torch.equal(ours[key], value), key
    for key, value in eager.items():
        torch.testing.assert_close(ours[key], value, msg=lambda m, key=key: f"{key}: {m}")
    return p


@pytest.mark.parametrize("name", CASES)
def test_what_is_unsafe_gives_the_same_under_a_lean_plan(name):
    parts, words = CASES[name]
    p = checked(Case(Around(lambda x: reduce(lambda y, f: f(y), parts, x)), {"x": torch.randn(128, 64)}, lambda y: y))
    kept = [d for d in p.decisions if d.reason and d.reason != REPLAYED]
    assert all(d.action == "keep" for d in kept)
    assert all(any(word in d.reason for d in kept) for word in words)
    assert all(any(word in d.reason for word in words) for d in kept)


@contextlib.contextmanager
def one_process(folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore")
def test_collectives_are_kept_and_not_run_to_plan(tmp_path, monkeypatch):
    run: list[str] = []
    measured = workspace.run_on_cpu
    monkeypatch.setattr(
        workspace,
        "run_on_cpu",
        lambda calls, timed: (run.extend(str(c.target) for c in calls), measured(calls, timed))[1],
    )

    def gathered(x):
        y = collectives.all_gather_tensor_autograd(x.sin(), 0, dist.group.WORLD)
        mean = x.detach().mean(0)
        dist.all_reduce(mean)
        return y.cos() * mean.sin()

    with one_process(tmp_path):
        p = checked(Case(Around(gathered), {"x": torch.randn(128, 64)}, lambda loss: loss))
    assert any("collective" in d.reason and d.action == "keep" for d in p.decisions)
    assert run
    assert not any("c10d" in target for target in run)  # other processes may not be planning


class WeightDropout(nn.Module):
    """Whole rows of an embedding are dropped, as in AWD-LSTM."""

    def __init__(self):
        super().__init__()
        self.table, self.rest = nn.Embedding(100, 64), Around(torch.sin)

    def forward(self, x):
        mask = self.table.weight.new_empty(100, 1).bernoulli_(0.7) / 0.7
        return self.rest(F.embedding(x, mask * self.table.weight))


def test_dropout_of_an_embedding():
    checked(Case(WeightDropout(), {"x": torch.randint(0, 100, (128,))}, lambda loss: loss))


class Counting(Around):
    def __init__(self):
        super().__init__(torch.sin)
        self.register_buffer("count", torch.ones(64))

    def forward(self, x):
        y = self.before(x * self.count.cos())
        self.count += 1
        return self.after((y * self.count).sin()).square().mean()


class Norms(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*[m for _ in range(3) for m in (Layer(), nn.BatchNorm1d(64), nn.Dropout(0.1))])

    def forward(self, x):
        return self.layers(x).square().mean()


@pytest.mark.parametrize("kind", [Counting, *more(Norms)])
def test_buffers_are_written_once(kind, tmp_path):
    case = Case(kind(), {"x": torch.randn(512, 64)}, lambda loss: loss)
    p = checked(case)  # buffers are among what is compared
    p.apply()
    assert held_before(case) + step_peak(case, tmp_path) == pytest.approx(p.peak_bytes, rel=0.01)


def test_the_report_says_what_and_why():
    class Both(Around):
        def __init__(self):
            super().__init__(lambda x: routed(F.dropout(torch.sin(torch.rand_like(x) * x), 0.1)))

    case = Case(Both(), {"x": torch.randn(512, 64)})
    p = leanest(plan(case.model, case.batch, budget_gb=1, solver="chen"))
    assert any(d.reason == REPLAYED and d.action == "recompute" for d in p.decisions)
    for text in (" ".join(p.summary().split()), p._repr_html_()):
        assert "kept, as topk chooses among equal values" in text
        assert REPLAYED in text
        assert "Unsafe to run again" in text
