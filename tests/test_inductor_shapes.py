"""Plans in Inductor's graphs for sizes that change, for several processes, and for kernels of Triton."""

import copy
from functools import partial

import pytest
import torch

from planner import CaptureError, applied_plan, plan
from planner.compat.fake import FakeTensorMode
from planner.compat.inductor import Generated
from planner.compat.versions import inductor_takes_symbols
from planner.devices.meter import record_allocations
from planner.inductor.dry_run import dry_run

from .loop_harness import Loop, differences, judged
from .loops import NanoGPT, mlp, tokens

pytestmark = pytest.mark.usefixtures("short_searches")


symbolic = pytest.mark.skipif(not inductor_takes_symbols(), reason="torch 2.11 and 2.12 get a plan for each size")
SHAPES = [(8, 48), (8, 40), (13, 57), (4, 29), (13, 64), (6, 37)]  # the third is not yet the largest


def compiled_lengths(seen, put, ended):
    """A compiled model that returns (logits, loss), with batches of other numbers of rows and of other lengths."""
    model = NanoGPT(dropout=0.0)
    model.compile()
    put(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for shape in SHAPES:
        x, y = tokens(*shape)
        _, loss = model(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ended(loss)
        seen.append(applied_plan(model))


@pytest.mark.thorough
@symbolic
def test_a_compiled_model_has_one_plan_for_all_sizes_from_the_third_on():
    """The second batch is smaller, and runs as it is; a gradient still comes to the loss alone."""
    seen = []
    unplanned, planned = judged(Loop(partial(compiled_lengths, seen)))
    assert max(planned.measured) <= planned.budget
    assert max(planned.measured) == pytest.approx(planned.predicted[-1], rel=0.01)
    # but for biases of keys, whose gradients are rounding errors
    assert not [d for d in differences(planned, unplanned, 1e-3) if "qkv.bias" not in d]
    last = seen[-1]
    assert last.options.mode == "inductor"
    assert last.recipe.maxima is not None
    assert all(each is last for each in seen[-4:])


@symbolic
def test_what_inductor_compiles_for_one_size_alone_is_refused_for_many_in_words():
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(8, 8, 3))
    options = {"loss_fn": torch.Tensor.mean, "mode": "inductor", "budget_gb": 1, "progress": False}
    with pytest.raises(CaptureError, match="one size alone, as it does convolutions"):
        plan(model, torch.randn(4, 3, 16, 16), dynamic=True, **options)


@pytest.mark.thorough
@symbolic
def test_largest_sizes_that_are_given_have_one_plan_that_recomputes_at_all_of_them():
    torch.manual_seed(0)
    model = mlp(depth=8)
    usual = copy.deepcopy(model)
    batch = torch.randn(512, 64)
    make = partial(plan, model, batch, loss_fn=torch.Tensor.mean, mode="inductor", dynamic=True, progress=False)
    roomy = make(budget_gb=1)
    p = make(budget_gb=0.8 * roomy.peak_bytes / 2**30)
    assert p.overhead > 0
    p.apply()
    sizes = (512, 300, 77, 512)
    batches = [torch.randn(rows, 64) for rows in sizes]
    expected = [torch.autograd.grad(usual(x).mean(), [*usual.parameters()]) for x in batches]
    peaks = []
    for x, theirs in zip(batches, expected, strict=True):
        model.zero_grad()
        peaks.append(record_allocations(lambda x=x: model(x).mean().backward()).peak() + p.resident_bytes)
        for own, its in zip(model.parameters(), theirs, strict=True):
            torch.testing.assert_close(own.grad, its, rtol=1e-4, atol=1e-7)
    now = applied_plan(model)
    assert now.options.mode == "inductor"
    assert now.overhead > 0
    assert max(peaks[1:]) == peaks[-1] <= now.peak_bytes


WRAPPER = """
triton_poi_fused_add_0 = async_compile.triton('triton_poi_fused_add_0', '')

def call(args):
    x, y = args
    args.clear()
    buf0 = empty_strided_cuda((8, 4), (4, 1), torch.float32)
    triton_poi_fused_add_0.run(x, y, buf0, 32, stream=0)
    del x
    buf1 = empty_strided_cuda((8, 4), (4, 1), torch.float32)
    triton_poi_fused_add_0.run(buf0, y, buf1, 32, stream=0)
    return (buf1, buf0)
"""
HEAD = """
import torch
from torch._inductor.async_compile import AsyncCompile
async_compile = AsyncCompile()
"""


def test_a_wrapper_of_tritons_kernels_is_run_on_fake_tensors_of_a_gpu_that_is_not_here():
    generated = Generated(HEAD + WRAPPER, {}, {})
    mode = FakeTensorMode()
    with mode:
        x, y = (torch.empty(8, 4, device="cuda") for _ in range(2))
    run = dry_run(mode, generated, generated, [x, y], [y], 1)
    assert [launch.name for launch in run.launches] == ["triton_poi_fused_add_0"] * 4
    assert run.boundary == 2
    assert run.forward_peak == 2 * 8 * 4 * 4
    # what was saved or the second result, the gradient that comes in, and the first result
    assert run.backward_peak == 3 * 8 * 4 * 4
