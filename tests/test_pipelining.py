"""Stages of `torch.distributed.pipelining` under plans, on gloo ranks; measured by torch's profiler."""

import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import ScheduleInterleavedZeroBubble

from planner import ApplyError, InfeasibleBudgetError, OptionError, Plan, PlannerError, applied_plan
from planner.integrations.pipelining import plan_schedule

from .measure import peak_of
from .processes import on_ranks
from .variants import more

pytestmark = pytest.mark.usefixtures("short_searches")

BATCH, LENGTH, WIDTH = 32, 64, 64


def part(index):
    torch.manual_seed(index)
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def loss_fn(output, target):
    return nn.functional.mse_loss(output, target)


SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B}
SHARES = {"gpipe": 0.7, "1f1b": 0.7, "interleaved": 0.9}  # of what is allocated without plans


def stages_of(kind):
    rank, size = dist.get_rank(), dist.get_world_size()
    many = 2 if kind == "interleaved" else 1
    device = torch.device("cpu")
    return [PipelineStage(part(i), i, many * size, device) for i in range(rank, many * size, size)]


def run(kind, microbatches, budget=None):
    """A schedule's step, with or without plans: what it holds before, its peak above that, gradients and losses."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    torch.manual_seed(7)
    x, target = torch.randn(BATCH, LENGTH, WIDTH), torch.randn(BATCH, LENGTH, WIDTH)
    stages = stages_of(kind)
    schedule = SCHEDULES[kind](stages if kind == "interleaved" else stages[0], microbatches, loss_fn)
    if budget is not None:
        plan_schedule(schedule, budget_gb=budget / 2**30)
    losses = []
    given = (x,) if rank == 0 else ()
    more = {"target": target, "losses": losses} if rank == last else {}
    parameters = [p for s in stages for p in s.submod.parameters()]
    schedule.step(*given, **more)  # shapes are passed on, graphs compiled
    first = [p.grad.clone() for p in parameters]
    for p in parameters:
        p.grad = None
    with tempfile.TemporaryDirectory() as folder:
        peak = peak_of(lambda: schedule.step(*given, **more), Path(folder))
    assert all(torch.equal(p.grad, g) for p, g in zip(parameters, first, strict=True))
    tables = [table for s in stages for table in (s.args_recv_info, s.grad_recv_info)]
    buffers = [getattr(i, "buffer", None) for table in tables for infos in table.values() for i in infos]
    held = [*parameters, *(b for b in buffers if b is not None), *given, *([target] if rank == last else [])]
    return stages, sum(t.nbytes for t in held), peak, [*first, *(loss.detach().clone() for loss in losses)]


def compared(kind, microbatches, share):
    _, held, plain, expected = run(kind, microbatches)
    budget = held + share * plain
    stages, again, planned, found = run(kind, microbatches, budget)
    assert again == held
    plans = [applied_plan(s.submod) for s in stages]
    return {
        "equal": all(torch.equal(a, b) for a, b in zip(expected, found, strict=True)),
        "plain": held + plain,
        "planned": held + planned,
        "budget": budget,
        "predicted": [p.peak_bytes for p in plans],
        "in flight": [p.options.in_flight for p in plans],
        "overhead": [p.overhead for p in plans],
        "account": [dict(p.account) for p in plans],
        "note": plans[0].note,
    }


def compared_all(kinds, microbatches):
    return {kind: compared(kind, microbatches, SHARES[kind]) for kind in kinds}


@pytest.mark.parametrize(
    ("ranks", "kinds"), more(pytest.param(2, ("gpipe", "interleaved"), marks=pytest.mark.compat), (4, ("1f1b",)))
)
def test_each_rank_trains_within_its_budget_as_predicted_to_the_same_gradients(ranks, kinds):
    for rank, found in enumerate(on_ranks(ranks, compared_all, kinds, 4)):
        for kind, one in found.items():
            assert one["equal"]
            assert one["planned"] <= one["budget"] < one["plain"], (rank, kind)
            if kind == "interleaved":  # two stages: each has room for itself, whenever the other one runs
                assert one["planned"] <= sum(one["predicted"]) <= one["budget"]
            else:
                assert one["planned"] == pytest.approx(one["predicted"][0], rel=0.03)
                assert one["overhead"][0] > 0
            waiting = {"gpipe": [4], "1f1b": [4 - rank], "interleaved": [4 - rank, 2 - rank]}
            assert one["in flight"] == waiting[kind]


@pytest.fixture
def alone():
    """A process group of this process, which a stage asks for."""
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def stage(index=0, many=1, **options):
    return PipelineStage(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), index, many, torch.device("cpu"), **options)


def attached(schedule):
    stages = schedule._stages if hasattr(schedule, "_stages") else [schedule._stage]
    return [applied_plan(s.submod) or s.submod._compiled_call_impl for s in stages]


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        (lambda: ScheduleInterleavedZeroBubble([stage(0, 2), stage(1, 2)], 2, loss_fn), "in two parts"),
        (lambda: ScheduleGPipe(stage(), 2), "has no loss_fn"),
        (lambda: ScheduleGPipe(stage(dw_builder=lambda: None), 2, loss_fn), "dw_builder"),
        (lambda: stage(), "needs a schedule of torch.distributed.pipelining; it was given a PipelineStage"),
    ],
)
def test_schedules_that_cannot_be_planned_are_refused(alone, schedule, words):
    made = schedule()
    with pytest.raises(OptionError, match=words):
        plan_schedule(made, budget_gb=1)
    if not isinstance(made, PipelineStage):
        assert not any(attached(made))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"loss_fn": loss_fn}, "loss_fn is the schedule's own"),
        ({"in_flight": 2}, "in_flight is the schedule's own"),
        ({"mode": "eager"}, "does not count microbatches in flight"),
        ({"budget_gb": -1}, "budget_gb=-1"),
        ({"solver": "none"}, "solver='none'"),
    ],
)
def test_options_that_cannot_be_used_are_refused(alone, options, words):
    schedule = ScheduleGPipe(stage(), 2, loss_fn)
    with pytest.raises(PlannerError, match=words):
        plan_schedule(schedule, **{"budget_gb": 1, **options})
    assert not any(attached(schedule))


def test_stages_of_one_rank_share_its_budget_and_a_file_has_what_waits(alone, tmp_path):
    schedule = ScheduleInterleaved1F1B([stage(0, 2), stage(1, 2)], 2, loss_fn)
    plans = plan_schedule(schedule, budget_gb=0.001, mode=None)
    x = torch.randn(64, 4)
    schedule.step(x, target=torch.randn(64, 4))
    assert sum(p.budget_bytes for p in plans) == pytest.approx(0.001 * 2**30, abs=2)
    plans[0].save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded.step.occupancy == plans[0].step.occupancy
    assert loaded.problem == plans[0].problem
    with pytest.raises(ApplyError, match="already applied"):
        plan_schedule(schedule, budget_gb=0.001)
    for p in plans:
        p.remove()
    assert not any(attached(schedule))


def test_a_budget_that_is_too_small_names_one_that_does(alone):
    schedule = ScheduleGPipe(stage(), 4, loss_fn)
    (made,) = plan_schedule(schedule, budget_gb=1e-6)
    x, target = torch.randn(64, 4), torch.randn(64, 4)
    with pytest.raises(InfeasibleBudgetError) as refused:
        schedule.step(x, target=target)
    made.remove()
    (made,) = plan_schedule(schedule, budget_gb=refused.value.minimum_gb)
    schedule.step(x, target=target)
    assert made.peak_bytes <= made.budget_bytes
    before = applied_plan(schedule._stage.submod)
    schedule.eval(x, target=target)  # another kind of call, with gradients on, which needs no plan
    assert applied_plan(schedule._stage.submod) is before
