"""Sizes that turn out to change: few plans and few compiled graphs, within the budget, gradients as eager's."""

import copy
import logging
import random
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import planner.planning.pipeline
from planner import PlanWarning, plan
from planner.core.maxima import Maxima
from planner.core.objects import tensors_of, with_tensors
from planner.runtime.learnt_shapes import LearntShapes

from .measure import beside_the_loop, held_before, results, step_peak
from .real_models import Case
from .test_shapes import Loop, Net
from .variants import more

pytestmark = pytest.mark.usefixtures("short_searches")


@pytest.fixture
def captured(monkeypatch):
    """The steps that were captured: one for each plan that is tried."""
    seen, capture = [], planner.planning.pipeline.capture

    def noted(*args, **kwargs):
        seen.append(args[1:3])
        return capture(*args, **kwargs)

    monkeypatch.setattr(planner.planning.pipeline, "capture", noted)
    return seen


def loop(model, batches, tmp_path=None, *, share=1.0, largest=None, **options):
    """Steps on batches, each as eager's, and measured within the budget where a folder is given for that."""
    twin = copy.deepcopy(model)
    largest = batches[-1] if largest is None else largest
    budget = share * plan(twin, largest, budget_gb=1).baseline_peak_bytes
    plan(model, batches[0], budget_gb=budget / 2**30, **options).apply()
    for batch in batches:
        ours = results(Case(model, batch, lambda output: output))
        with beside_the_loop():
            twin.load_state_dict(model.state_dict())
            theirs = results(Case(twin, batch, lambda output: output))
            assert ours.keys() == theirs.keys()
            assert all(map(torch.equal, ours.values(), theirs.values()))
        if tmp_path is not None:
            case = Case(model, batch, lambda output: output)
            assert held_before(case) + step_peak(case, tmp_path) <= budget
    return twin


@pytest.mark.thorough
def test_random_lengths_take_few_plans_and_few_graphs(captured, tmp_path, caplog):
    draw = random.Random(0)
    lengths = [draw.randint(9, 33) for _ in range(12)]
    batches = [{"x": torch.randn(8, n, 8)} for n in lengths]
    largest = {"x": torch.randn(8, max(lengths), 8)}
    with caplog.at_level(logging.INFO, "planner"):
        captured.clear()
        counters.clear()
        loop(Net(), batches, tmp_path, share=0.9, largest=largest)
    assert len(captured) <= 6  # two of them for the budget and the first batch
    assert counters["stats"]["unique_graphs"] <= 11  # each is captured, and compiled
    assert any("one plan and one compiled graph" in m and "of batch['x']" in m for m in caplog.messages)


@pytest.mark.parametrize(
    ("share", "rows", "anew"),
    [(0.8, 5, 0), *more((1.0, 5, 0), (0.8, 7, 1))],
    ids=["fits as it is", "nothing recomputed", "recomputed"],
)
def test_a_smaller_last_batch_in_each_epoch_is_one_shape(share, rows, anew, captured, tmp_path, caplog):
    full, last = torch.randn(8, 16, 8), torch.randn(rows, 16, 8)
    counters.clear()
    with caplog.at_level(logging.INFO, "planner"):
        loop(Net(), [{"x": x} for x in (full, full, last) * 3], tmp_path, share=share, largest={"x": full})
    assert len(captured) == 2 + anew  # one for the budget
    assert counters["stats"]["unique_graphs"] == 3 + 2 * anew
    assert not any("shapes change" in m for m in caplog.messages)


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 64), nn.Linear(64, 8)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x))).square().mean()


class Shifted(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x, target):
        return (self.layer(x)[:, 1:] - target).square().mean()


class Rows(NamedTuple):
    x: torch.Tensor


class Store:
    def __init__(self, x):
        self.rows = {"features": Rows(x)}
        self.owner = self  # as objects of graphs refer to each other


@dataclass(frozen=True)
class Sample:
    store: Store
    number: int = 8


class OfObjects(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = Layers()

    def forward(self, sample):
        return self.net(sample.store.rows["features"].x)


def test_sizes_in_objects_change_as_others_do(captured, tmp_path, caplog):
    lengths = (20, 27, 25, 22, 21, 18)
    batches = [{"sample": Sample(Store(torch.randn(4, n, 8)))} for n in lengths]
    with caplog.at_level(logging.INFO, "planner"):
        loop(OfObjects(), batches, tmp_path, share=1.1, largest=batches[1])
    assert len(captured) == 4  # for the budget, for two shapes, rounded up
    told = "dimension 1 of batch['sample'].store.rows['features'].x"
    assert any("one plan and one compiled graph" in m and told in m for m in caplog.messages)


def test_objects_are_copied_where_their_tensors_are_others():
    given, twice = Sample(Store(torch.ones(2))), torch.zeros(3)
    others = Sample([1, "a", None], 2)
    (new, same, tied), kwargs = with_tensors((given, others, given), {"x": twice}, lambda _, t: t + 1)
    assert type(new) is Sample
    assert new.store.rows["features"].x.tolist() == [2, 2]
    assert new.number == 8
    assert same is others
    assert given.store.rows["features"].x.tolist() == [1, 1]
    assert kwargs["x"].tolist() == [1, 1, 1]
    assert tied is not given
    names = [name for name, _ in tensors_of((given,), {"x": twice})]
    assert names == ["[0][0].store.rows['features'].x", "[1]['x']"]


@dataclass(frozen=True, slots=True)
class Slots:
    x: torch.Tensor
    name: str = "a"


def test_objects_may_have_slots():
    given = Slots(torch.ones(2))
    (new,), _ = with_tensors((given,), {}, lambda _, t: t + 1)
    assert (type(new), new.x.tolist(), new.name, given.x.tolist()) == (Slots, [2, 2], "a", [1, 1])
    assert [name for name, _ in tensors_of((given,), {})] == ["[0][0].x"]


def test_sizes_that_belong_together_are_not_rounded_apart(captured):
    lengths = (20, 27, 25, 22, 21, 18)
    batches = [{"x": torch.randn(4, n, 8), "target": torch.randn(4, n - 1, 8)} for n in lengths]
    loop(Shifted(), batches, largest=batches[1])
    assert len(captured) == 5  # for the budget, for two shapes, rounded up, for the largest


@pytest.mark.thorough
def test_shapes_that_no_plan_holds_together_have_plans_of_their_own(captured, tmp_path):
    shapes = ((8, 8), (4, 16), (2, 32), (4, 14), (2, 30))
    batches = [{"x": torch.randn(*shape, 8)} for shape in shapes]
    loop(Layers(), batches, tmp_path, largest=batches[1])
    assert len(captured) == 6  # for the budget, for each of four, and for the one that exceeds it


def test_where_every_length_is_a_graph_one_warning_says_what_helps():
    batches = [{"x": torch.randn(8, n, 16)} for n in (3, 5, 4, 6)]
    with pytest.warns(PlanWarning, match=r"no graph serves every size.*Pad batches to a few sizes") as said:
        loop(Loop(), batches)
    assert len(said) == 1


class Branching(nn.Module):
    """Long batches have another graph than short ones."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))

    def forward(self, x):
        x = self.layers(x)
        if x.shape[1] > 30:
            x = x * (1 + 1 / x.shape[1])
        return self.layers(x).square().mean()


@pytest.mark.thorough
def test_microbatches_of_other_lengths_with_other_graphs_train_as_without_a_plan():
    torch.manual_seed(0)
    usual = Branching()
    model = copy.deepcopy(usual)
    plan(model, budget_gb=1).apply()
    for lengths in ((40, 24), (33, 17), (36, 40), (20, 21), (44, 12)):
        for n in lengths:
            x = torch.randn(8, n, 8)
            usual(x).backward()
            model(x).backward()
        for own, its in zip(model.parameters(), usual.parameters(), strict=True):
            assert torch.equal(own.grad, its.grad)
            own.grad = its.grad = None


def test_without_symbols_each_shape_is_planned_as_it_is_asked_for(captured):
    batches = [{"x": torch.randn(4, n, 8)} for n in (12, 16, 14, 13)]
    loop(Layers(), batches, largest=batches[1], dynamic=False)
    assert len(captured) == 5


def test_growing_sizes_are_given_ever_more_room():
    shapes, plans = LearntShapes(Maxima({}), tells=False), []
    for n in (40, *range(32, 1000, 7)):
        own = Maxima({"x": {0: 8, 1: n}})
        shapes.note((), own)
        free = Maxima({path: {d: own.of(path)[d] for d in at} for path, at in (shapes.free or {}).items()})
        if free.sizes and shapes.find((), free) is None:
            first, *others = shapes.wanted((), free)
            assert first.cover(free)
            assert others[-1:] in ([free], [])
            shapes.families.setdefault((), []).append(type("F", (), {"maxima": first}))
            shapes.limit(first)
            plans.append(first.of("x")[1])
    assert plans == [40, 48, 64, 128, 256, 512, 1024]
    assert shapes.free == {"x": {1}}
