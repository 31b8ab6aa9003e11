"""What a plan that recomputes nothing runs beside eager mode's own ops: views, copies, dropout, gradients in zeros."""

import importlib
from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.first_step_process import STAGES
from benchmarks.step_bytes import step_bytes
from planner import plan
from planner.compat.ops import OpOverload, name_of
from planner.runtime.signature import walk

from .measure import held_before, results, step_peak
from .real_models import Case
from .variants import more

pytestmark = pytest.mark.usefixtures("short_searches", "always_compiled")


def called(p):
    """How often the forward and the backward graphs of a plan call each op."""
    return tuple(
        Counter(name_of(n.target) for g in p.graph_modules for n in getattr(g, half).graph.nodes)
        for half in ("forward", "backward")
    )


def trains_as_eager(case, folder, **options):
    """A plan, whose step gives what eager mode gives, to the bit, and holds what it says."""
    eager, eager_peak = results(case), held_before(case) + step_peak(case, folder)
    p = plan(case.model, case.batch, budget_gb=1, loss_fn=case.loss_fn, progress=False, **options)
    p.apply()
    planned = results(case)
    assert all(torch.equal(planned[key], value) for key, value in eager.items())
    measured = held_before(case) + step_peak(case, folder)
    assert measured == pytest.approx(p.peak_bytes, rel=0.001)
    assert measured <= 1.01 * eager_peak
    p.remove()
    return p


def encoder(dropout):
    layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=dropout, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).train()
    return Case(model, {"src": torch.randn(4, 16, 32)}, lambda y: y.square().mean())


@pytest.mark.compat
@pytest.mark.parametrize(("dropout", "most"), [*more((0.0, 24)), (0.1, 34)])
def test_a_transformer_calls_few_views_and_no_identities(dropout, most, tmp_path):
    p = trains_as_eager(encoder(dropout), tmp_path)
    forward, backward = called(p)
    assert not forward["aten.detach.default"] + backward["aten.detach.default"]
    # of each of its matrices, the weight's gradient takes one transposition
    assert backward["aten.t.default"] <= 2 * 4
    names = ("reshape.default", "transpose.int", "permute.default", "t.default", "as_strided.default")
    assert sum(backward[f"aten.{name}"] for name in names) < 2 * most
    gone = ("squeeze.dim", "unsqueeze.default", "expand.default", "alias.default")
    assert not sum(backward[f"aten.{name}"] for name in gone)


class Views(nn.Module):
    """Reads one activation through many views: parts, permutations, a copy, and the activation itself."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(96, 6, 8))

    def forward(self, x):
        h = (x * self.weight).sin()
        a = h.view(96, 2, 3, 8).permute(3, 0, 2, 1).transpose(0, 3).reshape(2, -1)
        b = h.transpose(1, 2).contiguous().view(96, 48).t().unsqueeze(0)[:, 3:40:2].squeeze(0)
        c = h[1].t().t()[2:5].expand(2, 3, 8).flip(2).reshape(6, 8)
        return a.exp().sum() + (b * b.cos()).sum() + c.tanh().mean() + h.square().mean()


def test_views_of_views_give_the_same_to_the_bit(tmp_path):
    trains_as_eager(Case(Views(), {"x": torch.randn(96, 6, 8)}, lambda loss: loss), tmp_path)


def test_a_view_that_the_forward_pass_made_is_kept_in_the_place_of_its_base():
    model = nn.Sequential(nn.Linear(16, 32), nn.Unflatten(1, (4, 8)), nn.Linear(8, 8)).train()
    p = plan(model, torch.randn(4, 16), budget_gb=1, loss_fn=torch.Tensor.mean, progress=False)
    (graphs,) = p.graph_modules
    kept = [n.meta["val"].shape for n in graphs.backward.graph.find_nodes(op="placeholder")]
    assert (16, 8) in kept  # the input of the last product


class Copies(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        h = F.dropout(torch.tanh(self.first(x)), 0.0, self.training)
        return self.last(F.dropout(h, 0.0, self.training)).square().mean()


def test_dropout_at_rate_0_copies_nothing(tmp_path):
    p = trains_as_eager(Case(Copies(), {"x": torch.randn(256, 64)}, lambda loss: loss), tmp_path)
    assert not sum(half["aten.clone.default"] for half in called(p))


class Guarded(nn.Module):
    """Copies what its caller writes into afterwards."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x):
        return (x.clone() * self.weight).square()


def test_a_copy_of_an_input_stays_one():
    model = Guarded()
    plan(model, torch.ones(8), budget_gb=1, loss_fn=torch.Tensor.mean, progress=False).apply()
    x = torch.ones(8)
    loss = model(x).sum()
    x.zero_()
    loss.backward()
    assert torch.equal(model.weight.grad, torch.full((8,), 2.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_on_a_cpu_runs_the_ops_of_eager_mode(dtype, tmp_path):
    layers = [m for _ in range(3) for m in (nn.Linear(64, 64), nn.Dropout(0.3))]
    model = nn.Sequential(*layers).train().to(dtype)
    case = Case(model, {"input": torch.randn(256, 64, dtype=dtype)}, lambda y: y.float().square().mean())
    p = trains_as_eager(case, tmp_path)
    forward, backward = called(p)
    assert forward["aten.bernoulli_.float"] == forward["aten.mul_.Scalar"] == 3
    assert not forward["aten.empty_like.default"]  # no mask of booleans
    assert not forward["aten.native_dropout.default"] + backward["aten.native_dropout_backward.default"]
    assert not backward["aten._to_copy.default"]


def test_dropout_on_a_card_that_is_not_here_is_one_kernel():
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.Linear(8, 8)).train()
    p = plan(model, torch.randn(4, 8), device="h100", budget_gb=4, loss_fn=torch.Tensor.mean, progress=False)
    assert any(d.op.startswith("native_dropout") for d in p.decisions)


class Gathers(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(512, 64))

    def forward(self, x, at):
        h = (x @ self.weight).sin()
        return (h[at] * h.gather(1, at[:, None].expand(-1, 8) % 64).sum(1, keepdim=True)).square().mean()


def test_gradients_are_put_into_zeros_in_place(tmp_path):
    batch = {"x": torch.randn(256, 512), "at": torch.randint(256, (256,))}
    _, backward = called(trains_as_eager(Case(Gathers(), batch, lambda loss: loss), tmp_path))
    assert backward["aten.index_put_.default"] == 1
    assert backward["aten.scatter_add_.default"] + backward["aten.scatter_add.default"] == 1
    assert not backward["aten.index_put.default"] + backward["aten.scatter_add.default"]


def test_a_walk_through_a_model_is_taken_again_until_something_in_it_is_another():
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Dropout()))
    last, modules, parameters = walk(model, None)
    assert walk(model, last)[0] is last
    assert walk(model, last)[1:] == (modules, parameters)

    def changes(change):
        nonlocal last
        change()
        found, modules, parameters = walk(model, last)
        assert found is not last
        assert modules == list(model.modules())
        assert list(map(id, parameters)) == list(map(id, model.parameters()))
        last = found

    changes(lambda: model[1].eval())
    changes(lambda: model[0].requires_grad_(False))
    changes(lambda: model[1].append(nn.Linear(4, 2)))
    changes(lambda: setattr(model[1][0], "weight", model[0].weight))
    changes(lambda: model.double())
    changes(lambda: setattr(model[0], "bias", None))
    changes(lambda: model[1].__setitem__(0, nn.Identity()))


def test_the_bytes_that_ops_move_are_those_of_their_tensors():
    x = torch.randn(1000)

    def step():
        (x + x).mul_(x).view(10, 100).t()

    peak, moved = step_bytes(step)
    assert peak == 4000
    assert moved == (2 + 1) * 4000 + 2 * 4000  # `mul_` reads what it writes


class Dense(nn.Module):
    """Linear layers on tensors of three dimensions, with and without bias, of activations that others read too."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(32, 32, bias=n % 2 == 0) for n in range(4)])
        self.weight = nn.Parameter(torch.randn(32, 32))
        self.norm = nn.LayerNorm(32)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(torch.tanh(self.norm(x)))
        return x.transpose(0, 1) @ self.weight + torch.relu(x @ self.weight.t()).transpose(0, 1)


@pytest.mark.parametrize("shape", [(4, 64, 32), (1, 256, 32), *more(((2, 3, 40, 32),))])
def test_linear_layers_multiply_what_is_not_merged(shape, tmp_path):
    case = Case(Dense().train(), {"x": torch.randn(shape)}, lambda y: y.square().mean())
    p = trains_as_eager(case, tmp_path)
    _, backward = called(p)
    assert backward["aten.matmul.default"] >= 3
    assert not backward["aten.tensordot.default"] or 1 not in shape  # it would add up what is no sum, in a copy


class Attention(nn.Module):
    """Attention as written by hand, whose heads are split and merged by views, of an activation laid out either way."""

    def __init__(self, bias, turned):
        super().__init__()
        self.norm, self.turned = nn.LayerNorm(32), turned
        self.qkv, self.out = nn.Linear(32, 96, bias=bias), nn.Linear(32, 32, bias=bias)

    def forward(self, x):
        h = self.norm(x)
        h = h.transpose(0, 1).contiguous().transpose(0, 1) if self.turned else h
        q, k, v = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in self.qkv(h).chunk(3, -1))
        weights = F.dropout((q @ k.mT / 8**0.5).softmax(-1), 0.1, self.training)
        return x + self.out((weights @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("batch", [*more(1), 3])
def test_attention_multiplies_batches_that_are_not_merged(batch, turned, bias, tmp_path):
    case = Case(Attention(bias, turned).train(), {"x": torch.randn(batch, 40, 32)}, lambda y: y.square().mean())
    forward, backward = called(trains_as_eager(case, tmp_path))
    assert forward["aten.linear.default"] >= 1
    if batch == 1:  # its transpositions change nothing
        return
    assert forward["aten.matmul.default"] + backward["aten.matmul.default"] >= 3
    # each head's tensors are laid out anew by one op, not by a view and a copy
    assert (
        forward["aten.transpose_copy.int"] + forward["aten.permute_copy.default"] + backward["aten.transpose_copy.int"]
    )


def test_a_gradient_that_a_hook_on_saved_tensors_lays_out_anew_is_the_same():
    def other_strides(t):
        return t.transpose(0, -1).contiguous().transpose(0, -1) if t.dim() > 2 and t.shape[-1] > 1 else t

    torch.manual_seed(0)
    model, x = Dense(), torch.randn(4, 64, 32)
    model(x).square().mean().backward()
    usual = [w.grad for w in model.parameters()]
    model.zero_grad()
    plan(model, x, budget_gb=1, loss_fn=lambda y: y.square().mean(), progress=False).apply()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, other_strides):
        model(x).square().mean().backward()
    for w, gradient in zip(model.parameters(), usual, strict=True):
        torch.testing.assert_close(w.grad, gradient)


@pytest.mark.parametrize(("dropout", "most"), [*more((0.0, 1.5)), (0.1, 1.7)])
def test_a_transformers_backward_pass_calls_torch_at_most_so_often_for_each_kernel(dropout, most):
    case = encoder(dropout)
    p = plan(case.model, case.batch, budget_gb=1, loss_fn=case.loss_fn, progress=False)
    nodes = [n for g in p.graph_modules for n in g.backward.graph.nodes]
    calls = [n for n in nodes if isinstance(n.target, OpOverload)]  # an item of a tuple is none
    assert len(calls) <= most * sum(not n.target.is_view for n in calls)


def test_what_is_taken_to_be_contiguous_is_so_whatever_a_fake_tensor_says():
    """A kernel lays out what `copysign` gives otherwise than its fake: a gradient is then laid out as that is."""

    class Turned(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x, y, z):
            return self.second(torch.relu(torch.copysign(y, z) + self.first(x))).square().mean()

    batch = torch.randn(4, 6, 8), torch.randn(8, 6, 4).permute(2, 1, 0), torch.randn(8)
    model = Turned()
    usual = torch.autograd.grad(model(*batch), list(model.parameters()))
    plan(model, batch, budget_gb=1, progress=False).apply()
    model(*batch).backward()
    assert all(map(torch.equal, (w.grad for w in model.parameters()), usual))


def test_the_first_step_s_benchmark_finds_the_stages_that_it_times():
    for place, name, _ in STAGES:
        assert callable(getattr(importlib.import_module(place), name, None)), f"{place}.{name}"
