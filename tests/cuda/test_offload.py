"""Values that leave a card for host memory: rates of the link, copies beside kernels, gradients, and the budget."""

import gc
import json

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from planner import plan
from planner.offload import transfers
from planner.offload.pinned import measured_rates

from ..measure import step
from .cases import (
    ROOM_TO_SPARE,
    allow_only,
    baseline,
    error,
    least,
    measured,
    needs_cuda,
    on_cuda,
    plan_at,
    predicted,
    results_on_cuda,
    under,
)

pytestmark = needs_cuda
CARD = torch.device("cuda", 0)
NAMES = ["gpt2_dropout", "llama", "resnet50"]


def offloading(case, name, share=0.8):
    """A plan for less than any plan without moves needs, or for the least that there is with them."""
    return plan_at(case, round(least(name) * 2**30), share, offload="cpu")


def copied(nbytes=2**28):
    """Bytes per second to pinned memory and back, each direction alone."""
    here, there = (
        torch.empty(nbytes, dtype=torch.uint8, pin_memory=True),
        torch.empty(nbytes, dtype=torch.uint8, device=CARD),
    )
    found = []
    for to, source in ((here, there), (there, here)):
        for _ in range(2):
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            to.copy_(source, non_blocking=True)
            last.record()
            torch.cuda.synchronize()
        found.append(nbytes / first.elapsed_time(last) * 1e3)
    return found


def test_the_link_of_a_plan_is_the_card_s_as_measured():
    case = on_cuda("gpt2")
    p = plan(case.model, case.batch, budget_gb=ROOM_TO_SPARE, offload="cpu")
    assert 0.5 <= p.problem.link.both <= 1.0
    for rate, by_hand in zip((p.problem.link.out, p.problem.link.back), copied(), strict=True):
        assert rate == pytest.approx(by_hand, rel=0.3)
    assert measured_rates(CARD)[0] > 1e9
    assert not p.moved_bytes  # there is room for everything


@pytest.mark.parametrize("name", NAMES)
def test_a_budget_below_any_plan_without_offload_is_met(name):
    """Nothing is out of memory in a process that may take no more, and the peak is as predicted."""
    case = on_cuda(name)
    p = offloading(case, name)
    assert p.budget_bytes < least(name) * 2**30
    assert p.moved_bytes > 0
    p.apply()
    peak = measured(case)
    assert peak <= p.budget_bytes - p.account["CUDA context"]
    assert peak == pytest.approx(predicted(p), rel=0.02)
    allow_only(p)
    for _ in range(3):
        step(case)
        case.model.zero_grad(set_to_none=True)
    gc.collect()
    assert transfers.open_frames() == 0


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_those_of_the_same_graph_with_everything_kept(name):
    """Bit for bit where the kernels repeat themselves; ten times, as a race shows now and then."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    case = on_cuda(name)
    keeps = plan(case.model, case.batch, budget_gb=ROOM_TO_SPARE, loss_fn=case.loss_fn)
    expected, again = under(keeps, case), under(keeps, case)
    steady = {key for key, theirs in expected.items() if torch.equal(again[key], theirs)}
    assert {"loss", "random state", "cuda random state"} <= steady
    p = offloading(case, name)
    assert p.moved_bytes > 0
    p.apply()
    for _ in range(10):
        ours = results_on_cuda(case)
        for key, theirs in expected.items():
            assert torch.equal(ours[key], theirs) if key in steady else error(ours[key], theirs) < 1e-4, key


def spans(events, of):
    return [(e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") == of]


def test_copies_run_beside_kernels_on_streams_of_their_own(tmp_path):
    case = on_cuda("gpt2_dropout")
    p = plan_at(case, baseline("gpt2_dropout"), 0.6, offload="cpu")
    assert p.moved_bytes > 0
    p.apply()
    for _ in range(2):
        step(case)
        case.model.zero_grad(set_to_none=True)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        step(case)
        torch.cuda.synchronize()
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    kernels, copies = spans(events, "kernel"), spans(events, "gpu_memcpy")
    on = {kind: {e["tid"] for e in events if e.get("cat") == kind} for kind in ("kernel", "gpu_memcpy")}
    assert len(on["gpu_memcpy"] - on["kernel"]) == 2  # one stream for each direction
    beside = [c for c in copies if any(begin < c[1] and c[0] < end for begin, end in kernels)]
    assert beside


def test_a_step_that_fails_leaves_nothing_and_the_next_one_works():
    case = on_cuda("gpt2_dropout")
    p = plan_at(case, baseline("gpt2_dropout"), 0.6, offload="cpu")
    p.apply()
    expected = results_on_cuda(case)
    held = torch.cuda.memory_allocated()

    def fail(_):
        raise KeyboardInterrupt

    for _ in range(3):
        output = case.model(**case.batch)
        loss = case.loss(output)
        loss.register_hook(fail)
        with pytest.raises(KeyboardInterrupt):
            loss.backward()
        del output, loss
        gc.collect()
        assert transfers.open_frames() == 0
    case.model.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == held
    assert torch.equal(results_on_cuda(case)["loss"], expected["loss"])
