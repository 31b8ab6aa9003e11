"""One plan for many shapes: gradients as eager's, peaks within the budget as torch's profiler measures them."""

import copy
import itertools
import random

import pytest
import sympy
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters
from torch.utils._sympy.functions import FloorDiv, Max, Mod

import planner.planning.solution
from planner import InfeasibleBudgetError, OptionError, PlanWarning, applied_plan, plan
from planner.capture.shapes import grows

from .measure import held_before, results, step_peak
from .real_models import Case, gpt2
from .variants import more

pytestmark = pytest.mark.usefixtures("short_searches", "unwatched")

BASELINES: dict[str, int] = {}  # peaks with everything kept, by model and batch


class Net(nn.Module):
    """Two branches by length, normalisation with statistics, dropout, a graph break if it is asked for."""

    def __init__(self, limit: int = 0, breaks: bool = False, width: int = 32):
        super().__init__()
        self.limit, self.breaks = limit, breaks
        self.embed = nn.Linear(8, width)
        self.norm = nn.BatchNorm1d(width)
        up, down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.blocks = nn.ModuleList([nn.Sequential(up, nn.GELU(), nn.Dropout(0.2), down)])
        self.extra = nn.Linear(width, width)

    def forward(self, x):
        y = self.embed(x)
        y = y + self.norm(y.transpose(1, 2)).transpose(1, 2)
        if self.breaks:
            torch._dynamo.graph_break()
        for block in self.blocks:
            y = y + block(y)
        if x.shape[1] < self.limit:
            y = torch.tanh(self.extra(y))
        return y.square().mean()


class Loop(nn.Module):
    """Unrolled over the length: every length is a graph of its own."""

    def __init__(self):
        super().__init__()
        self.cell = nn.Linear(16, 16)

    def forward(self, x):
        y = x[:, 0]
        for t in range(x.shape[1]):
            y = torch.tanh(self.cell(y)) * torch.sigmoid(x[:, t])
        return y.square().mean()


class Conv(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        )  # fmt: skip
        self.head = nn.Linear(32, 4)

    def forward(self, x):
        return self.head(self.layers(x).mean((2, 3))).square().mean()


def case_of(model, x):
    name = "input" if isinstance(model, nn.Sequential) else "x"
    return Case(model, {name: x}, lambda output: output)


def planned(case, fraction, **options):
    """A plan at a fraction of what keeping everything takes; the model with it, and an eager copy."""
    plain = copy.deepcopy(case.model)
    key = f"{case.model} {[t.shape for t in case.batch.values()]}"
    if key not in BASELINES:
        BASELINES[key] = plan(case.model, case.batch, budget_gb=4, loss_fn=case.loss_fn).baseline_peak_bytes
    budget = fraction * BASELINES[key] / 2**30
    p = plan(case.model, case.batch, budget_gb=budget, loss_fn=case.loss_fn, **options)
    assert p.overhead > 0
    p.apply()
    return p, plain


def check(case, plain, batch):
    """Loss, gradients, buffers and random state of one step are those of eager, exactly."""
    plain.load_state_dict(case.model.state_dict())
    ours = results(Case(case.model, batch, case.loss_fn))
    theirs = results(Case(plain, batch, case.loss_fn))
    assert ours.keys() == theirs.keys()
    for key, expected in theirs.items():
        assert torch.equal(ours[key], expected), key


@pytest.mark.thorough
@pytest.mark.compat
def test_one_compiled_graph_serves_every_length_of_gpt2_within_the_budget(tmp_path):
    case = gpt2(dropout=0.1, layers=1)
    case.batch["labels"] = case.batch["labels"].clone()
    p, plain = planned(case, 0.8, dynamic=True)
    counters.clear()
    for rows, length in ((4, 128), (3, 77), (2, 128), (4, 5)):
        batch = {k: v[:rows, :length].contiguous() for k, v in case.batch.items()}
        check(case, plain, batch)
        peak = held_before(case) + step_peak(Case(case.model, batch), tmp_path)
        assert peak <= p.peak_bytes <= p.budget_bytes
        if (rows, length) == (4, 128):
            assert peak < held_before(case) + step_peak(Case(plain, batch), tmp_path)
    assert counters["stats"]["unique_graphs"] == 1
    assert applied_plan(case.model) is p


def test_a_conv_net_with_fewer_and_smaller_images(tmp_path):
    case = case_of(Conv(), torch.randn(6, 3, 32, 32))
    p, plain = planned(case, 0.9, dynamic=True)
    for rows, size in ((6, 32), (5, 32), (2, 21)):
        batch = {"x": torch.randn(rows, 3, size, size)}
        check(case, plain, batch)
        assert held_before(case) + step_peak(Case(case.model, batch, case.loss_fn), tmp_path) <= p.peak_bytes
    assert applied_plan(case.model) is p


@pytest.mark.parametrize("breaks", [False, *more(True)], ids=["one graph", "graph break"])
def test_a_shape_with_another_graph_is_planned_and_nothing_happens_twice(breaks, tmp_path):
    case = case_of(Net(limit=12, breaks=breaks), torch.randn(8, 32, 8))
    p, plain = planned(case, 0.8, dynamic=True)
    for rows, length in ((8, 32), (3, 20), (8, 10)):
        x = torch.randn(rows, length, 8)
        check(case, plain, {"x": x})
        peak = held_before(case) + step_peak(Case(case.model, {"x": x}, case.loss_fn), tmp_path)
        assert peak <= p.budget_bytes
        assert (applied_plan(case.model) is p) == (length != 10)


@pytest.mark.thorough
def test_where_every_length_is_a_graph_all_of_them_are_planned_beyond_torchs_recompile_limit():
    case = case_of(Loop(), torch.randn(8, 8, 16))
    p, plain = planned(case, 0.9, dynamic=True)
    with torch._dynamo.config.patch(recompile_limit=2):
        for length in range(8, 4, -1):
            check(case, plain, {"x": torch.randn(8, length, 16)})
            assert applied_plan(case.model).budget_bytes == p.budget_bytes


def test_largest_sizes_by_name_for_a_smaller_batch(tmp_path):
    largest = case_of(Net(), torch.randn(8, 32, 8))
    p, plain = planned(largest, 0.8)
    p.remove()
    case = case_of(largest.model, torch.randn(2, 16, 8))
    q = plan(case.model, case.batch, budget_gb=p.budget_bytes / 2**30, dynamic={"x": {0: 8, 1: 32}})
    assert q.baseline_peak_bytes == pytest.approx(p.baseline_peak_bytes, abs=16)  # gradients of scalars
    q.apply()
    for rows, length in ((2, 16), (8, 32), (1, 32)):
        x = torch.randn(rows, length, 8)
        check(case, plain, {"x": x})
        assert held_before(largest) + step_peak(Case(case.model, {"x": x}, case.loss_fn), tmp_path) <= q.peak_bytes
        assert (applied_plan(case.model) is q) == (rows > 1)  # one row is another graph


@pytest.mark.thorough
def test_parts_of_larger_tensors_and_one_tensor_passed_twice():
    case = case_of(Net(), torch.randn(8, 32, 8))
    _, plain = planned(case, 0.8, dynamic=True)
    x = torch.randn(9, 40, 8)
    for part in (x[:4, :20], x[1:5, 5:30], x[:6, :20].transpose(0, 1).contiguous().transpose(0, 1)):
        check(case, plain, {"x": part})

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(8, 8)

        def forward(self, x, y):
            return (self.a(x).tanh() * y).square().mean()

    model = Two()
    two = plan(model, (x, x), budget_gb=1, dynamic=True)
    two.apply()
    for a, b in ((x, x), (x[:5], x[:5].clone()), (x[:3], x[:3])):
        theirs = torch.autograd.grad((model.a(a).tanh() * b).square().mean(), model.a.weight)[0]
        model.zero_grad()
        model(a, b).backward()
        assert torch.equal(model.a.weight.grad, theirs)


@pytest.mark.thorough
def test_a_larger_batch_warns_once_and_is_planned_within_the_budget_or_refused(tmp_path):
    case = case_of(Net(), torch.randn(4, 16, 8))
    p, plain = planned(case, 0.9, dynamic=True)
    larger = torch.randn(4, 18, 8)
    with pytest.warns(PlanWarning, match=r"dimension 1 of batch\['x'\] is 18, planned for 16") as warned:
        check(case, plain, {"x": larger})
    assert len(warned) == 1
    assert applied_plan(case.model) is not p
    peak = held_before(case_of(case.model, larger)) + step_peak(case_of(case.model, larger), tmp_path)
    assert peak <= p.budget_bytes
    with pytest.raises(InfeasibleBudgetError, match="too small"):
        case.model(x=torch.randn(64, 64, 8))
    check(case, plain, {"x": torch.randn(3, 16, 8)})


def test_without_a_batch_the_first_is_the_largest():
    model = Net()
    plan(model, budget_gb=1, dynamic=True).apply()
    model(torch.randn(8, 32, 8)).backward()
    first = applied_plan(model)
    model(torch.randn(7, 30, 8)).backward()
    assert applied_plan(model) is first


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_smaller_last_batch_takes_the_schedule_and_no_solver(dynamic, tmp_path, monkeypatch):
    case = case_of(Net(), torch.randn(8, 32, 8))
    p, plain = planned(case, 0.8, dynamic=dynamic)

    def refuse(*_, **__):
        raise AssertionError("solved anew")

    monkeypatch.setattr(planner.planning.solution, "solve", refuse)
    last = {"x": torch.randn(7, 32, 8)}
    check(case, plain, last)
    assert held_before(case) + step_peak(Case(case.model, last, case.loss_fn), tmp_path) <= p.budget_bytes
    used = applied_plan(case.model)
    assert used is p if dynamic else (used.peak_bytes < p.peak_bytes and "another size" in used.note)


@pytest.mark.parametrize(
    ("dynamic", "says"),
    [
        ("yes", "must be True"),
        ({"x": 3}, "must be True"),
        ({"x": {-1: 3}}, "must be True"),
        ({"y": {0: 9}}, "'y', which is no tensor of the batch; these are: 'x'"),
        ({"x": {0: 3}}, "shape \\(4, 16, 8\\)"),
        ({"x": {3: 9}}, "shape \\(4, 16, 8\\)"),
    ],
)
def test_a_dynamic_that_does_not_suit_is_refused(dynamic, says):
    with pytest.raises(OptionError, match=says):
        plan(Net(), {"x": torch.randn(4, 16, 8)}, budget_gb=1, dynamic=dynamic)


def test_a_size_that_only_some_of_its_tensors_name():
    class Paired(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x, target):
            return (self.layer(x) - target).square().mean()

    model, x = Paired(), torch.randn(8, 8)
    plan(model, (x, x), budget_gb=1, dynamic={0: {0: 8}}, progress=False).apply()
    with pytest.warns(PlanWarning, match="every tensor that shares a size"):
        model(x[:5], x[:5]).backward()
    expected = torch.autograd.grad((model.layer(x[:5]) - x[:5]).square().mean(), list(model.parameters()))
    assert all(map(torch.equal, (p.grad for p in model.parameters()), expected))


def test_expressions_that_grow_with_every_size():
    a, b = sympy.symbols("a b", integer=True, positive=True)
    expressions = [
        a, a * b, 4 * a * (FloorDiv(b - 1, 2) + 1), Max(a, b) + 3, FloorDiv(a * b + 5, 3) * b, a**2,
        a - b, 7 - a, Mod(a, 4), FloorDiv(9, a), FloorDiv(a, b), -a * b, Max(3, 5 - a),
    ]  # fmt: skip
    known = [e for e in expressions if grows(e)]
    assert known == expressions[:6]
    draw = random.Random(0)
    for e, _ in itertools.product(known, range(50)):
        x, y = draw.randint(1, 40), draw.randint(1, 40)
        value = e.subs({a: x, b: y})
        assert e.subs({a: x + 1, b: y}) >= value
        assert e.subs({a: x, b: y + 1}) >= value


@pytest.mark.compat
def test_sizes_read_off_activations_do_not_keep_tensors_alive(tmp_path):
    """They are computed from the inputs' sizes; the peak is as predicted."""

    class Sizes(Net):
        def forward(self, x):
            y = self.embed(x)
            for block in self.blocks:
                y = y + block(y) / y.flatten(0, 1).shape[0]
            return F.pad(y, (0, 0, 0, y.shape[1])).square().mean() * y.shape[0]

    case = case_of(Sizes(), torch.randn(8, 32, 8))
    p, plain = planned(case, 0.8, dynamic=True)
    check(case, plain, case.batch)
    check(case, plain, {"x": torch.randn(5, 30, 8)})
    assert held_before(case) + step_peak(case, tmp_path) == pytest.approx(p.peak_bytes, rel=0.02)
    assert applied_plan(case.model) is p
