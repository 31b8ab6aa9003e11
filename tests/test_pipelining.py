"""Stages of `torch.distributed.pipelining` under plans, on gloo ranks; measured by torch's profiler."""

import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from planner import applied_plan
from planner.integrations.pipelining import plan_schedule

from .measure import peak_of
from .processes import on_ranks

BATCH, LENGTH, WIDTH = 32, 64, 64


def part(index):
    torch.manual_seed(index)
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def loss_fn(output, target):
    return nn.functional.mse_loss(output, target)


SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B}


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
    buffers = [i.buffer for table in tables for infos in table.values() for i in infos if i.buffer is not None]
    held = [*parameters, *buffers, *given, *([target] if rank == last else [])]
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
        "in flight": [p.request.in_flight for p in plans],
        "overhead": [p.overhead for p in plans],
        "account": [dict(p.account) for p in plans],
        "note": plans[0].note,
    }


@pytest.mark.parametrize("kind", ["gpipe", "1f1b", "interleaved"])
def test_each_rank_trains_within_its_budget_as_predicted_to_the_same_gradients(kind):
    for rank, found in enumerate(on_ranks(2, compared, kind, 4, 0.7)):
        print(rank, found)
