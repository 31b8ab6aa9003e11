"""Models whose first call makes what the next ones use: tables, buffers, statistics that they keep on themselves."""

import copy

import pytest
import torch
from torch import nn

from planner import plan
from tests.measure import peak_of

pytestmark = pytest.mark.usefixtures("short_searches")


class Keeping(nn.Module):
    """Two stacks of layers, and `kept()` between, which the subclasses define."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32)) for _ in range(2))
        self.table = None

    def forward(self, x):
        return self.second(self.kept(self.first(x))).square().mean()


class Attribute(Keeping):
    def kept(self, x):
        if self.table is None:
            self.table = torch.linspace(0, 1, x.shape[1])
        return x * self.table


class Grown(Keeping):
    def __init__(self):
        super().__init__()
        self.register_buffer("rows", torch.ones(4, 1), persistent=False)

    def kept(self, x):
        if len(self.rows) < len(x):
            self.register_buffer("rows", torch.linspace(0, 1, len(x))[:, None], persistent=False)
        return x * self.rows[: len(x)]


class Registered(Keeping):
    def kept(self, x):
        if not hasattr(self, "rows"):
            self.register_buffer("rows", torch.linspace(0, 1, len(x))[:, None])
        return x * self.rows


class OfTheCallBefore(Keeping):
    """The second call reads what the first one computed: to run one twice would give other gradients."""

    def kept(self, x):
        before, self.table = self.table, x.detach().mean(0)
        return x if before is None else x + before


class NewName(Keeping):
    def kept(self, x):
        y = x + self.before if hasattr(self, "before") else x
        self.before = x.detach().mean(0)
        return y


class AfterABreak(Keeping):
    def kept(self, x):
        torch._dynamo.graph_break()
        return Attribute.kept(self, x)


class CopyOfAPart(Keeping):
    """As BYOL makes its target. On fake tensors, `copy.deepcopy` took the fake mode with it, and corrupted memory."""

    def kept(self, x):
        if self.table is None:
            self.table = copy.deepcopy(self.first).requires_grad_(False)
        with torch.no_grad():
            target = self.table(x)
        return x + target


class Statistics(Keeping):
    def __init__(self):
        super().__init__()
        self.scale, self.ready = nn.Parameter(torch.ones(32)), False

    def kept(self, x):
        if not self.ready:
            with torch.no_grad():
                self.scale.copy_(1 / x.std(0))
            self.ready = True
        return x * self.scale


@pytest.mark.parametrize(
    "kind",
    [
        *(Attribute, Grown, Registered, OfTheCallBefore, NewName, AfterABreak, Statistics),
        pytest.param(CopyOfAPart, marks=pytest.mark.compat),
    ],
    ids=lambda k: k.__name__,
)
def test_what_the_first_call_makes_is_there_in_the_second_and_not_before(kind, tmp_path):
    model, x = kind(), torch.randn(256, 32)
    plain = copy.deepcopy(model)
    planned = plan(model, x, budget_gb="85%", progress=False)
    planned.apply()
    for _ in range(3):
        losses = model(x), plain(x)
        for loss in losses:
            loss.backward()
        assert torch.equal(*losses)
        for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert torch.equal(ours, theirs), name
            if theirs.requires_grad:
                assert torch.equal(ours.grad, theirs.grad), name
            else:
                assert ours.grad is theirs.grad is None, name
        assert model.state_dict().keys() == plain.state_dict().keys()
        model.zero_grad()
        plain.zero_grad()
    held = sum(t.nbytes for t in (*model.parameters(), *model.buffers(), x))
    assert held + peak_of(lambda: model(x).backward(), tmp_path) <= planned.budget_bytes


class Hooked(nn.Module):
    """Its first call installs hooks that collect results, as models of transformers do that return their routers'."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))

    @torch.compiler.disable
    def install(self):
        for layer in () if hasattr(self, "ready") else self.layers:
            layer.register_forward_hook(lambda module, args, output: self.seen.append(output))
        self.ready = True

    def forward(self, x):
        seen = self.seen = []
        self.install()
        y = self.layers(x)
        return {"loss": y.square().mean() + sum(h.abs().mean() for h in seen), "last": y, "penalty": seen[0].std()}


def test_hooks_that_the_first_call_installs_are_there_once():
    model, x = Hooked(), torch.randn(256, 32)
    plain = copy.deepcopy(model)
    plan(model, x, budget_gb=1, progress=False).apply()
    for _ in range(3):
        losses = model(x)["loss"], plain(x)["loss"]
        for loss in losses:
            loss.backward()
        assert torch.equal(*losses)
    assert all(map(torch.equal, (p.grad for p in model.parameters()), (p.grad for p in plain.parameters())))
    assert [len(layer._forward_hooks) for layer in model.layers] == [1] * 4
