"""Training steps whose activations leave for a disk: within the budget, with the gradients of eager mode."""

import copy
import gc
import os
import threading

import pytest
import torch
from torch import nn

import solvers
from planner import InfeasibleBudgetError, OffloadError, applied_plan, plan
from planner.offload import transfers
from solvers import Answer, Move, Schedule, every_op_once

from .measure import beside_the_loop, peak_of


def mlp():
    torch.manual_seed(0)
    layers = [m for _ in range(8) for m in (nn.Linear(64, 64), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(64, 4)), torch.randn(4096, 64), {"keep": ["aten.tanh"]}


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.1, batch_first=True)
        self.layers = nn.ModuleList([copy.deepcopy(layer) for _ in range(2)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def transformer():
    torch.manual_seed(0)
    return Transformer(), torch.randn(16, 64, 32), {"keep": ["layers.*.linear1"]}


def loss_of(y):
    return y.square().mean()


def gradients(model, x):
    torch.manual_seed(3)
    loss_of(model(x)).backward()
    found = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    return found


@pytest.mark.parametrize("case", [mlp, transformer])
def test_a_budget_below_any_plan_without_offload_is_met(case, short_searches, tmp_path):
    model, x, options = case()
    expected = gradients(model, x)
    options |= {"loss_fn": loss_of, "progress": False, "optimizer": "sgd"}
    with pytest.raises(InfeasibleBudgetError) as e:
        plan(model, x, budget_gb="1 MB", **options)
    p = plan(model, x, budget_gb=0.8 * e.value.minimum_gb, offload="disk", offload_dir=str(tmp_path), **options)
    assert p.moved_bytes > 0
    p.apply()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with beside_the_loop():
        assert all(map(torch.equal, gradients(model, x), expected))

    def step():
        optimizer.zero_grad()
        loss_of(model(x)).backward()
        optimizer.step()

    step()
    held = sum(t.nbytes for t in (x, *model.parameters()))
    optimizer.zero_grad()
    peak = held + peak_of(step, tmp_path)
    planned = applied_plan(model)
    assert peak <= planned.budget_bytes
    assert peak == pytest.approx(planned.peak_bytes, rel=0.01)
    assert transfers.open_frames() == 0
    assert os.listdir(tmp_path) == ["trace.json"]


def interrupt(_):
    raise KeyboardInterrupt


def everything_leaves(problem, **_):
    """A solver: nothing runs again, and what the backward pass needs leaves."""
    moves = []
    for v in sorted(problem.movable):
        uses = sorted((problem.producer[v], *problem.readers[v]))
        before = [at for at in uses if at < problem.boundary]
        after = [at for at in uses if at > problem.boundary]
        if after and problem.ops[before[-1] + 1].region == problem.ops[before[0]].region:
            moves += [Move("send", v, before[0] + 1), Move("free", v, before[-1] + 1), Move("fetch", v, after[0])]
    order = ("send", "free", "fetch")
    moves.sort(key=lambda m: (m.at, order.index(m.kind)))
    return Answer(Schedule(every_op_once(problem).steps, tuple(moves)))


def test_steps_that_fail_or_wait_leave_no_trace(unwatched):
    model, x, _ = mlp()
    expected = gradients(model, x)
    whole = plan(model, x, budget_gb=1, loss_fn=loss_of, progress=False)
    solvers.register_solver("leaves", everything_leaves)
    budget = 0.8 * whole.peak_bytes / 2**30
    p = plan(model, x, budget_gb=budget, loss_fn=loss_of, progress=False, offload="disk", solver="leaves")
    p.apply()
    threads = threading.active_count()
    assert all(map(torch.equal, gradients(model, x), expected))
    with beside_the_loop():
        y = model(x)
        assert transfers.open_frames() == 1
        y.register_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            loss_of(y).backward()
        del y
        gc.collect()
        assert transfers.open_frames() == 0
        assert all(map(torch.equal, gradients(model, x), expected))
        loss = loss_of(model(x))
        with pytest.raises(OffloadError, match="several forward passes wait"):
            model(x)
        loss.backward(retain_graph=True)
        model.zero_grad()
        loss.backward()
        assert all(torch.equal(q.grad, g) for q, g in zip(model.parameters(), expected, strict=True))
    assert threading.active_count() <= threads + 2
    p.remove()
