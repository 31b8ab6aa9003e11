"""Emitted graphs that move values have every wait that they need: on a simulated device that finds races."""

import random
from contextlib import suppress
from itertools import pairwise

import pytest
import torch
from torch import nn

from planner.codegen.emit import emit, keep_everything
from planner.codegen.moving import moves_fit
from planner.compat.fx import boxed
from planner.lowering.build import split_by_region
from planner.lowering.offload import moves_by_region
from planner.offload import transfers
from planner.offload.disk import Disk
from planner.planning.pipeline import graph_of, lower
from planner.planning.what_if import recomputing
from planner.requests.check import check
from solvers import Move, ProblemError, Schedule, every_op_once, simulate, validate

from .measure import peak_of
from .simulated_device import Device
from .variants import keeping

pytestmark = pytest.mark.usefixtures("short_searches")


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.head = nn.Linear(16, 11)

    def forward(self, ids):
        return self.head(self.layer(self.embedding(ids)))


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(12, 12) for _ in range(3))

    def forward(self, x):
        y, z = torch.tanh(self.a(x)).chunk(2, -1)
        w, at = self.b(torch.cat((z, y), -1)).max(0)
        return (self.c(x) * w).sigmoid().square() + at


MODELS = {
    "mlp": lambda: (nn.Sequential(*[m for _ in range(3) for m in (nn.Linear(8, 8), nn.Tanh())]), torch.zeros(4, 8)),
    "dropout": lambda: (
        nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.5), nn.LayerNorm(32), nn.Linear(32, 8), nn.Tanh()),
        torch.zeros(4, 8),
    ),
    "convolution": lambda: (
        nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3), nn.Flatten()),
        torch.zeros(2, 2, 8, 8),
    ),
    "attention": lambda: (Attention(), torch.zeros(2, 5, dtype=torch.int64)),
    "branches": lambda: (Branches(), torch.zeros(6, 12)),
}
SCHEDULES = 40


@pytest.fixture(scope="module", params=keeping(*(name for name in MODELS if name != "attention"), of=MODELS))
def step_and_region(request):
    model, batch = MODELS[request.param]()
    request = check(model, batch, None, budget_gb=1, loss_fn=torch.sum, offload="disk", progress=False)
    graph = graph_of(request)
    (region,) = graph.regions
    return lower(request, graph), region


def random_moves(problem, steps, choose):
    """Moves between uses of some values, at random places, in an order that schedules may have."""
    found = []
    for v in sorted(problem.movable):
        uses = [at for at, i in enumerate(steps) if v in (*problem.ops[i].reads, *problem.ops[i].writes)]
        gaps = [(a, b) for a, b in pairwise(uses) if b > a + 1 and v not in problem.ops[steps[b]].writes]
        own = []
        for a, b in gaps:
            if choose.random() < 0.5:
                places = sorted(choose.randint(a + 1, b) for _ in range(3))
                kinds = zip(("send", "free", "fetch"), places, strict=True)
                own += [Move(kind, v, at) for kind, at in kinds if kind != "send" or not own]
        trial = sorted([*found, *own], key=lambda m: m.at)
        try:
            validate(problem, Schedule(tuple(steps), tuple(trial)))
        except ProblemError:
            continue
        found = trial
    return tuple(found)


def random_schedule(problem, choose):
    drop = [v for v in sorted(problem.movable) if choose.random() < 0.3]
    steps = recomputing(problem, every_op_once(problem), drop).steps
    return Schedule(steps, random_moves(problem, steps, choose))


def dropping(problem, choose, share):
    """Steps after each of which a share of what is held, at random, goes: it is made again where it is read."""
    may = {v for v, i in enumerate(problem.producer) if problem.ops[i].recomputable} - problem.pinned
    held, steps = set(), []

    def run(i):
        for v in problem.ops[i].reads:
            if v not in held:
                run(problem.producer[v])
        steps.append(i)
        held.update(problem.ops[i].writes)

    for i in range(len(problem.ops)):
        run(i)
        held.difference_update([v for v in sorted(may & held) if choose.random() < share])
    return tuple(steps)


def inputs_of(region):
    torch.manual_seed(1)

    def real(node):
        t = node.meta["val"]
        if not t.is_floating_point():
            return torch.ones(t.shape, dtype=t.dtype)
        return torch.rand(t.shape, dtype=t.dtype)

    return [real(n) for n in region.primals], [real(n) for n in region.tangents]


def run(graphs, region, device, primals, tangents):
    device.outside = {t.untyped_storage().data_ptr() for t in (*primals, *tangents)}
    torch.manual_seed(2)
    forward, backward = graphs
    results = device.run(forward, primals)
    own, kept = results[: len(region.fwd_outputs)], results[len(region.fwd_outputs) :]
    del results
    own = [t.clone() if isinstance(t, torch.Tensor) else t for t in own]
    gradients = device.run(backward, [*kept, *tangents])
    device.finish()
    return [t for t in (*own, *gradients) if isinstance(t, torch.Tensor)]


def emitted(step, region, schedule, store=0):
    """The graphs of a schedule, and its moves as the region numbers them."""
    ((forward, backward),) = split_by_region(step, schedule, 1)
    (moves,) = moves_by_region(step, schedule, [region])
    assert moves_fit(region, (*forward, *backward), moves)
    return emit(region, forward, backward, moves, store), moves


def test_no_schedule_races_and_each_wait_is_needed(step_and_region):
    step, region = step_and_region
    choose = random.Random(7)
    inputs = inputs_of(region)
    expected = run(keep_everything(region), region, Device("late"), *inputs)
    moved = removed = 0
    for number in range(SCHEDULES):
        graphs, moves = emitted(step, region, random_schedule(step.problem, choose))
        moved += len(moves)
        for copies in ("early", "late"):
            device = Device(copies)
            found = run(graphs, region, device, *inputs)
            assert device.races == []
            assert all(map(torch.equal, found, expected))
        for wait in device.waits if number % 20 == 0 else ():
            broken = Device("late", [wait])
            with suppress(RuntimeError):  # an op may refuse what it is given too early
                run(graphs, region, broken, *inputs)
            assert broken.races, wait
            removed += 1
    assert moved > SCHEDULES
    assert removed >= 10


def test_moves_that_cannot_be_written_are_known(step_and_region):
    step, region = step_and_region
    choose = random.Random(3)
    schedule = random_schedule(step.problem, choose)
    ((forward, backward),) = split_by_region(step, schedule, 1)
    (moves,) = moves_by_region(step, schedule, [region])
    steps = (*forward, *backward)
    fetch = max(n for n, m in enumerate(moves) if m.kind == "fetch")
    assert not moves_fit(region, steps, [m for n, m in enumerate(moves) if n != fetch])  # it is read while it is away
    assert not moves_fit(region, steps, [m for m in moves if m.kind != "send"])
    assert not moves_fit(region, steps, [*moves, Move("free", moves[-1].value, len(steps))])
    outputs = region.values_in(region.returned)
    assert not moves_fit(region, steps, [Move(kind, outputs[0], len(steps) - 1) for kind in ("send", "free", "fetch")])


def peak_here(region, graphs, inputs, folder):
    """The most bytes that graphs take beside their inputs, by the profiler."""
    forward, backward = map(boxed, graphs)
    primals, tangents = inputs

    def both():
        results = list(forward(list(primals)))
        kept = [*results[len(region.fwd_outputs) :], *tangents]
        own = results[: len(region.fwd_outputs)]
        del results
        return own, backward(kept)

    return peak_of(both, folder)


@pytest.mark.thorough
def test_emitted_graphs_take_what_was_predicted_whatever_the_schedule(tmp_path):
    """Re-runs and moves at random places: nothing may be held that has been freed or has left."""
    model = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
    asked = check(model, torch.zeros(8, 32, 16), None, budget_gb=1, loss_fn=torch.sum, offload="disk", progress=False)
    graph = graph_of(asked)
    (region,), step = graph.regions, lower(asked, graph)
    inputs, store = inputs_of(region), Disk(str(tmp_path))
    number = transfers.enter(store)
    for seed in range(9, 25):
        choose = random.Random(seed)
        steps = dropping(step.problem, choose, choose.choice([0.02, 0.05, 0.1, 0.3]))
        schedule = Schedule(steps, random_moves(step.problem, steps, choose))
        assert len(schedule.moves) > 40
        graphs, _ = emitted(step, region, schedule, number)
        predicted = simulate(step.problem, schedule).peak - step.problem.resident
        assert 0.95 * predicted <= peak_here(region, graphs, inputs, tmp_path) <= predicted, seed
