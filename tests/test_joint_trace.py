"""Joint graphs that were traced before are not traced again, and what runs by them is what a new trace gives."""

import copy
import gc
import weakref
from collections import OrderedDict
from threading import Thread

import pytest
import torch
from torch import nn
from torch._functorch._aot_autograd import graph_compile

from planner import plan
from planner.compat.joint_trace import shared, traces_of

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


class WithOutput(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        y = self.layer(x)
        return y.square().mean(), y


def test_a_model_that_returns_more_than_its_loss_is_traced_once_too(traced):
    model, x = WithOutput(), torch.randn(4, 8)
    plan(model, x, loss_fn=lambda outputs: outputs[0], budget_gb=1, progress=False).apply()
    model(x)[0].backward()
    assert len(traced) == 1


STATE = {"factor": 1.0}


@torch.library.custom_op("test_joint_trace::scaled", mutates_args=())
def scaled(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


def _noted(ctx, inputs, output):
    ctx.factor = STATE["factor"]


scaled.register_fake(torch.empty_like)
scaled.register_autograd(lambda ctx, g: g * ctx.factor, setup_context=_noted)


class Scaling(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return scaled(self.layer(x)).tanh().mean()


def test_ops_of_the_users_are_traced_each_time_as_their_gradients_may_depend_on_anything(monkeypatch):
    model, x = Scaling(), torch.randn(4, 8)
    p = plan(model, x, budget_gb=1, progress=False)
    monkeypatch.setitem(STATE, "factor", 3.0)
    expected = gradients(copy.deepcopy(model), x)
    p.apply()
    assert all(map(torch.equal, gradients(model, x), expected))


def test_a_function_of_torchs_that_calls_one_of_the_users_is_traced_each_time(monkeypatch):
    model, x, own = (
        nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Tanh(), nn.Flatten(0)),
        torch.randn(4, 8),
        torch.layer_norm,
    )
    p = plan(model, x, loss_fn=torch.sum, budget_gb=1, progress=False)
    monkeypatch.setattr(torch, "layer_norm", lambda *args: 2 * own(*args))
    plain = copy.deepcopy(model)
    p.apply()
    for each in (model, plain):
        each(x).sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 48)

    def forward(self, x):
        q, k, v = self.layer(x).chunk(3, -1)
        return nn.functional.scaled_dot_product_attention(q, k, v).float().square().mean()


def test_a_setting_by_which_attention_is_traced_is_one_of_the_modes(traced):
    model, x = Attending().bfloat16(), torch.randn(2, 2, 8, 16).bfloat16()
    was = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        p = plan(model, x, budget_gb=1, progress=False)
        try:
            torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(not was)
            expected = gradients(copy.deepcopy(model), x)
            p.apply()
            assert all(map(torch.equal, gradients(model, x), expected))
        finally:
            torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(was)
    assert len(traced) > 1


def test_what_other_threads_compile_meanwhile_is_traced_as_it_is():
    x, captured, results = torch.randn(8, requires_grad=True), [], []
    torch.compile(lambda x: x.sin().sum(), backend=lambda graph, _: captured.append(graph) or graph)(x)
    traces = OrderedDict()

    def compiled():
        results.append(torch.compile(lambda x: x.cos().sum(), backend="aot_eager")(x))

    for _ in range(2):
        with shared(traces, captured[0]):
            torch.compile(lambda x: x.sin().sum(), backend="aot_eager")(x)
            compiled()
            (thread := Thread(target=compiled)).start()
            thread.join()
    assert len(traces) == 1
    torch.testing.assert_close(results, [x.cos().sum()] * 4)


class Masked(nn.Module):
    """Its trace has a number of its code as a tensor."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        y = self.layer(x).clone()
        y[x > 0] = 3
        return (y * y).mean()


class Pooling(nn.Module):
    """`max_pool2d` is a closure over two functions of torch's."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(2, 4, 3)

    def forward(self, x):
        return nn.functional.max_pool2d(self.layer(x).tanh(), 2).square().mean()


@pytest.mark.parametrize(("model", "shape"), [(Masked, (16, 8)), (Pooling, (2, 2, 8, 8))])
def test_numbers_that_become_tensors_and_closures_of_torchs_are_traced_once(traced, model, shape):
    x, model = torch.randn(shape), model()
    p = plan(model, x, budget_gb=1, progress=False)
    expected = gradients(copy.deepcopy(model), x)
    p.apply()
    for _ in range(2):
        assert all(map(torch.equal, gradients(model, x), expected))
    assert len(traced) == 1


def test_a_closure_of_torchs_over_a_function_of_the_users_is_traced_each_time(monkeypatch, traced):
    pool = nn.functional.max_pool2d
    at = pool.__code__.co_freevars.index("if_false")
    own = pool.__closure__[at].cell_contents
    x, model = torch.randn(2, 2, 8, 8), Pooling()
    p = plan(model, x, budget_gb=1, progress=False)
    monkeypatch.setattr(pool.__closure__[at], "cell_contents", lambda *args, **named: own(*args, **named).relu())
    expected = gradients(copy.deepcopy(model), x)
    p.apply()
    assert all(map(torch.equal, gradients(model, x), expected))
    assert len(traced) > 1
