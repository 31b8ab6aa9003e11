"""What a desk-check of torch's source left open, and only a card can show; `docs/limits.md` has what is known."""

import copy
import gc
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

from planner import ApplyError, InfeasibleBudgetError, PlanWarning, plan
from planner.core.call import describe_call
from planner.costs.measure_op import run_on_accelerator
from planner.costs.measured_ops import measure
from planner.devices.accelerator import ACCELERATORS
from planner.devices.find import find_device
from planner.devices.specs import profile_of

from ..measure import step
from .cases import ROOM_TO_SPARE, baseline, needs_cuda, on_cuda, plan_at

pytestmark = needs_cuda
CARD = torch.device("cuda", 0)
ATEN = torch.ops.aten
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="it takes two CUDA devices")


def call(target, *args, **kwargs):
    return describe_call(target, args, kwargs, target(*args, **kwargs))


def small():
    """A model whose step takes far less than 1 GB, and its batch."""
    layers = [layer for _ in range(8) for layer in (nn.Linear(1024, 1024), nn.GELU())]
    return nn.Sequential(*layers).cuda(), torch.randn(8192, 1024, device="cuda")


# 1. Workspaces of products


def test_workspaces_of_products_are_held_or_brought_as_torchs_version_says():
    card = find_device(None, CARD)
    accelerator = ACCELERATORS["cuda"]
    assert accelerator.workspaces(CARD) == pytest.approx(card.blas, abs=2 * 2**20)
    product = call(ATEN.mm.default, *(torch.zeros(1024, 1024, device="cuda") for _ in range(2)))
    (found,) = run_on_accelerator([product], CARD, timed=False).values()
    assert found.workspace == pytest.approx(card.product, abs=2 * 2**20)


# 2. What is free


def test_all_that_is_free_is_a_budget_that_holds():
    model, x = small()
    p = plan(model, x, loss_fn=torch.Tensor.mean)
    free, total = torch.cuda.mem_get_info()
    assert p.budget_bytes <= total
    assert p.budget_bytes - p.account["CUDA context"] <= free + torch.cuda.memory_reserved()


# 3 and 9. The first step, and verify()


def test_a_step_far_below_1_gb_is_within_3_percent_at_once(recwarn):
    model, x = small()
    plan(model, x, budget_gb="50%", loss_fn=torch.Tensor.mean).apply()
    model(x).mean().backward()
    assert not [w for w in recwarn if w.category is PlanWarning]


def test_blocks_that_are_not_split_are_no_misprediction():
    model, x = small()
    everything = plan(model, x, budget_gb=ROOM_TO_SPARE, loss_fn=torch.Tensor.mean).baseline_peak_bytes
    seen = plan(model, x, budget_gb=0.8 * everything / 2**30, loss_fn=torch.Tensor.mean).verify()
    assert seen.within_budget
    assert abs(seen.prediction_error) < 0.02
    assert seen.reserved_bytes >= seen.measured_bytes * 0.9


# 4. After an out-of-memory error


def test_an_unplanned_step_out_of_memory_leaves_nothing_in_verify():
    case = on_cuda("resnet50")
    p = plan_at(case, baseline("resnet50"), 0.6)
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(p.budget_bytes / torch.cuda.mem_get_info()[1])
    seen = p.verify()
    assert seen.unplanned_bytes is None
    assert seen.within_budget


# 5. Ops that assert


def test_ops_that_assert_on_the_device_leave_it_working():
    repeats = torch.zeros(4, dtype=torch.long, device="cuda")
    repeats[0] = 12
    found = measure([call(ATEN.repeat_interleave.Tensor, repeats, output_size=12)], CARD, progress=False)
    assert len(found) == 1
    assert (torch.ones(2, device="cuda") + 1).sum().item() == 4


# 6. Recurrent layers


def test_recurrent_layers_keep_cudnn_in_eager_mode_and_are_warned_of_without_it():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.LSTM(256, 256, 2, batch_first=True)

        def forward(self, x):
            return self.layers(x)[0].square().mean()

    def ops():
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            model(x).backward()
        return {event.key for event in seen.key_averages()}

    model, x = Recurrent().cuda(), torch.randn(64, 200, 256, device="cuda")
    assert "aten::_cudnn_rnn" in ops()
    with pytest.warns(PlanWarning, match="recurrent layers"):
        plan(model, x, budget_gb=4)
    plan(model, x, budget_gb=4, mode="eager").apply()
    assert "aten::_cudnn_rnn" in ops()


# 7. Copies from the host


def test_a_copy_from_the_host_is_not_made_again():
    class Shifts(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(256, 256) for _ in range(12)])

        def forward(self, x):
            for layer in self.layers:
                x = torch.tanh(layer(x) + torch.arange(256.0).to(x.device))
            return x.square().mean()

    model, x = Shifts().cuda(), torch.randn(65536, 256, device="cuda")
    everything = plan(model, x, budget_gb=ROOM_TO_SPARE).baseline_peak_bytes
    p = plan(model, x, budget_gb=0.8 * everything / 2**30)
    assert not [m for m in p.timeline if m.recomputed and "copy" in m.op and "to" in m.op]


# 8. Another GPU than the first


@needs_two
def test_a_model_on_the_second_gpu_leaves_the_first_alone():
    before = torch.cuda.mem_get_info(0)[0]
    model = nn.Sequential(nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 1024)).to("cuda:1")
    x = torch.randn(4096, 1024, device="cuda:1")
    p = plan(model, x, budget_gb=4, loss_fn=torch.Tensor.mean).apply()
    model(x).mean().backward()
    assert p.verify().gradients_agree
    assert torch.cuda.memory_reserved(0) == 0
    assert torch.cuda.mem_get_info(0)[0] == before


# 10. An ambient autocast


def test_ops_take_what_they_take_whatever_is_cast_around_them(tmp_path, monkeypatch):
    product = call(ATEN.mm.default, *(torch.zeros(512, 512, device="cuda") for _ in range(2)))
    monkeypatch.setenv("CHECKPOINT_PLANNER_CACHE", str(tmp_path / "plain"))
    plain = measure([product], CARD, progress=False)
    monkeypatch.setenv("CHECKPOINT_PLANNER_CACHE", str(tmp_path / "cast"))
    with torch.autocast("cuda", torch.bfloat16):
        assert measure([product], CARD, progress=False) == plain


# 12. cuDNN's trials


def test_cudnns_trials_are_warned_of(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    model, x = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()).cuda(), torch.randn(8, 3, 64, 64, device="cuda")
    with pytest.warns(PlanWarning, match="cudnn.benchmark"):
        plan(model, x, budget_gb=4, loss_fn=torch.Tensor.mean)


# Names and kernels


def test_the_cards_name_means_the_card_where_ops_are_measured():
    name = profile_of(torch.cuda.get_device_name(0))
    if name is None:
        pytest.skip(f"{torch.cuda.get_device_name(0)} has no profile")
    model, x = small()
    p = plan(model, x, budget_gb=4, loss_fn=torch.Tensor.mean, device=name)
    assert p.device == torch.cuda.get_device_name(0)


class Attention(nn.Module):
    def __init__(self, dropout, masked=False):
        super().__init__()
        self.inner, self.dropout, self.masked = nn.Linear(256, 768), dropout, masked

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (4, 64)).transpose(1, 2) for t in self.inner(x).chunk(3, -1))
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril() if self.masked else None
        return functional.scaled_dot_product_attention(q, k, v, mask, self.dropout).float().square().mean()


@pytest.mark.parametrize(("dtype", "masked"), [(torch.bfloat16, False), (torch.float32, False), (torch.bfloat16, True)])
def test_attention_with_dropout_is_planned_from_afar_as_it_is_here(dtype, masked):
    name = profile_of(torch.cuda.get_device_name(0)) or "h100"
    here = plan(
        Attention(0.1, masked).to("cuda", dtype), torch.zeros(8, 512, 256, device="cuda", dtype=dtype), budget_gb=8
    )
    far = plan(
        Attention(0.1, masked).to("meta", dtype),
        torch.zeros(8, 512, 256, device="meta", dtype=dtype),
        budget_gb=8,
        device=name,
    )

    def kept(p):
        return sorted(d.nbytes for d in p.decisions if d.nbytes > 2**16)

    assert kept(here) == pytest.approx(kept(far), rel=0.01)


@pytest.mark.parametrize("length", [192, 197])
def test_attention_without_dropout_is_captured_as_the_fused_kernel_that_eager_mode_runs(length):
    """In bf16 autocast, as of a ViT, whose graph kept scores on an H100 where eager mode kept none."""

    model, x = Attention(0.0).cuda(), torch.randn(64, length, 256, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        p = plan(model, x, budget_gb=8)
    assert not [m.op for m in p.timeline if "softmax" in m.op]
    assert p.baseline_peak_bytes <= 1.05 * p.eager_peak_bytes


def test_a_plan_with_room_to_spare_runs_in_a_process_that_took_other_memory_before():
    """What earlier work has left in the allocator's cache is no part of what verify() finds."""
    case = on_cuda("gpt2")
    held = [torch.empty(2**28, dtype=torch.uint8, device="cuda") for _ in range(8)]
    del held
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        p = plan_at(case, baseline("gpt2"), 0.8)
    step(case)
    case.model.zero_grad(set_to_none=True)
    assert p.verify().within_budget


# CUDA graphs


def leaner(model, x):
    """A plan that recomputes something."""
    everything = plan(model, x, budget_gb=ROOM_TO_SPARE, loss_fn=torch.Tensor.mean).baseline_peak_bytes
    p = plan(model, x, budget_gb=0.8 * everything / 2**30, loss_fn=torch.Tensor.mean)
    assert any(m.recomputed for m in p.timeline)
    p.apply()


def warmed_up(model, x):
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            model.zero_grad(set_to_none=True)
            model(x).mean().backward()
    torch.cuda.current_stream().wait_stream(side)
    model.zero_grad(set_to_none=True)


def same_gradients(model, usual, x):
    usual(x).mean().backward()
    torch.cuda.synchronize()
    return all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), usual.parameters(), strict=True))


def test_a_planned_step_is_captured_in_a_cuda_graph():
    model, x = small()
    usual = copy.deepcopy(model)
    leaner(model, x)
    warmed_up(model, x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        model(x).mean().backward()
    x.copy_(torch.randn_like(x))
    graph.replay()
    assert same_gradients(model, usual, x)


def test_a_planned_model_is_made_a_graphed_callable():
    model, x = small()
    usual = copy.deepcopy(model)
    leaner(model, x)
    warmed_up(model, x)
    torch.cuda.make_graphed_callables(model, (x,))
    fresh = torch.randn_like(x)
    model(fresh).mean().backward()
    assert same_gradients(model, usual, fresh)


def test_a_plan_that_draws_again_is_not_captured_and_runs_on():
    model = nn.Sequential(*(m for _ in range(8) for m in (nn.Linear(1024, 1024), nn.Dropout(0.5), nn.GELU()))).cuda()
    x = torch.randn(8192, 1024, device="cuda")
    with pytest.raises(InfeasibleBudgetError) as refused:
        plan(model, x, budget_gb=1e-3, loss_fn=torch.Tensor.mean)
    plan(model, x, budget_gb=refused.value.minimum_gb, loss_fn=torch.Tensor.mean).apply()
    warmed_up(model, x)
    with pytest.raises(ApplyError, match="random values again"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        model(x)
    model(x).mean().backward()
    torch.cuda.synchronize()
