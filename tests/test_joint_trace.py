"""Joint graphs that were traced before are not traced again, and what runs by them is what a new trace gives."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch._functorch._aot_autograd import graph_compile

from planner import plan
from planner.compat.joint_trace import traces_of

pytestmark = [pytest.mark.compat, pytest.mark.usefixtures("short_searches", "unwatched")]


class Block(nn.Module):
    def __init__(self, scale=1.0):
        super().__init__()
        self.scale = scale
        self.layers = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 32))
        self.norm = nn.BatchNorm1d(32)

    def forward(self, x):
        return x + self.scale * self.norm(self.layers(x))


class Broken(nn.Module):
    """Repeated blocks, each a graph of its own."""

    def __init__(self, scales):
        super().__init__()
        self.blocks = nn.ModuleList(map(Block, scales))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
            torch._dynamo.graph_break()
        return x.square().mean()


class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(3)))

    def forward(self, x):
        return self.blocks(x).square().mean()


@pytest.fixture
def traced(monkeypatch):
    """The number of joint graphs that AOTAutograd traces."""
    count = []
    trace = graph_compile.aot_dispatch_autograd_graph
    monkeypatch.setattr(
        graph_compile, "aot_dispatch_autograd_graph", lambda *args, **named: count.append(1) or trace(*args, **named)
    )
    return count


def gradients(model, x, seed=1):
    torch.manual_seed(seed)
    model.zero_grad()
    model(x).backward()
    return [p.grad.clone() for p in model.parameters()] + [b.clone() for b in model.buffers()]


def test_a_step_runs_by_the_trace_of_its_plan_and_so_does_a_step_by_another_plan(traced):
    x, model = torch.randn(256, 32), Whole()
    roomy = plan(model, x, budget_gb=1, progress=False)
    assert len(traced) == 1
    plain = copy.deepcopy(model)
    expected = gradients(plain, x)
    for budget in (roomy.baseline_peak_bytes, round(0.8 * roomy.baseline_peak_bytes)):
        held = copy.deepcopy(model.state_dict())
        p = plan(model, x, budget_gb=f"{budget} B", progress=False)
        assert bool(p.overhead) == (budget < roomy.baseline_peak_bytes)
        p.apply()
        assert all(map(torch.equal, gradients(model, x), expected))
        p.remove()
        model.load_state_dict(held)
    assert len(traced) == 1


def test_repeated_blocks_are_traced_once_and_those_that_differ_in_a_number_apart(traced):
    x = torch.randn(64, 32)
    for scales, kinds in (((1.0, 1.0, 1.0), 1), ((1.0, 2.0, 2.0), 2), ((1, 1.0, 1.0), 2)):
        model = Broken(scales)
        traced.clear()
        plain = copy.deepcopy(model)
        p = plan(model, x, budget_gb=1, progress=False)
        assert {d.module.split(".")[1] for d in p.decisions if "." in d.module} == {"0", "1", "2"}
        assert kinds <= len(traced) < kinds + 2  # the loss is a graph of its own
        p.apply()
        assert all(map(torch.equal, gradients(model, x), gradients(plain, x)))
        assert len(traced) < kinds + 2


def test_other_inputs_and_modes_are_traced_anew(traced):
    model = Whole()
    plan(model, torch.randn(64, 32), budget_gb=1, progress=False).apply()
    batches = [torch.randn(64, 32), torch.randn(32, 64).t(), torch.randn(64, 32).requires_grad_(), torch.randn(96, 32)]
    seen = []
    for batch in batches:
        traced.clear()
        gradients(model, batch)
        seen.append(len(traced))
    assert seen[0] == 0
    assert all(seen[1:])
    traced.clear()
    with torch.autocast("cpu", torch.bfloat16):
        gradients(model, torch.randn(64, 32))
    assert traced


def test_traces_go_with_their_model():
    model = Whole()
    plan(model, torch.randn(64, 32), budget_gb=1, progress=False).apply()
    gradients(model, torch.randn(64, 32))
    graphs = [weakref.ref(each.graph) for each in traces_of(model).values()]
    there = weakref.ref(model)
    assert graphs
    del model
    gc.collect()
    torch.compiler.reset()
    gc.collect()
    assert there() is None
    assert not any(graph() for graph in graphs)
