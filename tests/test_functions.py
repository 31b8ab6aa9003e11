"""Functions in the place of methods, which call a model by their variables: plans are made of copies of it."""

import functools
import types
from collections.abc import Callable

import pytest
import torch
from torch import nn

from planner import CaptureError, applied_plan, plan

pytestmark = [pytest.mark.compat, pytest.mark.usefixtures("short_searches", "always_compiled")]
before: Callable[..., torch.Tensor]  # what `by_a_global` puts a function in the place of


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = nn.functional.gelu(layer(x))
        return x


def by_a_closure(model):
    method = model.forward
    model.forward = lambda x: method(x)


def by_a_global(model):
    global before
    before = model.forward
    model.forward = through_a_global


def through_a_global(x):
    return before(x)


def by_a_default(model):
    model.forward = lambda x, method=model.forward: method(x)


def by_a_method(model):
    method = model.forward
    model.forward = types.MethodType(lambda self, x: method(x), model)


def by_a_partial(model):
    def through(method, x):
        return method(x) + model.layers[0].bias.sum()

    model.forward = functools.partial(through, model.forward)


def by_wraps(model):
    for layer in model.layers:
        layer.forward = functools.wraps(layer.forward)(lambda x, method=layer.forward: method(x))


def by_a_hook(model):
    last = model.layers[3]
    model.layers[0].register_forward_hook(lambda module, args, output: output * last.weight.mean())


def by_compile(model):
    model.forward = torch.compile(model.forward, backend="eager")


def by_disable(model):
    model.layers[1].forward = torch.compiler.disable(model.layers[1].forward)


WAYS = (by_a_closure, by_a_global, by_a_default, by_a_method, by_a_partial, by_wraps, by_a_hook, by_compile, by_disable)


def gradients(model, x):
    model.zero_grad()
    model(x).square().mean().backward()
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize("put", WAYS)
def test_gradients_are_eager_modes_at_each_step(put):
    torch.manual_seed(0)
    model, batches = Layers(), torch.randn(3, 256, 32)
    put(model)
    expected = [gradients(model, x) for x in batches]
    model.zero_grad()
    plan(model, budget_gb=0.0006 if put is by_disable else 0.0004).apply()
    for x, theirs in zip(batches, expected, strict=True):
        ours = gradients(model, x)
        assert {type(g) for g in ours} == {torch.Tensor}
        assert all(map(torch.equal, ours, theirs))
    assert applied_plan(model).overhead > 0 or put is by_disable


def test_a_function_of_another_file_is_refused_and_leaves_no_gradient():
    model = Layers()
    other = {"model": model, "method": model.forward}
    exec("def through(x): return method(x)", other)
    held = types.SimpleNamespace(call=other["through"])
    model.forward = lambda x: held.call(x)
    with pytest.raises(CaptureError, match=r"calls the original, whose layers\.0\.weight got a gradient"):
        plan(model, torch.randn(8, 32), budget_gb=1, loss_fn=torch.Tensor.mean)
    assert all(p.grad is None for p in model.parameters())
    model(torch.randn(8, 32)).mean().backward()
