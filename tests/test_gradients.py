"""Gradients of planned models as autograd gives them: which there are, what hooks see, backward passes again."""

import contextlib
import copy
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jvp, vmap

from planner import ApplyError, InfeasibleBudgetError, Plan, applied_plan, plan
from planner.core.loop import Loop
from planner.planning.pipeline import make_plan

from .measure import peak_of
from .plans import for_budget
from .variants import keeping

pytestmark = pytest.mark.usefixtures("short_searches", "always_compiled")


def linear(depth=2, width=16):
    return nn.Sequential(*(layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.Tanh())))


class Heads(nn.Module):
    """Two heads on a trunk; `broken` for a graph of torch.compile's for each of the three."""

    def __init__(self, broken=False):
        super().__init__()
        self.trunk, self.one, self.two, self.broken = linear(), linear(), linear(), broken

    def forward(self, x):
        x = self.trunk(x)
        if self.broken:
            torch._dynamo.graph_break()
        one = self.one(x)
        if self.broken:
            torch._dynamo.graph_break()
        return one, self.two(x)


class Chain(nn.Module):
    """Outputs that are computed from each other, each used more than once."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x):
        h = self.a(x).tanh()
        k = h + self.b(h).exp()
        return h, k, self.c(k) + k.square().mean()


class OwnLoss(nn.Module):
    """`aside` is of what the loss trains, or of a part that the loss does not train."""

    def __init__(self, own_part):
        super().__init__()
        self.body = linear()
        self.aside = linear() if own_part else self.body

    def forward(self, x):
        logits = self.body(x)
        return {"loss": (logits.square() + logits.sigmoid()).mean(), "logits": logits, "aside": self.aside(2 * x)}


def everything(output):
    return sum(t.square().sum() for t in output)


def planned(model, loss_fn=everything):
    """The model under a plan, and its twin without one."""
    twin = copy.deepcopy(model)
    plan(model, batch(), budget_gb=1, loss_fn=loss_fn).apply()
    return model, twin


def batch():
    return torch.linspace(-1, 1, 8 * 16).reshape(8, 16)


def assert_same(models, step):
    """`step(model)` gives the same with and without a plan, to the last bit, and so do the gradients it leaves."""
    found = []
    for model in models:
        model.zero_grad()
        seen = step(model) or []
        found.append([*seen, *(p.grad for p in model.parameters())])
    for at, (ours, theirs) in enumerate(zip(*found, strict=True)):
        assert (ours is None) == (theirs is None), at
        assert ours is None or torch.equal(ours, theirs), at


class _Pair(torch.autograd.Function):
    """Computes no gradient for what none came for, as functions that save memory do."""

    @staticmethod
    def forward(ctx, x, y):
        ctx.set_materialize_grads(False)
        return 2 * x, 3 * y

    @staticmethod
    def backward(ctx, *gradients):
        return tuple(None if g is None else n * g for n, g in zip((2, 3), gradients, strict=True))


class Paired(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = linear(1), linear(1), linear(1)

    def forward(self, x):
        one, other = self.apart(self.a(x), self.b(x))
        return self.c(one).square().mean(), other

    @torch.compiler.disable
    def apart(self, one, other):
        return _Pair.apply(one, other)


def test_an_output_that_no_gradient_comes_to_although_its_node_runs():
    models = planned(Paired(), loss_fn=lambda output: output[0])
    assert_same(models, lambda m: m(batch())[0].backward())


@pytest.mark.parametrize("broken", [False, True], ids=["one_graph", "graph_breaks"])
def test_two_heads_in_turn_leave_no_gradient_where_none_comes_and_run_no_hook_there(broken):
    models = planned(Heads(broken))
    for model in models:
        for p in model.parameters():
            p.register_hook(lambda g: 2 * g)
            p.register_post_accumulate_grad_hook(lambda p: p.grad.neg_() and None if p.grad.numel() == 1 else None)
    for used in ((0,), (1,), (0, 1), (0,)):
        assert_same(models, lambda m, used=used: everything([m(batch())[at] for at in used]).backward())
    one = models[0].one[0].weight
    assert len(one._backward_hooks) == len(one._post_accumulate_grad_hooks) == 1


def test_a_gradient_that_does_not_come_is_no_zero_that_meets_an_infinity():
    class Root(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Linear(16, 16)

        def forward(self, x):
            x = self.body(x)
            one, two = x.split(8, 1)
            return x.tanh(), (x - x).sqrt(), one.exp(), two.exp()

    models = planned(Root())
    for used in ((0,), (0, 2), (3,)):
        assert_same(models, lambda m, used=used: everything([m(batch())[at] for at in used]).backward())
        assert models[0].body.weight.grad.isfinite().all()


@pytest.mark.parametrize("bias", [True, False])
def test_a_hook_of_logits_of_three_dimensions_sees_the_gradient_of_the_loss_too(bias):
    """Without a bias they are a view of what the kernel makes."""

    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(16, 16, bias=bias)

        def forward(self, x):
            logits = self.head(x)
            return logits.square().mean(), logits

    x = torch.randn(2, 5, 16)
    model = Head()
    plain = copy.deepcopy(model)
    plan(model, x, budget_gb=1, loss_fn=lambda output: output[0] + output[1].sum()).apply()
    found = []
    for each in (model, plain):
        loss, logits = each(x)
        logits.register_hook(lambda g: found.append(g.clone()))
        (loss + logits.sum()).backward()
    assert torch.equal(*found)


def test_hooks_of_outputs_that_others_are_computed_from_see_the_whole_gradient():
    models = planned(Chain())

    def watched(model):
        seen, outputs = [], model(batch())
        for t in outputs[:2]:
            t.retain_grad()
            t.register_hook(lambda g: seen.append(g.clone()))
        (everything(outputs) + outputs[2].sum()).backward()
        return [*seen, *(t.grad for t in outputs[:2])]

    def changed(model):
        h, k, last = model(batch())
        k.register_hook(lambda g: 2 * g)
        h.register_hook(lambda g: g + 1)
        last.sum().backward()

    def unused(model):
        h, k, last = model(batch())
        seen = []
        for t in (k, last):
            t.register_hook(seen.append)
        h.sum().backward()
        assert not seen

    def written(model):
        _, k, last = model(batch())
        k.retain_grad()
        last.mul_(3)
        (last.sum() + k.sum()).backward()
        return [k.grad]

    for step in (watched, changed, unused, written):
        assert_same(models, step)
    output = models[0](batch())
    output[0].mul_(2)
    with pytest.raises(RuntimeError, match="inplace operation"):
        output[2].sum().backward()


@pytest.mark.compat
def test_gradients_between_outputs():
    models = planned(Chain())

    def between(model):
        h, k, last = model(batch())
        (one,) = torch.autograd.grad(last.sum(), k, retain_graph=True)
        several = torch.autograd.grad(last.sum() + k.sum(), [k, h], retain_graph=True)
        found.append(several)
        everything((h, k, last)).backward()
        return [one]

    found = []
    assert_same(models, between)
    torch.testing.assert_close(*found)  # autograd adds the same terms up in another order


@pytest.mark.parametrize("own_part", [False, True])
def test_what_the_models_own_loss_is_computed_from_has_its_gradient_as_well(own_part):
    models = planned(OwnLoss(own_part), None)

    def looked_at(model):
        output = model(batch())
        output["logits"].retain_grad()
        output["loss"].backward()
        return [output["logits"].grad]

    def more(model):
        output = model(batch())
        (output["loss"] + output["logits"].square().mean()).backward()

    def between(model):
        output = model(batch())
        return torch.autograd.grad(output["loss"], output["logits"])

    for step in (looked_at, more, between):
        assert_same(models, step)

    def aside(model):
        model(batch())["aside"].sum().backward()

    assert_same(models, aside)  # `more` has shown that others than the loss get one
    assert_same(models, looked_at)
    fresh = planned(OwnLoss(own_part), None)
    if own_part:  # who returns it trains it
        assert_same(fresh, aside)
    else:
        with pytest.raises(ApplyError, match="loss_fn"):
            aside(fresh[0])
    assert_same(fresh, looked_at)


@pytest.mark.compat
def test_a_graph_is_kept_after_passes_that_did_not_keep_theirs():
    models = planned(linear(), lambda t: t.sum())

    def twice(model):
        loss = model(batch()).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()

    assert_same(models, lambda m: m(batch()).sum().backward())
    assert_same(models, twice)


class OfItsOwn(nn.Module):
    """A model that returns its loss."""

    def __init__(self, body):
        super().__init__()
        self.body = body

    def forward(self, x):
        return self.body(x).square().mean()


@pytest.mark.parametrize("share", [1.01, 0.75])
@pytest.mark.parametrize("kind", keeping("mlp", of=["mlp", "transformer"]))
def test_what_a_kept_graph_holds_is_counted(kind, share, tmp_path):
    layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0, batch_first=True, norm_first=True)
    if kind == "mlp":
        model, x = OfItsOwn(linear(6, 64)), torch.randn(512, 64)
    else:
        model, x = OfItsOwn(nn.Sequential(layer, copy.deepcopy(layer))), torch.randn(8, 32, 64)
    request = replace(plan(model, x, budget_gb=1).source.request, loop=Loop(graph_retained=True))
    roomy = make_plan(request).record.peak_bytes
    found = Plan(make_plan(replace(request, budget_gb=share * roomy / 2**30)))
    found.apply()

    def step():
        loss = model(x)
        loss.backward(retain_graph=True)
        loss.backward()

    for _ in range(2):  # the first shows the loop, for which the second may be planned anew
        step()
        model.zero_grad()
    measured = peak_of(step, tmp_path) + sum(t.nbytes for t in (*model.parameters(), x))
    assert measured <= found.budget_bytes
    assert measured == pytest.approx(found.peak_bytes, rel=0.01)


def transforms(model):
    """Ways of torch to take derivatives of a model other than by a backward pass: name -> call."""
    x = batch()
    values = {name: p.detach() for name, p in model.named_parameters()}

    def of_values(values):
        return functional_call(model, values, (x,)).sum()

    def dual():
        with forward_ad.dual_level():
            return model(forward_ad.make_dual(x, torch.ones_like(x)))

    return {
        "grad": lambda: grad(of_values)(values),
        "vmap": lambda: vmap(model)(x),
        "jvp": lambda: jvp(model, (x,), (torch.ones_like(x),)),
        "forward AD": dual,
    }


def with_other_parameters(model):
    values = {name: (2 * p.detach()).requires_grad_() for name, p in model.named_parameters()}
    functional_call(model, values, (batch(),)).sum().backward()
    return [p.grad for p in values.values()]


@pytest.mark.compat
@pytest.mark.parametrize("first", [False, True], ids=["first", "after_a_step"])
def test_other_derivatives_are_refused_in_words_and_the_next_step_trains(first):
    models = planned(linear(), lambda t: t.sum())
    for call in transforms(models[0]).values():
        if first:
            assert_same(models, lambda m: m(batch()).sum().backward())
        with pytest.raises(ApplyError, match=r"called inside .* remove"):
            call()
        assert_same(models, lambda m: m(batch()).sum().backward())
    assert_same(models, with_other_parameters)
    with torch.no_grad():
        assert torch.equal(vmap(models[0])(batch()), vmap(models[1])(batch()))


def test_second_derivatives_are_refused_in_words_where_they_are_taken():
    models = planned(linear(), lambda t: t.sum())
    assert_same(models, lambda m: m(batch()).sum().backward(create_graph=True))
    x = batch().requires_grad_()
    output = models[0](x)
    (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    with pytest.raises(ApplyError, match="create_graph"):
        slope.square().sum().backward()
    assert_same(models, lambda m: m(batch()).sum().backward())


class Field(nn.Module):
    """Its graph saves neither of its inputs, but what it puts together of them."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x, t):
        return self.net(torch.cat([x, t], 1))


@pytest.mark.parametrize("computed", [False, True])
def test_second_derivatives_by_inputs_that_no_graph_saves_are_refused_where_none_is_an_answer(computed):
    model = Field()
    plan(model, budget_gb=1).apply()
    x, t = torch.rand(8, 1, requires_grad=True), torch.rand(8, 1)
    given = x * 2 if computed else x

    def second():
        (slope,) = torch.autograd.grad(model(given, t).sum(), given, create_graph=True)
        return torch.autograd.grad(slope.sum(), given, allow_unused=True)

    for _ in range(2):
        with pytest.raises(ApplyError, match="create_graph"):
            second()


def test_second_derivatives_by_checkpointed_modules_are_those_of_eager():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16)) for _ in range(4)))
    twin, x = copy.deepcopy(model), torch.randn(64, 16, requires_grad=True)
    whole = plan(model, x, budget_gb=1, loss_fn=torch.Tensor.mean, mode="eager", progress=False)
    for_budget(whole, 0.9 * whole.peak_bytes / 2**30).apply()
    for each in (model, twin):
        output = each(x)
        (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        (output.square().mean() + slope.square().mean()).backward()
    assert applied_plan(model).overhead > 0
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), twin.parameters(), strict=True))


@pytest.mark.compat
def test_batched_gradients_are_eager_modes():
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
    plain = copy.deepcopy(model)
    plan(model, budget_gb=1).apply()
    jacobian = partial(torch.autograd.functional.jacobian, vectorize=True)
    for _ in range(2):
        found = []
        for m in (model, plain):
            x = torch.ones(2, 8, requires_grad=True)
            (each,) = torch.autograd.grad(m(x), x, torch.eye(6).view(6, 2, 3), is_grads_batched=True)
            m(x).square().mean().backward()
            found.append([each, jacobian(m, torch.ones(2, 8)), *(p.grad for p in m.parameters())])
        assert all(map(torch.equal, *found))


class Doubled(nn.Module):
    """Returns a tensor twice, as where what a distribution was given needs no broadcasting; the loss takes the last."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(32, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh())
        self.mean, self.width = nn.Linear(256, 40), nn.Linear(256, 40)

    def forward(self, x):
        h = self.body(x)
        mean, width = self.mean(h), nn.functional.softplus(self.width(h)) + 1e-3
        return (*torch.broadcast_tensors(mean, width), width)


@pytest.mark.parametrize("used", keeping(1, of=[1, 2]))
def test_a_tensor_that_is_returned_twice_has_its_gradient_by_either(used):
    def gradients(model):
        torch.manual_seed(1)
        out = model(torch.randn(512, 32))
        ((torch.randn(512, 40) - out[0]).square() / out[used] + out[used].log()).mean().backward()
        return [p.grad for p in model.parameters()]

    torch.manual_seed(0)
    model = Doubled()
    expected = gradients(model)
    full = plan(model, torch.randn(512, 32), budget_gb=1).baseline_peak_bytes
    for share in (0.7, 0.75, 0.8, 0.85, 0.9):
        planned = copy.deepcopy(model)
        planned.zero_grad()
        p = plan(planned, budget_gb=share * full / 2**30).apply()
        with contextlib.suppress(InfeasibleBudgetError):
            assert all(map(torch.equal, gradients(p), expected)), share
