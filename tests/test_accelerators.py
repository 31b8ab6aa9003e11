"""What is asked of an accelerator, and what becomes of its answers: by stand-ins for torch's module of its type."""

import contextlib
import copy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import fx, nn
from torch.profiler import ProfilerActivity, profile

from planner import (
    ApplyError,
    DeviceError,
    InfeasibleBudgetError,
    PlanWarning,
    VerificationError,
    applied_plan,
    plan,
)
from planner.capture.recomputability import keep_reason
from planner.compat.dispatch import LastingMode, switch_off, switch_on
from planner.compat.fake import FakeTensorMode
from planner.core.call import describe_call
from planner.core.options import Options
from planner.core.recipe import Choice
from planner.core.verification import Verification
from planner.costs import measure_op
from planner.costs.measure_op import run_on_accelerator
from planner.costs.measured_ops import measure
from planner.costs.ops import _measurable, roofline_seconds
from planner.devices.accelerator import ACCELERATORS, Caching
from planner.devices.specs import DEVICES
from planner.errors import gb
from planner.lowering.margin import expandable
from planner.parallel import group
from planner.requests.cautions import warn_on_gpu
from planner.runtime.cuda_graphs import refuse_uncapturable
from planner.session import verify as verify_module

CPU = torch.device("cpu")
ATEN = torch.ops.aten
MiB = 2**20


class Stand:
    """torch.cuda with the memory of a CPU, and figures that are given; notes which device is the current one."""

    def __init__(self, **stats):
        self.stats, self.at, self.asked = stats, [], []
        self.out_of_order = False

    @contextlib.contextmanager
    def device(self, device):
        self.at.append(device)
        yield
        self.at.pop()

    def memory_stats(self, device):
        return self.stats

    def memory_reserved(self, device):
        return self.stats["reserved"]

    def memory_allocated(self, device):
        return self.stats["allocated_bytes.all.current"]

    def mem_get_info(self, device):
        return 100 * MiB, 200 * MiB

    def reset_peak_memory_stats(self, device):
        pass

    def empty_cache(self):
        self.asked.append(("empty_cache", *self.at))

    def synchronize(self, device):
        if self.out_of_order:
            raise RuntimeError("CUDA error: device-side assert triggered")

    def device_count(self):
        return 1

    def get_rng_state(self, device):
        return torch.get_rng_state()

    def set_rng_state(self, state, device):
        torch.set_rng_state(state)


def standing(**stats):
    class Fake(Caching):
        module = Stand(**stats)

    return Fake("cuda")


BYTES = {
    "requested_bytes.all.current": 10 * MiB,
    "requested_bytes.all.peak": 30 * MiB,
    "allocated_bytes.all.current": 11 * MiB,
    "allocated_bytes.all.peak": 33 * MiB,
    "reserved": 40 * MiB,
}


def test_bytes_are_those_asked_for_and_those_handed_out_where_nothing_else_is_known():
    native = standing(**BYTES)
    assert (native.allocated(CPU), native.peak(CPU)) == (10 * MiB, 30 * MiB)
    asynchronous = standing(**{name: n * ("requested" not in name) for name, n in BYTES.items()})
    assert (asynchronous.allocated(CPU), asynchronous.peak(CPU)) == (11 * MiB, 33 * MiB)
    assert native.available(CPU) == (100 + 40 - 11) * MiB


def test_preparing_runs_what_libraries_need_and_leaves_no_trace_of_it():
    class Recording(LastingMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            recorded.append(func)
            return func(*args, **(kwargs or {}))

    recorded = []
    torch.manual_seed(0)
    state = torch.get_rng_state()
    recording = Recording()
    switch_on(recording)
    try:
        with (
            torch.no_grad(),
            torch.autocast("cpu", torch.bfloat16),
            profile(activities=[ProfilerActivity.CPU]) as seen,
        ):
            standing(**BYTES).prepare(CPU)
    finally:
        switch_off(recording)
    ran = {event.key for event in seen.key_averages()}
    assert {"aten::convolution_backward", "aten::mm"} <= ran
    assert any("attention" in name and "backward" in name for name in ran)
    assert not recorded
    assert torch.equal(torch.get_rng_state(), state)


# Measuring


def call(target, *args, **kwargs):
    return describe_call(target, args, kwargs, torch.empty(0))


def put(monkeypatch, accelerator):
    monkeypatch.setitem(ACCELERATORS, "cpu", accelerator)
    return accelerator.module


def test_ops_are_measured_on_the_device_of_the_model(monkeypatch):
    stand = put(monkeypatch, standing(**BYTES))
    seen = []
    product = call(ATEN.mm.default, torch.zeros(4, 4), torch.zeros(4, 4))
    monkeypatch.setattr(Stand, "reset_peak_memory_stats", lambda self, device: seen.append(self.at[-1]))
    found = run_on_accelerator([product], CPU, timed=False)
    assert found[product.key].workspace == 20 * MiB - 64
    assert seen == [CPU]
    ACCELERATORS["cpu"].empty_cache(CPU)
    assert stand.asked == [("empty_cache", CPU)]


def test_ops_are_timed_on_values_that_are_not_zero_and_in_no_cache(monkeypatch):
    class Clock(LastingMode):
        """Writing the block takes 1 ms, and a product 3 ms."""

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal time
            time += {ATEN.zero_.default: 1e-3, ATEN.mm.default: 3e-3}.get(func, 0.0)
            products.extend(args if func is ATEN.mm.default else ())
            return func(*args, **(kwargs or {}))

    class Timed(Caching):
        module = Stand(**BYTES)

        def seconds(self, device, run):
            nonlocal time
            time = 0.0
            with Clock():
                run()
            return time

    time, products = 0.0, []
    monkeypatch.setattr(measure_op, "_CACHED", 2**10)
    put(monkeypatch, Timed("cuda"))
    for right in (torch.zeros(8, 4)[::2], torch.zeros(4).expand(4, 4), torch.zeros(4, 1).expand(4, 4)):
        product = call(ATEN.mm.default, torch.zeros(4, 4), right)
        found = run_on_accelerator([product], CPU, timed=True)
        assert found[product.key].seconds == pytest.approx(3e-3)
        assert products[-1].stride() == right.stride()
    assert all(x.min() > 0 for x in products)


@pytest.mark.parametrize("out_of_memory", [True, False])
def test_an_op_that_cannot_be_timed_has_its_bytes(monkeypatch, out_of_memory):
    class Even(Caching):
        module = Stand(**BYTES)

        def seconds(self, device, run):
            return 1e-3  # with the op and without

    def empty(*args, **kwargs):
        raise torch.OutOfMemoryError

    put(monkeypatch, Even("cuda"))
    product = call(ATEN.mm.default, torch.zeros(4, 4), torch.zeros(4, 4))
    if out_of_memory:
        monkeypatch.setattr(torch, "empty", empty)
    (found,) = run_on_accelerator([product], CPU, timed=True).values()
    assert found.seconds is None
    assert found.workspace == 20 * MiB - 64


def test_an_op_that_puts_the_device_out_of_order_is_named(monkeypatch):
    stand = put(monkeypatch, standing(**BYTES))
    singular = call(ATEN.linalg_inv.default, torch.eye(4))
    assert run_on_accelerator([singular], CPU, timed=False) == {}  # it refuses zeros, and the device works
    stand.out_of_order = True
    with pytest.raises(DeviceError, match=r"measuring aten::linalg_inv on zeros failed.*out of order.*new process"):
        run_on_accelerator([singular], CPU, timed=False)


@torch.library.custom_op("accelerator_tests::rows", mutates_args=())
def rows(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    raise AssertionError("it was run on zeros")


def test_ops_that_zeros_could_put_out_of_order_are_not_run_on_them(monkeypatch):
    put(monkeypatch, standing(**BYTES))
    x, at = torch.zeros(4), torch.zeros(4, dtype=torch.long)
    custom = call(torch.ops.accelerator_tests.rows.default, x, at)
    token = call(ATEN._functional_assert_async.msg, torch.ones(()), "no", torch.empty(0))
    assert run_on_accelerator([custom, token], CPU, timed=False) == {}
    repeat = call(ATEN.repeat_interleave.Tensor, at, output_size=12)  # repeats that add up to the size that is told
    assert list(run_on_accelerator([repeat], CPU, timed=False)) == [repeat.key]


def test_an_ambient_autocast_changes_no_measurement(tmp_path, monkeypatch):
    product = call(ATEN.mm.default, torch.zeros(64, 64), torch.zeros(64, 64))
    monkeypatch.setenv("CHECKPOINT_PLANNER_CACHE", str(tmp_path / "plain"))
    plain = measure([product], CPU, progress=False)
    monkeypatch.setenv("CHECKPOINT_PLANNER_CACHE", str(tmp_path / "cast"))
    with torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
        assert measure([product], CPU, progress=False) == plain


# Copies between host and device


def test_a_copy_from_the_host_is_kept_and_costs_what_the_link_does():
    graph = fx.Graph()
    given = graph.placeholder("given")
    copied = graph.call_function(ATEN._to_copy.default, (given,), {"device": torch.device("cuda")})
    doubled = graph.call_function(ATEN.mul.Tensor, (copied, 2))
    with FakeTensorMode():
        given.meta["val"] = torch.empty(2**20)
        copied.meta["val"] = doubled.meta["val"] = torch.empty(2**20, device="cuda")
    card = DEVICES["h100"]
    assert "host" in keep_reason(copied, ())
    assert keep_reason(doubled, ()) == ""
    assert roofline_seconds(copied, card) == pytest.approx(4 * 2**20 / card.link + card.launch)
    assert roofline_seconds(doubled, card) < 0.1 * roofline_seconds(copied, card)
    assert [_measurable(node) for node in (copied, doubled)] == [False, True]


@pytest.mark.parametrize(
    ("op", "args"),
    [
        (ATEN.cumsum.default, (0,)),
        (ATEN.scatter.src, (0, torch.zeros(4, dtype=torch.long), torch.ones(4))),
        (ATEN._unsafe_index_put.default, ([torch.zeros(4, dtype=torch.long)], torch.ones(4), True)),
    ],
)
def test_sums_without_an_order_are_not_run_again_on_a_gpu(op, args):
    for device, kept in (("cuda", True), ("cpu", False)):
        graph = fx.Graph()
        given = graph.placeholder("given")
        node = graph.call_function(op, (given, *args))
        with FakeTensorMode():
            given.meta["val"] = node.meta["val"] = torch.empty(4, device=device)
        assert bool(keep_reason(node, ())) is kept


# A real step


SEEN = Verification(
    predicted_bytes=100,
    measured_bytes=101,
    unplanned_bytes=200,
    budget_bytes=110,
    gradient_error=0.0,
    gradients_agree=True,
    planned_seconds=1.0,
    unplanned_seconds=1.0,
)


def test_the_prediction_is_of_bytes_asked_for_and_the_budget_of_bytes_taken():
    held = replace(SEEN, reserved_bytes=110)
    assert held.within_budget
    assert held.prediction_error == pytest.approx(0.01)
    assert held.missing_bytes == 0
    over = replace(SEEN, reserved_bytes=125)
    assert not over.within_budget
    assert over.missing_bytes == 15
    assert "125 bytes with fragmentation" in str(over)
    unknown = replace(SEEN, measured_bytes=None, unplanned_bytes=None)
    assert unknown.within_budget is None
    assert "not measured (the device's allocator keeps no peak)" in str(unknown)
    assert "gradients agree" in str(unknown)


class WithoutPeak(Caching):
    """An allocator that keeps no peak, as Apple's."""

    module = Stand(**BYTES)

    def peak(self, device):
        return None

    def reserved_peak(self, device):
        return None

    def available(self, device):
        return 2**30

    def prepare(self, device):
        pass


@pytest.mark.parametrize("mode", ["aten", "eager"])
def test_what_takes_more_than_the_budget_between_the_steps_is_warned_of_once(mode, monkeypatch, recwarn):
    class Filled(WithoutPeak):
        most = 3 * 2**30  # before the plan

        def peak(self, device):
            return self.most

        def allocated(self, device):
            return 0

    monkeypatch.setitem(ACCELERATORS, "cpu", Filled("cpu"))
    model, x = layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    p = plan(model, x, budget_gb=1, loss_fn=torch.Tensor.mean, optimizer=optimizer, mode=mode)
    p.apply()

    def warned(steps):
        for _ in range(steps):
            optimizer.zero_grad()
            model(x).mean().backward()
            optimizer.step()
        return [str(w.message) for w in recwarn if "tensors took" in str(w.message)]

    assert warned(4) == []
    Filled.most = 2**29  # the loop has the allocator look anew, and a step by the plan is within the budget
    assert warned(4) == []
    Filled.most = 2 * 2**30
    (text,) = warned(8)
    assert text.startswith("tensors took 2.00 GB on cpu at once")
    assert gb(applied_plan(model).peak_bytes) in text
    assert warned(16) == [text]


def layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 1)), torch.randn(8, 16)


def test_without_a_peak_plans_run_and_say_that_nothing_was_measured(monkeypatch):
    monkeypatch.setitem(ACCELERATORS, "cpu", WithoutPeak("cpu"))
    model, x = layers()
    p = plan(model, x, budget_gb=1, loss_fn=torch.Tensor.mean)
    seen = p.verify()
    assert (seen.measured_bytes, seen.within_budget, seen.gradients_agree) == (None, None, True)
    with pytest.raises(VerificationError, match="keeps no peak"):
        p.repair()
    p.apply()
    model(x).mean().backward()


def test_a_step_that_ran_out_of_memory_leaves_nothing_to_the_next(monkeypatch):
    model, x = layers()
    p = plan(model, x, budget_gb=1, loss_fn=torch.Tensor.mean)
    before = {name: b.clone() for name, b in model.named_buffers()}
    measured, steps = verify_module._measured, []

    def half(given, step, *rest):
        assert all(q.grad is None for q in given.parameters())
        assert all(torch.equal(b, before[name]) for name, b in given.named_buffers())
        steps.append(step)
        if len(steps) == 1:
            step()  # gradients are there, and BatchNorm's buffers have changed
            raise torch.OutOfMemoryError
        return measured(given, step, *rest)

    monkeypatch.setattr(verify_module, "_measured", half)
    seen = p.verify()
    assert seen.unplanned_seconds is None
    assert "without a plan out of memory" in str(seen)
    assert len(steps) == 2


@pytest.mark.parametrize("fits", [True, False])
def test_a_step_that_takes_too_much_is_run_again_held_to_the_budget(fits, monkeypatch):
    """An allocator that is free to grow takes more than it needs."""

    class Free(standing(**BYTES).__class__):
        module, limits = Stand(**BYTES), []

        def prepare(self, device):
            pass

        def random_state(self, device):
            return torch.get_rng_state()

        def set_random_state(self, device, state):
            pass

        def reserved_peak(self, device):
            return 2**40 if not self.limits else 50 * MiB

        @contextlib.contextmanager
        def limited(self, device, nbytes):
            self.limits.append(nbytes)
            if not fits:
                raise torch.OutOfMemoryError
            yield

    monkeypatch.setitem(ACCELERATORS, "cpu", Free("cpu"))
    model, x = layers()
    p = plan(model, x, budget_gb=1, loss_fn=torch.Tensor.mean)
    seen = p.verify()
    assert Free.limits[0] >= p.budget_bytes - p.account["parameters"] - 2**20
    assert seen.within_budget is fits
    assert all(q.grad is None for q in model.parameters())


def test_a_limit_is_a_share_of_the_card_and_goes_again():
    class Shares(Stand):
        share = 0.75

        def get_device_properties(self, device):
            return SimpleNamespace(name="a card", total_memory=200 * MiB)

        def get_per_process_memory_fraction(self, device):
            return self.share

        def set_per_process_memory_fraction(self, share, device):
            self.share = share

    class Fake(Caching):
        module = Shares()

    fake = Fake("cuda")
    with fake.limited(CPU, 50 * MiB):
        assert fake.module.share == 0.25
    assert fake.module.share == 0.75
    with fake.limited(CPU, 180 * MiB):
        assert fake.module.share == 0.75  # never more than before


# What is warned of, and lines of the account


def test_recurrent_layers_and_cudnns_trials_are_warned_of_on_a_gpu(monkeypatch, recwarn):
    options, cuda = Options(budget_gb=1), torch.device("cuda")
    with pytest.warns(PlanWarning, match="recurrent layers.*mode='eager'"):
        warn_on_gpu(nn.Sequential(nn.LSTM(2, 2)), cuda, options)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    with pytest.warns(PlanWarning, match="cudnn.benchmark is on"):
        warn_on_gpu(nn.Conv2d(1, 1, 1), cuda, options)
    recwarn.clear()
    warn_on_gpu(nn.Linear(1, 1), cuda, options)
    warn_on_gpu(nn.LSTM(2, 2), cuda, replace(options, mode="eager"))
    warn_on_gpu(nn.LSTM(2, 2), CPU, options)
    assert not recwarn.list


def test_nccls_buffers_are_counted_where_there_are_some(monkeypatch):
    monkeypatch.setattr(group, "world_size", lambda: 2)
    monkeypatch.setattr(group, "dist", SimpleNamespace(get_backend=lambda: "nccl"))
    assert group.communication_buffers(torch.device("cuda")) == 256 * MiB
    assert group.communication_buffers(CPU) == 0
    monkeypatch.setattr(group, "dist", SimpleNamespace(get_backend=lambda: "gloo"))
    assert group.communication_buffers(torch.device("cuda")) == 0


@pytest.mark.skipif(not hasattr(torch._C, "_accelerator_getAllocatorSettings"), reason="torch before 2.13 does not say")
def test_segments_that_may_grow_by_a_setting_in_code_are_noticed(monkeypatch):
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    assert not expandable()
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    try:
        assert expandable()
    finally:
        torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
    assert not expandable()


@pytest.mark.parametrize("kind", ACCELERATORS)
def test_torchs_modules_have_what_is_asked_of_them(kind):
    """On whatever build: those of devices that are not here can only be looked at."""
    asked = {"cuda": CACHING, "xpu": CACHING, "mps": {"recommended_max_memory", "current_allocated_memory"}}[kind]
    module = getattr(torch, kind)
    assert {name for name in asked | COMMON if not hasattr(module, name)} == set()


COMMON = {"device_count", "synchronize", "empty_cache", "get_rng_state", "set_rng_state", "Event"}
CACHING = {
    "device", "get_device_properties", "memory_stats", "max_memory_reserved", "memory_reserved", "memory_allocated",
    "mem_get_info", "reset_peak_memory_stats",
}  # fmt: skip


# CUDA graphs


class Captured(Stand):
    """A stream that is captured, on which nothing may be asked of the device."""

    capturing = False

    def is_current_stream_capturing(self):
        return self.capturing

    def __getattribute__(self, name):
        asks = {"synchronize", "memory_stats", "mem_get_info", "empty_cache", "get_rng_state", "set_rng_state"}
        if name in asks | {"reset_peak_memory_stats"} and object.__getattribute__(self, "capturing"):
            raise RuntimeError("operation not permitted when stream is capturing")
        return super().__getattribute__(name)


@pytest.fixture
def stream(monkeypatch):
    class Card(Caching):
        module = Captured(**BYTES)

        def prepare(self, device):
            self.synchronize(device)

        def workspaces(self, device):
            return 0

        def properties(self, device):
            return "Card", (8, 0), 2**34

    monkeypatch.setitem(ACCELERATORS, "cpu", Card("cuda"))
    return Card.module


def deep(rate=0.0):
    torch.manual_seed(0)
    layers = (m for _ in range(4) for m in (nn.Linear(32, 32), nn.LayerNorm(32), nn.Dropout(rate), nn.ReLU()))
    return nn.Sequential(*layers), torch.randn(4096, 32)


def squared(y):
    return y.square().mean()


def leanest(model, x):
    """A plan that recomputes as much as Chen's solver can."""
    with pytest.raises(InfeasibleBudgetError) as refused:
        plan(model, x, budget_gb=1e-6, loss_fn=squared, progress=False, solver="chen")
    return plan(model, x, budget_gb=refused.value.minimum_gb, loss_fn=squared, progress=False, solver="chen").apply()


@pytest.mark.filterwarnings("ignore::planner.PlanWarning")
def test_a_captured_step_asks_the_device_for_nothing_and_computes_what_others_do(stream):
    model, x = deep()
    usual = copy.deepcopy(model)
    squared(usual(x)).backward()
    leanest(model, x)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    squared(model(x)).backward()  # what it shows of the loop is not planned for while another one is captured
    optimizer.step()
    stream.capturing = True
    for _ in range(3):
        optimizer.zero_grad()
        squared(model(x)).backward()
        optimizer.step()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), usual.parameters(), strict=True))
    stream.capturing = False
    squared(model(x)).backward()


@pytest.mark.filterwarnings("ignore::planner.PlanWarning")
def test_a_capture_of_what_has_not_run_or_draws_again_is_refused_before_anything_runs(stream):
    model, x = deep(0.5)
    leanest(model, x)
    stream.capturing = True
    with pytest.raises(ApplyError, match="three whole steps on a side stream"):
        model(x)
    stream.capturing = False
    squared(model(x)).backward()
    stream.capturing = True
    with pytest.raises(ApplyError, match=r"draws \d+ random values again \(bernoulli.*dropout rates of 0"):
        model(x)
    with torch.no_grad():
        model(x)  # by no plan


def test_plans_that_need_the_host_at_every_step_are_not_captured():
    model, x = deep()
    p = plan(model, x, budget_gb=1, loss_fn=squared, progress=False)
    refuse_uncapturable(model, p.record)
    options = replace(p.record.options, step_in_backward=True)
    for record, why in (
        (replace(p.record, moved_bytes=1), "Plan without offload="),
        (replace(p.record, options=options), "Plan without step_in_backward="),
        (replace(p.record, recipe=Choice({"0": {}})), "Plan with mode='aten'"),
        (replace(p.record, recipe=replace(p.record.recipe, asks=("if x.max() > 1",))), r"max\(\) > 1.*out of forward"),
    ):
        with pytest.raises(ApplyError, match=why):
            refuse_uncapturable(model, record)


def test_a_model_that_was_graphed_runs_its_graph(monkeypatch):
    model, x = deep()
    plan(model, x, budget_gb=1, loss_fn=squared, progress=False).apply()

    def forward(x):
        return x

    forward.__module__ = torch.cuda.graphs.__name__
    monkeypatch.setitem(vars(model), "forward", forward)
    assert model(x) is x


def test_a_loop_of_methods_is_not_captured(stream):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def encode(self, x):
            return self.layer(x)

    model = Two()
    plan(model, budget_gb=1, progress=False).apply()
    stream.capturing = True
    with pytest.raises(ApplyError, match="methods of this Two"):
        model.encode(torch.randn(2, 4))
