import gc
import json
import logging
import os
import re
import signal
import time
from dataclasses import replace
from datetime import timedelta
from itertools import accumulate

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, record_function

import planner.eager.pipeline
import planner.planning.solution
import planner.session.agreement
import planner.session.messages
import planner.session.trust
from planner import ApplyError, InfeasibleBudgetError, OptionError, Plan, applied_plan, plan
from planner.parallel.buckets import LINE, Buckets
from planner.planfile.consistency import check
from planner.planning.pipeline import make_plan
from planner.session.counted import counted, with_buckets
from planner.session.messages import connected, gather

from .processes import ends_of, on_ranks
from .variants import more

pytestmark = pytest.mark.usefixtures("short_searches")

WIDTH, ROWS = 64, 128


def loss_fn(output):
    return output.square().mean()


def network(depth=5, dropout=0.1):
    torch.manual_seed(0)
    blocks = [(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(dropout)) for _ in range(depth)]
    return nn.Sequential(*(nn.Sequential(*layers) for layers in blocks))


def planned(model, budget_gb, batch=None, mode="aten", **options):
    return plan(model, batch, budget_gb=budget_gb, solver="chen", loss_fn=loss_fn, mode=mode, **options)


def batches(rows=ROWS):
    torch.manual_seed(dist.get_rank())
    return [torch.randn(rows, WIDTH) for _ in range(2)]


def gradients(model, rows=ROWS, **wrapping):
    """Of two steps; in the second, the buckets are made anew, in the order in which the gradients came."""
    ddp = DistributedDataParallel(model, **wrapping)
    found = []
    for batch in batches(rows):
        loss_fn(ddp(batch)).backward()
        found += [p.grad.clone() for p in model.parameters()]
        ddp.zero_grad()
    return found


def peaks(model, folder, **wrapping):
    """The most bytes held in each of two steps, what is there before included, from the profiler's allocator events.

    The model has run before, and is wrapped anew, for the profiler to see every bucket. It does not see what a thread
    of gloo frees, which lets go of a tensor a moment after it was sent.
    """
    gc.collect()
    given = batches()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        ddp = DistributedDataParallel(model, init_sync=False, **wrapping)
        for batch in given:
            time.sleep(0.1)
            own = batch.clone()
            with record_function("step"):
                loss_fn(ddp(own)).backward()
            ddp.zero_grad()
            del own
    trace = folder / f"{dist.get_rank()}.json"
    profiler.export_chrome_trace(str(trace))
    events = sorted(
        json.loads(trace.read_text())["traceEvents"], key=lambda e: (e.get("ts", 0), e.get("args", {}).get("Ev Idx", 0))
    )
    memory = [e for e in events if e["name"] == "[memory]"]
    held = accumulate((e["args"]["Bytes"] for e in memory), initial=sum(p.nbytes for p in model.parameters()))
    totals = [(e["ts"], total) for e, total in zip(memory, list(held)[1:], strict=True)]
    spans = [(e["ts"], e["ts"] + e["dur"]) for e in events if e["name"] == "step" and e["ph"] == "X"]
    return [max(total for at, total in totals if begin <= at <= end) for begin, end in spans]


def counted_solves():
    """A list that grows with every run of a solver."""
    runs, solve = [], planner.planning.solution.solve

    def counting(*args, **kwargs):
        runs.append(1)
        return solve(*args, **kwargs)

    planner.planning.solution.solve = counting
    return runs


def train(folder, budget_gb, mode, early, wrapping):
    """What a plan does on this rank, and whether its gradients are those without one."""
    usual = network()
    expected = gradients(usual, **wrapping)
    model = network()
    made = planned(model, budget_gb, batches()[0] if early else None, mode)
    runs = counted_solves()
    made.apply()
    found = gradients(model, **wrapping)
    half = len(found) // 2
    same = all(map(torch.equal, expected[:half], found[:half]))
    # beyond two ranks, sums depend on the order in the buckets, and that on when gradients come
    same = same and all(torch.allclose(*each, rtol=1e-5, atol=1e-9) for each in zip(expected, found, strict=True))
    p = applied_plan(model)
    check(p)
    return {
        "same": same,
        "usual": peaks(usual, folder, **wrapping),
        "peaks": peaks(model, folder, **wrapping),
        "predicted": max(size for phase, size in p.phase_peaks.items() if phase != "optimizer"),
        "budget": p.budget_bytes,
        "solves": len(runs),
        "note": p.note,
        "recipe": str(p.recipe.calls if p.problem else p.recipe),
        "buckets": p.account[LINE],
    }


CASES = {
    2: [("aten", True, {"gradient_as_bucket_view": True}), ("eager", False, {})],
    4: [("aten", False, {})],
}


def train_all(folder, cases):
    return [train(folder, 0.00055 if mode == "aten" else 0.00065, mode, *case) for mode, *case in cases]


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.compat), *more(4)])
def test_ranks_train_by_one_plan_with_the_gradients_of_none(ranks, tmp_path):
    for found in zip(*on_ranks(ranks, train_all, tmp_path, CASES[ranks]), strict=True):
        for each in found:
            assert each["same"]
            assert max(each["peaks"]) < min(each["usual"])
            assert max(each["peaks"]) <= each["budget"]
            for peak in each["peaks"]:
                assert peak <= each["predicted"] * 1.03
                assert each["predicted"] <= peak * 1.05
            assert each["recipe"] == found[0]["recipe"]
        assert sum(each["solves"] for each in found[1:]) == 0
        assert all(each["note"].startswith("Taken from rank 0: the same step") for each in found[1:])


def train_fused(folder, wrong):
    """As `train()`, of a model that was compiled; on rank 0 its gradients may seem to be wrong."""
    os.environ["CHECKPOINT_PLANNER_CACHE"] = str(folder)
    usual, model = network(dropout=0.0), network(dropout=0.0)
    expected = gradients(usual)
    model.compile()
    made = plan(model, budget_gb=0.00042, loss_fn=loss_fn, progress=False)
    if wrong and dist.get_rank() == 0:
        planner.session.trust._beside = lambda *_, **__: (1.0, False, "")
    made.apply()
    found = gradients(model)
    p = applied_plan(model)
    check(p)
    return {
        "same": all(torch.allclose(*each, rtol=1e-4, atol=1e-8) for each in zip(expected, found, strict=True)),
        "peak": max(peaks(model, folder)),
        "predicted": max(size for phase, size in p.phase_peaks.items() if phase != "optimizer"),
        "budget": p.budget_bytes,
        "mode": p.options.mode,
        "overhead": p.overhead,
        "recipe": str(p.recipe.calls),
    }


@pytest.mark.parametrize(("wrong", "mode"), more((False, "inductor"), (True, "aten")))
def test_ranks_of_a_compiled_model_train_in_the_same_kernels(wrong, mode, tmp_path):
    found = on_ranks(2, train_fused, tmp_path, wrong)
    for each in found:
        assert each["same"]
        assert each["overhead"] > 0
        assert each["mode"] == mode
        assert each["peak"] <= each["budget"]
        assert each["predicted"] * 0.9 <= each["peak"] <= each["predicted"] * 1.03
        assert each["recipe"] == found[0]["recipe"]


class Another(nn.Sequential):
    """Another model with the parameters and modules of the one that the other ranks train."""


def fails(what, where):
    here = dist.get_rank() == where
    model = network(3, 0.5 if here and what == "another graph" else 0.1)
    if here and what == "another model":
        model = Another(*model)
    mode = "aten" if what == "another graph" else "eager"
    planned(model, 0.0001 if what == "no room" else 1, mode=mode).apply()
    ddp = DistributedDataParallel(model)
    if here and what == "raises":
        raise ValueError("planted")
    if here and what == "is killed":
        planner.eager.pipeline.account_of = lambda request: os.kill(os.getpid(), signal.SIGKILL)
    if here and what == "is killed late":
        planner.session.agreement.plan_of = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
    if here and what == "does not come":
        time.sleep(5)
    loss_fn(ddp(torch.ones(8, WIDTH)))


@pytest.mark.parametrize(
    ("what", "where", "told"),
    [
        ("raises", 1, r"as rank 1 cannot: rank 0 waited for rank 1 to come .* has ended"),
        ("is killed", 2, r"as rank 2 cannot: rank 0 waited for rank 2 to take over the plan; that has ended"),
        ("is killed", 0, r"waited for rank 0 to plan; that has ended"),
        ("is killed late", 1, r"as rank 1 cannot: rank 0 waited for rank 1 to take over the plan; that has ended"),
        ("another model", 2, r"as rank 2 cannot: it is at the first step of Another .*, rank 0 of Sequential"),
        ("another graph", 1, r"as rank 1 cannot: its step is not that of rank 0: its graphs differ"),
        ("no room", 0, r"InfeasibleBudgetError: budget_gb=0.0001 "),
        ("does not come", 1, r"waited for rank . to come .* (has not come within the timeout|has ended)"),
    ],
)
def test_a_rank_that_fails_ends_all_with_its_name(what, where, told):
    ended = ends_of(3, fails, what, where, timeout=timedelta(seconds=2 if what == "does not come" else 60))
    for rank, end in enumerate(ended):
        assert end.exitcode not in (0, None)  # it ended by itself
        if rank != where:
            assert re.search(f"RankError: .*{told}", end.error)


def fails_before_another_comes():
    planner.session.agreement.GRACE = 0.1
    model = network(2)
    planned(model, 1, mode="eager").apply()
    ddp = DistributedDataParallel(model)
    if dist.get_rank() == 1:
        raise ValueError("planted")
    if dist.get_rank() == 2:
        time.sleep(8)
    loss_fn(ddp(torch.ones(8, WIDTH)))


@pytest.mark.thorough
def test_a_rank_that_is_far_from_its_first_step_does_not_keep_the_others():
    first, _, last = ends_of(3, fails_before_another_comes)
    assert re.search(r"RankError: no rank trains .* as rank 1 cannot: rank 0 waited for rank 1 to come", first.error)
    assert re.search(r"RankError: rank 2 waited for rank 0 to come to its first planned step; that has", last.error)


class Kept(logging.Handler):
    """A handler that keeps texts."""

    def __init__(self):
        super().__init__()
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())


def train_with_a_slow_planner():
    planner.session.messages.PATIENCE = 0.5
    solve = planner.planning.solution.solve

    def slow(*args, **kwargs):
        time.sleep(3)
        return solve(*args, **kwargs)

    planner.planning.solution.solve = slow
    kept = Kept()
    logging.getLogger("planner").addHandler(kept)
    model = network(2)
    planned(model, 1).apply()
    same = all(map(torch.equal, gradients(network(2)), gradients(model)))
    return same, kept.texts, applied_plan(model).note


@pytest.mark.thorough
def test_a_slow_planner_is_waited_for_and_named():
    first, (same, texts, note) = on_ranks(2, train_with_a_slow_planner)
    assert first[0]
    assert same
    assert "rank 1 waits for rank 0 to plan, for 0 seconds now" in texts
    assert note == "Taken from rank 0: the same step and budget."


def train_unevenly():
    rank = dist.get_rank()
    rows = ROWS + 32 * rank
    first, second = network(4), network(2)
    for model in (first, second):
        planned(model, 1).apply()
    same = [all(map(torch.equal, gradients(network(4), rows), gradients(first, rows)))]
    same.append(all(map(torch.equal, gradients(network(2)), gradients(second))))
    return same, [applied_plan(model).note for model in (first, second)]


def test_uneven_batches_are_planned_apart_and_a_second_model_after_the_first():
    (same, first), (others, second) = on_ranks(2, train_unevenly)
    assert same == others == [True, True]
    assert first == ["", ""]
    assert "(160, 64) float32, that of rank 0 batch[0] (128, 64) float32" in second[0]
    assert second[1] == "Taken from rank 0: the same step and budget."


def from_files(folder):
    model, batch = network(2), batches()[0]
    ours, theirs = str(folder / f"{dist.get_rank()}.json"), str(folder / "of_four.json")
    planned(model, 1 + dist.get_rank(), batch).save(ours)
    with pytest.raises(
        ApplyError, match=r"does not match the world size: it is for 4 processes .* one of 2. Plan anew"
    ):
        Plan.load(theirs).apply(network())
    other = network()
    anew = planned(other, 1, batch, shard=4, known=theirs).note
    Plan.load(ours, loss_fn=loss_fn).apply(model)
    ddp = DistributedDataParallel(model)
    with connected([1, 0]) as group:  # a group of their own, as beside NCCL
        assert gather(group, "aä"[dist.get_rank()], "to listen", "to talk") == {0: "a", 1: "ä"}
    loss_fn(ddp(batch)).backward()
    p = applied_plan(model)
    p.save(ours)
    with pytest.raises(OptionError, match=r"static_graph=True.*before the model is wrapped"):
        DistributedDataParallel(planned(other, 1).apply(verify=True), static_graph=True)(batch)
    return anew, p.budget_bytes, Plan.load(ours).step.ranks


@pytest.mark.thorough
def test_files_of_other_budgets_and_world_sizes(tmp_path):
    model = network()
    planned(model, 1, torch.ones(ROWS, WIDTH), shard=4).save(tmp_path / "of_four.json")
    for anew, budget, ranks in on_ranks(2, from_files, tmp_path):
        assert "Solved anew, not taken from" in anew
        assert "it is for 4 processes with a part of the parameters each, and this is one of 2" in anew
        assert budget == 2**30  # of rank 0's file
        assert ranks == 2


def alone():
    model = network(2)
    planned(model, 1, batches()[0]).apply()
    loss_fn(DistributedDataParallel(model)(batches()[0])).backward()
    return applied_plan(model).account[LINE], sum(p.nbytes for p in model.parameters())


def test_one_process_alone_has_buckets():
    ((counted, size),) = on_ranks(1, alone)
    assert counted == size


@pytest.mark.parametrize("mode", ["aten", "eager"])
def test_buckets_are_counted_in_a_plan_that_is_there(mode):
    model = network()
    p = planned(model, 0.001, torch.ones(ROWS, WIDTH), mode)
    buckets = Buckets(83200, views=False)
    request = with_buckets(p.request, buckets)
    planned_before = p.source
    fits = counted(planned_before, request).record
    anew = make_plan(request).record
    check(fits)
    for name in ("peak_bytes", "baseline_peak_bytes", "resident_bytes", "account", "problem", "schedule"):
        assert getattr(fits, name) == getattr(anew, name), name
    for name in ("timeline", "baseline_timeline"):
        assert [m.held_bytes for m in getattr(fits, name)] == [m.held_bytes for m in getattr(anew, name)]
    assert fits.peak_bytes == p.peak_bytes + buckets.nbytes
    assert counted(counted(planned_before, request), p.request).record.account == p.account
    tight = replace(request, budget_gb=(fits.peak_bytes - 1) / 2**30)
    other = counted(planned_before, tight).record
    assert other.peak_bytes < fits.peak_bytes
    assert "with 81.25 kB of DDP buckets counted" in other.note
    with pytest.raises(InfeasibleBudgetError, match=r"DDP buckets 81.25 kB"):
        counted(planned_before, replace(request, budget_gb=0.0002))
