"""Device profiles, workspaces of cards that are not here, and the costs of ops: measured once, kept on disk."""

import multiprocessing
import warnings
from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch
from torch import fx, nn
from torch._subclasses import FakeTensorMode
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from planner import CaptureError, DeviceError, InfeasibleBudgetError, OptionError, PlanWarning, plan
from planner.capture.trace.step import capture
from planner.codegen.emit import keep_everything
from planner.core.call import describe_call
from planner.costs import cache
from planner.costs import ops as ops_module
from planner.costs.measure_op import Allocated
from planner.costs.measured_ops import measure
from planner.costs.ops import call_of, estimate, node_flops, roofline_seconds
from planner.devices.find import check_working, find_device
from planner.devices.meter import record_allocations
from planner.devices.specs import DEVICES, blas_workspace, blas_workspaces_stay, lt_workspace

from .measure import peak_of

CPU = torch.device("cpu")
ATEN = torch.ops.aten


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("CHECKPOINT_PLANNER_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    return tmp_path / "cache"


def call(target, *args):
    return describe_call(target, args, {}, target(*args))


def some_calls(count=3):
    return [call(ATEN.mm.default, torch.zeros(8, 8 + n), torch.zeros(8 + n, 8)) for n in range(count)]


class Ran(TorchDispatchMode):
    """Counts the runs of matrix products; interrupts, as a user would, after some of them."""

    def __init__(self, interrupt_after=None):
        super().__init__()
        self.count = 0
        self.interrupt_after = interrupt_after

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is ATEN.mm.default:
            self.count += 1
            if self.count == self.interrupt_after:
                raise KeyboardInterrupt
        return func(*args, **(kwargs or {}))


def runs(calls, **options):
    with Ran() as ran:
        found = measure(calls, CPU, progress=False, **options)
    return ran.count, found


# Profiles


def with_card(monkeypatch, driver, capability, memory=2**30):
    """Have torch.cuda tell of one card, and nothing else."""
    major, minor = capability
    properties = SimpleNamespace(name=driver, major=major, minor=minor, total_memory=memory)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)


@pytest.mark.parametrize("name", DEVICES)
def test_every_figure_of_a_profile_is_positive(name):
    device = DEVICES[name]
    zero = {"blas", "product"} | (set() if device.type == "cuda" else {"capability"})
    zero |= {"context"} if device.type == "cpu" else set()
    for field in fields(device):
        value = getattr(device, field.name)
        if isinstance(value, dict):
            assert set(value) == {torch.float16, torch.bfloat16, torch.float32, torch.float64}
            assert all(rate > 0 for rate in value.values())
        elif field.name in zero:
            assert device.type == "cuda" or value in (0, (0, 0))
        else:
            assert value == name if field.name == "name" else value > (0, 0) if isinstance(value, tuple) else value


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("h100", "h100"),
        ("H200", "h200"),
        ("nvidia-h100", "h100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("A100 40GB", "a100-40gb"),
        ("a100_80gb", "a100-80gb"),
        ("a100", "a100"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("A10", "a10"),
        ("NVIDIA A100 80GB PCIe", "a100-80gb-pcie"),
        ("NVIDIA A10G", "a10g"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H100 NVL", "h100-nvl"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA RTX A6000", "a6000"),
        ("NVIDIA GeForce RTX 3080", "rtx3080"),
        ("NVIDIA GeForce RTX 4080", "rtx4080"),
        ("Tesla V100-SXM2-16GB", "v100-16gb"),
        ("Tesla V100-SXM2-32GB", "v100"),
        ("Tesla V100-PCIE-16GB", "v100-pcie"),
        ("AMD Instinct MI300X", "mi300x"),
        ("Tesla T4", "t4"),
        ("RTX 4090", "rtx4090"),
        ("NVIDIA GeForce RTX 3090", "rtx3090"),
        ("5090", "rtx5090"),
        ("L40S", "l40s"),
        ("CPU", "cpu"),
        (torch.device("cpu"), "cpu"),
        (None, "cpu"),
    ],
)
def test_names_are_matched_forgivingly(given, name):
    assert find_device(given, CPU) == DEVICES[name]


@pytest.mark.parametrize("given", ["gtx 9000", "a1000", "", "!", "my h100", 1.5, "gpu"])
def test_an_unknown_name_is_answered_with_the_known_ones(given):
    with pytest.raises(OptionError) as caught:
        find_device(given, CPU)
    assert all(name in str(caught.value) for name in DEVICES)
    assert repr(given) in str(caught.value)


@pytest.mark.parametrize(
    ("driver", "capability", "like"),
    [
        ("NVIDIA A100-SXM4-40GB", (8, 0), "a100-40gb"),
        ("Tesla T4", (7, 5), "t4"),
        ("NVIDIA H100 PCIe", (9, 0), "h100-pcie"),
    ],
)
def test_a_card_is_known_by_its_driver_and_has_its_own_memory(driver, capability, like, monkeypatch):
    with_card(monkeypatch, driver, capability, 11 * 2**30)
    card = find_device(None, torch.device("cuda", 0))
    assert (card.name, card.memory, card.capability) == (driver, 11 * 2**30, capability)
    assert (card.bandwidth, card.flops) == (DEVICES[like].bandwidth, DEVICES[like].flops)
    with pytest.raises(OptionError, match="cuda:1"):
        find_device("cuda:1", CPU)


@pytest.mark.parametrize("driver", ["NVIDIA L40", "NVIDIA GeForce RTX 4080 Laptop GPU", "NVIDIA GeForce RTX 3080 Ti"])
def test_a_card_without_a_profile_says_whose_rates_it_has(driver, monkeypatch):
    with_card(monkeypatch, driver, (8, 9))
    with pytest.warns(PlanWarning, match=f"{driver} has no profile.*data sheet"):
        card = find_device(None, torch.device("cuda", 0))
    assert (card.name, card.capability) == (driver, (8, 9))


@pytest.mark.parametrize(
    ("given", "driver", "here"),
    [
        ("h100", "NVIDIA H100 80GB HBM3", True),
        ("a100", "NVIDIA A100-SXM4-80GB", True),
        ("h100", "NVIDIA H100 PCIe", False),
        ("a100", "NVIDIA A100-SXM4-40GB", False),
    ],
)
def test_the_name_of_the_card_that_the_model_is_on_is_that_card(given, driver, here, monkeypatch):
    """So that ops are measured there, as without `device=`."""
    with_card(monkeypatch, driver, (9, 0), 79 * 2**30)
    found = find_device(given, torch.device("cuda", 0))
    assert (found == find_device(None, torch.device("cuda", 0))) is here
    assert (found == DEVICES[given]) is not here


@pytest.mark.parametrize("given", ["cuda", "cuda:0", "xpu", "mps", torch.device("cuda")])
def test_a_device_that_is_not_here_is_refused_with_the_names_to_choose_from(given, monkeypatch):
    for kind in ("cuda", "xpu", "mps"):
        monkeypatch.setattr(getattr(torch, kind), "device_count", lambda: 0)
    model = torch.nn.Linear(2, 2)
    with pytest.raises(DeviceError, match="torch sees none here") as caught:
        plan(model, torch.zeros(1, 2), budget_gb=1, device=given)
    assert all(name in str(caught.value) for name in DEVICES)


def test_where_no_card_is_seen_the_driver_says_why(monkeypatch):
    def refuse():
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040).")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "init", refuse)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(DeviceError, match=r"built for CUDA 13.0\), The NVIDIA driver on your system is too old"):
        find_device("cuda", CPU)


def test_a_driver_that_is_too_old_for_torch_is_named_with_what_to_do(monkeypatch):
    with_card(monkeypatch, "", (8, 0))

    def refuse(device):
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040). Please update\nmore")

    monkeypatch.setattr(torch.cuda, "get_device_properties", refuse)
    with pytest.raises(DeviceError, match=r"driver on your system is too old.*Install a driver for that, or the build"):
        find_device("cuda", CPU)


def test_a_device_out_of_order_is_said_before_anything_is_allocated(monkeypatch):
    with_card(monkeypatch, "NVIDIA H100", (9, 0))

    def fail(device):
        raise RuntimeError("CUDA error: device-side assert triggered\nCUDA kernel errors might be")

    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    with pytest.raises(DeviceError, match=r"out of order: CUDA error: device-side assert triggered.*new process"):
        check_working(torch.device("cuda", 0))


@pytest.mark.parametrize(
    ("version", "cached", "held"),
    [("2.11.0", "", True), ("2.14.1+cu130", "", True), ("2.15.0+cu132", "", False), ("2.15.0", "1", True)],
)
def test_blas_workspaces_stay_up_to_torch_2_14_and_come_with_each_product_after_it(version, cached, held):
    assert blas_workspaces_stay(version, cached) is held


def test_products_with_a_bias_have_a_workspace_of_their_own_before_torch_2_13(monkeypatch):
    monkeypatch.delenv("CUBLASLT_WORKSPACE_SIZE", raising=False)
    assert lt_workspace("2.11.0+cu130", "") == lt_workspace("2.12.1", "0") == 2**20
    assert lt_workspace("2.11.0", "1") == lt_workspace("2.13.0", "") == lt_workspace("2.11.0", "", rocm=True) == 0
    monkeypatch.setenv("CUBLASLT_WORKSPACE_SIZE", "4096")
    assert lt_workspace("2.11.0", "") == 4 * 2**20


def test_blas_workspaces_are_those_of_torch(monkeypatch):
    assert blas_workspace((9, 0)) == 32 * 2**20
    assert blas_workspace((8, 0)) == 8 * 2**20 + 128 * 2**10
    assert blas_workspace((9, 4), rocm=True) == 128 * 2**20
    for device in DEVICES.values():
        if device.type == "cuda":  # held by two threads, or brought by each product
            assert bool(device.blas) is not bool(device.product)
            assert device.blas + device.product >= 8 * 2**20
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    with_card(monkeypatch, "NVIDIA H100", (9, 0))
    card = find_device("cuda", CPU)
    assert (card.blas, card.product) in ((2 * 16 * 8 * 2**10, 0), (0, 16 * 8 * 2**10))


# What an op costs


class Attention(torch.nn.Module):
    """Embedding, attention and convolution: ops that take large workspaces on CUDA."""

    def __init__(self, dtype):
        super().__init__()
        self.table = torch.nn.Embedding(50, 64, dtype=dtype)
        self.convolve = torch.nn.Conv1d(64, 64, 3, padding=1, dtype=dtype)

    def forward(self, ids):
        x = self.table(ids).unflatten(-1, (4, 16)).transpose(1, 2)
        return self.convolve(functional.scaled_dot_product_attention(x, x, x).transpose(1, 2).flatten(2).mT)


def regions_of(model, *args):
    return capture(model, args, {}, keep_everything, lambda output: output.float().mean()).regions


def by_target(regions, estimates):
    (region,), (costs,) = regions, estimates
    return {op.node.target: cost for op, cost in zip(region.ops, costs, strict=True)}


@pytest.mark.parametrize(
    ("dtype", "name", "expected"),
    [
        (torch.bfloat16, "h100", 2 * 4 * 2048 * (32 + 1) * 4),  # dq at a width of 32, and the row sums, in fp32
        (torch.bfloat16, "t4", 2 * 4 * 2048 * (64 + 1) * 4),  # no flash attention before Ampere
        (torch.float32, "h100", 2 * 4 * 2048 * (16 + 1) * 4),  # nor in fp32
        (torch.float32, "cpu", 0),
    ],
)
def test_workspaces_of_a_card_that_is_not_here_are_predicted(dtype, name, expected):
    ids = torch.zeros(2, 2048, dtype=torch.long)
    regions = regions_of(Attention(dtype), ids)
    costs = by_target(regions, estimate(regions, DEVICES[name], measure_on=None))
    assert costs[ATEN._scaled_dot_product_flash_attention_for_cpu_backward.default].workspace == expected
    segments = (4096 // 10 + 50) * 64 * 4
    table = costs[ATEN.embedding_dense_backward.default].workspace
    image = 2 * 2048 * 64 * dtype.itemsize
    folded = costs[ATEN.convolution_backward.default].workspace
    if name == "cpu":
        assert table == folded == 0
    else:
        assert segments < table < 2 * segments
        assert 2 * image < folded < 3 * image


def test_a_matrix_without_a_unit_stride_is_copied_for_cublas():
    class EverySecond(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(4, 3))

        def forward(self, x):
            return x[:, ::2] @ self.weight

    regions = regions_of(EverySecond(), torch.zeros(6, 8))
    costs = estimate(regions, DEVICES["a100"], measure_on=None)[0]
    forward = [cost for op, cost in zip(regions[0].ops, costs, strict=True) if op.node.target is ATEN.mm.default]
    assert forward[0].workspace == 6 * 4 * 4 + DEVICES["a100"].product


def test_timed_estimates_take_seconds_from_runs_and_nothing_else():
    regions = regions_of(torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU()), torch.zeros(16, 32))
    plain = estimate(regions, DEVICES["cpu"], measure_on=CPU, progress=False)
    timed = estimate(regions, DEVICES["cpu"], measure_on=CPU, timed=True, progress=False)
    for op, one, other in zip(regions[0].ops, plain[0], timed[0], strict=True):
        assert one.seconds == roofline_seconds(op.node, DEVICES["cpu"])
        assert other.seconds > 0
        assert (one.flops, one.workspace, one.excess) == (other.flops, other.workspace, other.excess)
    assert any(one.seconds != other.seconds for one, other in zip(plain[0], timed[0], strict=True))
    # what is known of the times does not change an estimate that does not ask for them
    assert estimate(regions, DEVICES["cpu"], measure_on=CPU, progress=False) == plain


def test_an_op_that_was_not_measured_is_scaled_as_the_others_are(monkeypatch):
    regions = regions_of(torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU()), torch.zeros(16, 32))
    nodes = [op.node for op in regions[0].ops]
    cpu = DEVICES["cpu"]
    known = {call_of(n).key: Allocated(0, 0, 3 * roofline_seconds(n, cpu)) for n in nodes[1:]}
    monkeypatch.setattr(ops_module, "measure", lambda calls, device, **options: known)
    (costs,) = estimate(regions, cpu, measure_on=CPU, timed=True)
    assert costs[0].seconds == pytest.approx(3 * roofline_seconds(nodes[0], cpu))


@pytest.mark.compat
def test_attention_of_grouped_queries_has_the_flops_of_every_head():
    def flops(heads):
        graph = fx.Graph()
        given = [graph.placeholder(name) for name in "qkv"]
        node = graph.call_function(ATEN._scaled_dot_product_efficient_attention.default, (*given, None, True))
        with FakeTensorMode():
            for n, name in zip((8, heads, heads), given, strict=True):
                name.meta["val"] = torch.empty(2, n, 64, 32)
            node.meta["val"] = (torch.empty(2, 8, 64, 32),)
        return node_flops(node)

    assert flops(2) == flops(8) > 0


def test_an_op_that_refuses_zeros_is_left_out():
    singular = describe_call(ATEN.linalg_inv.default, (torch.eye(4),), {}, torch.eye(4))
    with pytest.raises(RuntimeError):
        ATEN.linalg_inv.default(torch.zeros(4, 4))
    (product,) = some_calls(1)
    found = measure([product, singular], CPU, timed=True, progress=False)
    assert set(found) == {product.key}


def test_a_call_that_ran_is_the_call_of_its_graph_though_a_storage_is_larger():
    """The loss of a loop that ran is measured, too: an entry of it is for all."""
    x = torch.randn(64, 64)
    loss = ATEN.mse_loss.default(x, x)
    assert loss.untyped_storage().nbytes() > loss.nbytes
    ran = describe_call(ATEN.mse_loss.default, (x, x), {}, loss)
    assert ran.made_bytes == loss.nbytes


# The cache


def test_what_was_measured_is_not_run_again():
    calls = some_calls()
    first, found = runs(calls)
    assert first == len(calls)
    assert runs(calls) == (0, found)


@pytest.mark.thorough
def test_an_op_that_no_memory_is_there_for_is_not_run():
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    with pytest.raises(InfeasibleBudgetError):
        plan(model, torch.randn(4, 8), budget_gb=0.01, loss_fn=torch.Tensor.mean, dynamic={0: {0: 10**12}})


def test_times_are_measured_where_only_bytes_are_known():
    calls = some_calls()
    _, bytes_only = runs(calls)
    assert all(f.seconds is None for f in bytes_only.values())
    again, timed = runs(calls, timed=True)
    assert again > len(calls)
    assert all(f.seconds > 0 for f in timed.values())
    assert runs(calls, timed=True) == (0, timed)
    assert runs(calls) == (0, bytes_only)


def test_other_shapes_types_and_settings_are_other_measurements():
    def again(*args):
        return runs([call(ATEN.mm.default, *args)])[0]

    x = torch.zeros(8, 8)
    assert again(x, x) == 1
    assert again(x, x) == 0
    assert again(x.double(), x.double()) == 1
    assert again(x, x.t()) == 1
    assert again(torch.zeros(9, 8), x) == 1
    torch.set_num_threads(2)
    assert again(x, x) == 1


def test_an_interruption_keeps_what_was_measured():
    calls = some_calls(40)
    with pytest.raises(KeyboardInterrupt), Ran(interrupt_after=39):
        measure(calls, CPU, progress=False)
    left, found = runs(calls)
    assert 0 < left < 20
    assert len(found) == 40


@pytest.mark.parametrize("damage", ["text", "cut", "overwritten"])
def test_a_damaged_file_is_begun_anew_and_says_so(damage, folder):
    calls = some_calls(40)
    _, found = runs(calls)
    (file,) = folder.iterdir()
    content = file.read_bytes()
    broken = {
        "text": b"not a database, but long enough to be read as one" * 40,
        "cut": content[: len(content) // 2],
        "overwritten": content[:100] + b"\xff" * (len(content) - 100),
    }
    file.write_bytes(broken[damage])
    with pytest.warns(UserWarning, match=file.name):
        count, again = runs(calls)
    assert (count, again) == (len(calls), found)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert runs(calls) == (0, found)


def write_many(worker, count):
    for n in range(count):
        cache.write({f"{worker} {n}": Allocated(worker, n), "both": Allocated(1, 2)})


def test_two_processes_write_at_once(folder):
    fork = multiprocessing.get_context("fork")
    workers = [fork.Process(target=write_many, args=(w, 40)) for w in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0]
    everything = {f"{w} {n}": Allocated(w, n) for w in range(2) for n in range(40)}
    assert cache.read([*everything, "both", "neither"]) == {**everything, "both": Allocated(1, 2)}


def test_a_folder_that_cannot_be_written_is_no_cache(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CHECKPOINT_PLANNER_CACHE", str(tmp_path / "file" / "cache"))
    calls = some_calls()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first, found = runs(calls)
        assert (first, runs(calls)) == (len(calls), (len(calls), found))


def test_the_folder_is_where_the_environment_says(tmp_path, monkeypatch):
    assert cache.cache_file().parent == tmp_path / "cache"
    monkeypatch.delenv("CHECKPOINT_PLANNER_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache.cache_file().parent == tmp_path / "xdg" / "checkpoint-planner"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache.cache_file().parent == tmp_path / "home" / ".cache" / "checkpoint-planner"


def test_measuring_leaves_the_random_generator_alone():
    drawing = call(ATEN.bernoulli.p, torch.zeros(100), 0.5)
    before = torch.get_rng_state()
    assert measure([drawing], CPU, timed=True, progress=False)
    assert torch.equal(torch.get_rng_state(), before)


class WritesParts(torch.nn.Module):
    """Writes its states one by one into a tensor, as recurrences written in Python do."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(64, 64)

    def forward(self, x):
        states = torch.zeros(16, 32, 64) + x.mean()
        for t in range(3):
            x = torch.tanh(self.layer(x))
            states[:, t] = x
        return states.square().mean() + x.sum()


def test_inside_a_profiler_ops_are_measured_as_outside_and_steps_are_not(tmp_path, monkeypatch):
    x = torch.randn(100, 100)
    ran = [(torch.ops.aten.linalg_matrix_exp.default, (x,)), (torch.ops.aten.mse_loss.default, (x, x))]
    calls = [describe_call(op, args, {}, op(*args)) for op, args in ran]
    monkeypatch.setenv("CHECKPOINT_PLANNER_CACHE", str(tmp_path / "outside"))
    outside = measure(calls, torch.device("cpu"))
    monkeypatch.setenv("CHECKPOINT_PLANNER_CACHE", str(tmp_path / "inside"))
    with profile(activities=[ProfilerActivity.CPU]):
        assert measure(calls, torch.device("cpu")) == outside
        with pytest.raises(CaptureError, match="a profiler is running"):
            record_allocations(lambda: torch.ones(3))
    assert all(measured.workspace >= x.nbytes for measured in outside.values())


def test_writing_into_a_part_copies_all_that_is_behind_it(tmp_path):
    model, x = WritesParts(), torch.randn(16, 64)
    p = plan(model, x, budget_gb=1)
    p.apply()
    for _ in range(2):  # the first shows the loop, for which the second may be planned anew
        model(x).backward()
        model.zero_grad(set_to_none=True)
    measured = peak_of(lambda: model(x).backward(), tmp_path)
    assert p.resident_bytes + measured == p.peak_bytes


def test_a_block_that_an_earlier_profile_saw_is_not_of_the_next_one():
    kept, held = [], []
    assert record_allocations(lambda: kept.append(torch.zeros(1000))).peak() == 4000

    def step():
        kept.clear()
        held.append(torch.zeros(10000))
        torch.zeros(500)

    recorded = record_allocations(step)
    assert recorded.peak() == 42000
    assert sum(recorded.deltas) == 40000
