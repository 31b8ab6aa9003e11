"""Recurrent layers: by the kernels of eager mode, or step by step of the sequence; measured, as eager."""

import copy
import itertools
import pickle
from functools import partial

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.nn.utils.parametrizations import spectral_norm
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from planner import CaptureError, InfeasibleBudgetError, Plan, applied_plan, plan
from planner.capture.trace.recurrent import recurrent_layer
from planner.eager.pipeline import cudnn_would_draw
from planner.planning import pipeline

from .measure import held_before, peak_of, results, step_peak
from .plans import leanest
from .real_models import Case
from .variants import keeping, more

pytestmark = pytest.mark.usefixtures("short_searches", "always_compiled")

STEPS = 4


class Recurrent(nn.Module):
    def __init__(self, kind, **options):
        super().__init__()
        self.first, self.layers = nn.Linear(16, 32), kind(32, 32, batch_first=True, **options)
        self.last = nn.LazyLinear(16)
        self(torch.zeros(1, 1, 16))

    def forward(self, x):
        y, _ = self.layers(self.first(x))
        return self.last(torch.tanh(y)).square().mean()


class Cell(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.cell, self.last = kind(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        state, outputs = None, []
        for t in range(x.shape[1]):
            state = self.cell(x[:, t], state)
            outputs.append(self.last(state[0] if isinstance(state, tuple) else state))
        return torch.stack(outputs).square().mean()


class Packed(Recurrent):
    def forward(self, x):
        lengths = torch.full((x.shape[0],), x.shape[1])
        y, _ = self.layers(pack_padded_sequence(self.first(x), lengths, batch_first=True))
        return self.last(pad_packed_sequence(y, batch_first=True)[0]).square().mean()


def case_of(model):
    return Case(model, {"x": torch.randn(32, STEPS, 16)}, lambda loss: loss)


def whole_only(monkeypatch):
    """LSTMs run whole, also where that does not fit."""
    monkeypatch.setattr(pipeline, "has_whole_rnn", lambda region: False)


MODELS = {
    "LSTM": lambda: Recurrent(nn.LSTM, num_layers=2),
    "both ways, projected": lambda: Recurrent(nn.LSTM, bidirectional=True, proj_size=8),
    "GRU": lambda: Recurrent(nn.GRU),
    "RNN": lambda: Recurrent(nn.RNN, nonlinearity="relu"),
    "LSTMCell": lambda: Cell(nn.LSTMCell),
    "GRUCell": lambda: Cell(nn.GRUCell),
}


@pytest.mark.parametrize("name", keeping("LSTM", "GRU", "GRUCell", of=MODELS))
def test_recurrent_layers_train_as_before_within_the_budget(name, tmp_path):
    case = case_of(MODELS[name]())
    eager = results(case)
    p = leanest(plan(case.model, case.batch, budget_gb=1, solver="chen"))
    assert p.overhead > 0
    assert len(p.graph_modules) == 1
    p.apply()
    ours, measured = results(case), held_before(case) + step_peak(case, tmp_path)
    for key, value in eager.items():
        torch.testing.assert_close(ours[key], value, msg=lambda m, key=key: f"{key}: {m}")
    assert measured <= p.budget_bytes
    assert measured == pytest.approx(p.peak_bytes, rel=0.02)


def trains_with_the_same_bits(case, eager, full, folder):
    """By a plan that keeps everything, and by the leanest; measured as predicted."""
    for p in (full, leanest(full, solver="chen")):
        p.apply()
        ours, measured = results(case), held_before(case) + step_peak(case, folder)
        p.remove()
        assert all(torch.equal(ours[key], value) for key, value in eager.items())
        assert measured == pytest.approx(p.peak_bytes, rel=0.001)


@pytest.mark.parametrize(
    "options", [{"num_layers": 2, "dropout": 0.2}, {"bidirectional": True}, *more({"bias": False})]
)
def test_an_lstm_runs_by_the_kernel_of_eager_mode(options, tmp_path, monkeypatch):
    case = case_of(Recurrent(nn.LSTM, **options))
    eager, peak = results(case), held_before(case) + step_peak(case, tmp_path)
    full = plan(case.model, case.batch, budget_gb=1)
    (graphs,) = full.graph_modules
    nodes = [n for graph in (graphs.forward, graphs.backward) for n in graph.graph.nodes]
    calls = [n for n in nodes if "mkldnn" in str(n.target)]
    layers = options.get("num_layers", 1) * (1 + options.get("bidirectional", False))
    assert len(calls) == 2 * layers  # however long the sequence is
    assert full.eager_peak_bytes == pytest.approx(peak, rel=0.001)
    whole_only(monkeypatch)
    trains_with_the_same_bits(case, eager, full, tmp_path)


KINDS = {
    "gru": nn.GRU,
    "tanh": nn.RNN,
    "relu": partial(nn.RNN, nonlinearity="relu"),
}
WIDTHS = [4, *more(33, 64)]  # states of 33 are not aligned where they lie one behind the other


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, *more(torch.float64)])
@pytest.mark.parametrize("kind", KINDS)
def test_one_op_computes_what_eager_mode_computes_to_the_last_bit(kind, dtype, width):
    for rows, time, bias, used in itertools.product((1, 3), (1, 7), (True, False), ("outputs", "last", "both")):
        layer = KINDS[kind](5, width, bias=bias, bidirectional=True, dtype=dtype)
        x, state = torch.randn(time, rows, 5, dtype=dtype), torch.randn(2, rows, width, dtype=dtype)
        inputs = [x.requires_grad_(), state.requires_grad_(), *layer.parameters()]
        each = len(inputs[2:]) // 2
        ways = [
            recurrent_layer(kind, x, state[n], inputs[2 + n * each :][:each], bias, reverse=bool(n)) for n in range(2)
        ]
        ours = torch.cat([y for y, _ in ways], 2), torch.stack([last for _, last in ways])
        found = []
        for outputs, last in (ours, layer(x, state)):
            weighted = (outputs * torch.linspace(-1, 1, outputs.numel(), dtype=dtype).view_as(outputs)).sum()
            losses = {"outputs": weighted, "last": last.square().sum(), "both": weighted + last.square().sum()}
            found.append([outputs, last, *torch.autograd.grad(losses[used], inputs)])
        assert all(map(torch.equal, *found)), (rows, time, bias, used)


def test_one_op_is_what_torch_expects_of_an_op():
    given = torch.randn(5, 4, 48, requires_grad=True), torch.randn(4, 16), torch.randn(48, 16, requires_grad=True)
    for bias, reverse in ((None, False), (torch.randn(48, requires_grad=True), True)):
        torch.library.opcheck(torch.ops.planner.recurrent_layer.default, (*given, bias, "gru", reverse))


@pytest.mark.compat
@pytest.mark.parametrize("kind", [nn.GRU, *more(nn.RNN)])
def test_layers_run_as_one_op_each_with_the_bits_of_eager_mode(kind, tmp_path, monkeypatch):
    case = long_case(Recurrent(kind, num_layers=2, bidirectional=True))
    eager, peak = results(case), held_before(case) + step_peak(case, tmp_path)
    full = plan(case.model, case.batch, budget_gb=1)
    assert kernels(full) == 4  # however long the sequence is
    assert full.eager_peak_bytes == pytest.approx(peak, rel=0.001)
    assert full.baseline_peak_bytes <= full.eager_peak_bytes
    whole_only(monkeypatch)
    trains_with_the_same_bits(case, eager, full, tmp_path)


@pytest.mark.parametrize("kind", [nn.GRU, *more(nn.RNN)])
def test_one_plan_serves_sequences_of_every_length(kind):
    model, batches = Recurrent(kind), [torch.randn(8, time, 16) for time in (LONG, 5, LONG - 1)]
    parameters = list(model.parameters())
    eager = [torch.autograd.grad(model(x), parameters) for x in batches]
    plan(model, {"x": batches[0]}, budget_gb=1, dynamic={"x": {1: LONG}}).apply()
    p = None
    for x, gradients in zip(batches, eager, strict=True):
        model.zero_grad()
        model(x=x).backward()
        assert all(torch.equal(own.grad, other) for own, other in zip(parameters, gradients, strict=True))
        assert applied_plan(model) is (p := p or applied_plan(model))


@pytest.mark.parametrize("kind", [nn.GRU, *more(nn.LSTM)])
def test_parametrized_weights_are_made_as_often_as_without_a_plan(kind):
    """A spectral norm writes into its vectors whenever a weight is asked for, which Dynamo does of recurrent layers."""
    eager, model = (Recurrent(kind, bias=False) for _ in range(2))
    model.load_state_dict(eager.state_dict())
    for each in (eager, model):
        torch.manual_seed(0)
        spectral_norm(each.layers, "weight_hh_l0")
    with pytest.raises(CaptureError, match="layers is a recurrent layer with parametrized weights"):
        plan(model, torch.randn(8, STEPS, 16), budget_gb=1, mode="aten")
    plan(model, budget_gb=1).apply()
    for _ in range(2):
        x = torch.randn(8, STEPS, 16)
        for each in (eager, model):
            each.zero_grad()
            each(x).backward()
    for ours, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
    assert all(map(torch.equal, model.buffers(), eager.buffers()))


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
def test_a_copy_before_the_first_step_calls_its_own_layers(copied):
    model, x = Recurrent(nn.LSTM), torch.randn(8, STEPS, 16)
    before = model(x)
    plan(model, budget_gb=1).apply()
    other = copied(model)
    assert torch.equal(other(x), before)
    other(x).backward()
    model(x).backward()
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


@pytest.mark.parametrize("kind", [nn.LSTM, *more(nn.GRU)])
def test_dropout_between_layers_is_drawn_once_and_as_without_a_plan(kind, monkeypatch):
    case = case_of(Recurrent(kind, num_layers=3, dropout=0.2))
    eager = results(case)
    full = plan(case.model, case.batch, budget_gb=1)
    full.apply()
    expected = results(case)
    full.remove()
    whole_only(monkeypatch)
    leanest(full, solver="chen").apply()
    ours = results(case)
    assert all(torch.equal(ours[key], value) for key, value in expected.items())
    for key, value in eager.items():
        torch.testing.assert_close(ours[key], value, msg=lambda m, key=key: f"{key}: {m}")


class Tagger(nn.Module):
    """As `Recurrent`, whose forward pass torch.compile takes as two graphs where it is told to."""

    def __init__(self, breaks=False, **options):
        super().__init__()
        self.first, self.second = (nn.LSTM(width, 32, batch_first=True, **options) for width in (16, 32))
        self.last, self.breaks = nn.Linear(32, 8), breaks

    def forward(self, x):
        y, _ = self.first(x)
        if self.breaks:
            torch._dynamo.graph_break()
        return self.last(self.second(y)[0]).square().mean()


LONG = 24


def long_case(model):
    return Case(model, {"x": torch.randn(8, LONG, 16)}, lambda loss: loss)


def whole_and_parts(case):
    """A plan that keeps everything, and one for the least budget that a refusal names."""
    whole = plan(case.model, case.batch, budget_gb=1)
    with pytest.raises(InfeasibleBudgetError) as refused:
        plan(case.model, case.batch, budget_gb=1e-4, solver="chen")
    return whole, plan(case.model, case.batch, budget_gb=refused.value.minimum_gb, solver="chen")


def kernels(p):
    nodes = [n for graphs in p.graph_modules for n in graphs.forward.graph.nodes]
    return sum(str(n.target) in ("aten.mkldnn_rnn_layer.default", "planner.recurrent_layer.default") for n in nodes)


def trains_as(case, eager, p, folder):
    ours, measured = results(case), held_before(case) + step_peak(case, folder)
    for key, value in eager.items():
        torch.testing.assert_close(ours[key], value, msg=lambda m, key=key: f"{key}: {m}")
    assert measured <= p.budget_bytes
    assert measured == pytest.approx(p.peak_bytes, rel=0.01)


OPTIONS = [
    {"kind": nn.GRU},
    {"breaks": True},
    {"bidirectional": True, "proj_size": 0},
    {"num_layers": 3, "dropout": 0.2},
    {"bias": False},
]


@pytest.mark.parametrize("options", keeping(OPTIONS[0], of=OPTIONS), ids=lambda o: next(iter(o)))
def test_layers_run_in_parts_of_their_sequences_where_whole_ones_do_not_fit(options, tmp_path):
    kind = Tagger if "breaks" in options else Recurrent
    case = long_case(Tagger(**options) if kind is Tagger else Recurrent(**{"kind": nn.LSTM} | options))
    eager = results(case)
    whole, p = whole_and_parts(case)
    assert len(p.graph_modules) == len(whole.graph_modules) == 1 + (kind is Tagger)
    assert kernels(p) > kernels(whole)
    assert p.peak_bytes < (0.7 if "kind" in options else 0.5) * whole.peak_bytes  # oneDNN saves more than gates
    assert "in parts of their sequences" in p.note
    assert "in parts of their sequences" not in whole.note
    p.apply()
    trains_as(case, eager, p, tmp_path)
    assert applied_plan(case.model).verify(case.batch).gradients_agree


class Prints(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(32, 32, batch_first=True)

    def forward(self, x):
        y = self.lstm(x)[0]
        print(end="")
        return y


class InGraphsOfTheirOwn(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Prints() for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x[:, -1]


@pytest.mark.parametrize("share", [*more(0.55), 0.75])
def test_what_an_lstm_returns_to_another_graph_is_not_kept_where_the_lstm_runs_again(share):
    model, x = InGraphsOfTheirOwn(), torch.randn(32, 24, 32)
    whole = plan(model, x, budget_gb=1, loss_fn=torch.sum)
    p = plan(model, x, budget_gb=share * whole.baseline_peak_bytes / 2**30, loss_fn=torch.sum)
    assert any(moment.recomputed and "rnn_layer" in moment.op for moment in p.timeline)
    seen = p.verify()
    assert seen.gradients_agree
    assert seen.measured_bytes == pytest.approx(seen.predicted_bytes, rel=0.001)


@pytest.mark.parametrize("breaks", more(False, True))
def test_a_plan_file_made_in_parts_runs_in_parts(breaks, tmp_path):
    case = long_case(Tagger(breaks))
    eager = results(case)
    _, p = whole_and_parts(case)
    p.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    loaded.apply(case.model)
    trains_as(case, eager, p, tmp_path)
    assert applied_plan(case.model).peak_bytes == p.peak_bytes
    assert "Taken from" in plan(case.model, case.batch, budget_gb=p.budget_bytes / 2**30, known=p, solver="chen").note


def test_a_loop_whose_budget_only_parts_fit_has_its_plan_at_the_first_step(tmp_path):
    case = long_case(Tagger())
    eager = results(case)
    _, p = whole_and_parts(case)
    plan(case.model, budget_gb=1.02 * p.budget_bytes / 2**30, solver="chen").apply()
    case.loss(case.model(**case.batch)).backward()
    case.model.zero_grad(set_to_none=True)
    trains_as(case, eager, applied_plan(case.model), tmp_path)
    assert "in parts of their sequences" in applied_plan(case.model).note


def test_calls_of_one_step_are_planned_in_parts_together(tmp_path):
    model = Tagger()
    batches = [torch.randn(8, n, 16) for n in (LONG, LONG // 2)]
    both = Case(model, {}, lambda losses: sum(losses))

    def step():
        sum(model(x) for x in batches).backward()
        gradients = [p.grad for p in model.parameters()]
        model.zero_grad(set_to_none=True)
        return gradients

    eager, peak = step(), peak_of(step, tmp_path)
    held = held_before(both) + sum(x.nbytes for x in batches)
    plan(model, budget_gb=0.45 * (peak + held) / 2**30, solver="chen").apply()
    for _ in range(3):
        ours = step()
    for own, other in zip(ours, eager, strict=True):
        torch.testing.assert_close(own, other)
    measured = peak_of(step, tmp_path) + held
    record = applied_plan(model)
    assert "planned together" in record.note
    assert "in parts of their sequences" in record.note
    assert measured <= record.budget_bytes


@pytest.mark.filterwarnings("error::planner.PlanWarning")
@pytest.mark.parametrize("kind", [nn.LSTM, *more(nn.GRU)])
def test_packed_sequences_are_counted_as_if_they_were_as_long_as_may_be(kind, tmp_path):
    case = case_of(Packed(kind))
    p = leanest(plan(case.model, case.batch, budget_gb=1, solver="chen"))
    assert "Packed sequences" in p.note
    eager = results(case)
    p.apply()
    ours, measured = results(case), held_before(case) + step_peak(case, tmp_path)
    assert all(torch.equal(ours[key], value) for key, value in eager.items())
    assert measured == pytest.approx(p.peak_bytes, rel=0.01)  # all are as long


def test_packed_sequences_are_not_captured_and_words_say_so():
    case = case_of(Packed(nn.LSTM))
    with pytest.raises(CaptureError, match=r"pack_padded_sequence\(\).*test_recurrent"):
        plan(case.model, case.batch, budget_gb=1, mode="aten")


class Chaotic(nn.Module):
    """Makes much of what torch.compile rounds otherwise."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        y = x[:, -1]
        with torch.autocast("cpu"):  # its cache of weights that are cast is eager mode's alone
            for _ in range(3):
                y = torch.sigmoid(self.layer(y))
        for _ in range(40):
            y = 3.9 * y * (1 - y)
        return y.mean()


@pytest.mark.thorough
def test_rounding_that_a_model_makes_much_of_is_no_difference_of_the_plans():
    torch.manual_seed(0)
    seen = plan(Chaotic(), torch.randn(64, 6, 8), budget_gb=1).verify()
    assert seen.gradient_error > 1e-3
    assert seen.plan_error == 0
    assert seen.gradients_agree


def test_cudnns_layers_with_dropout_are_not_traced_on_fakes():
    """cuDNN's state of the dropout is torch's own and made once: a fake one would be that of every later step."""
    for layers, traced in ((nn.LSTM(4, 4, 2, dropout=0.5), False), (nn.LSTM(4, 4, 2), True), (nn.GRU(4, 4), True)):
        assert cudnn_would_draw(nn.Sequential(layers), torch.device("cuda")) is not traced
        assert not cudnn_would_draw(layers, torch.device("cpu"))
        assert not cudnn_would_draw(layers.eval(), torch.device("cuda"))


def test_cudnns_layers_on_fakes_have_gradients_of_every_weight():
    """As `mode="eager"` traces them on a GPU; their bytes are cuDNN's to say, where there is a card."""
    op = torch.ops.aten._cudnn_rnn_backward.default
    with FakeTensorMode(), torch.device("cuda"):
        x, state = torch.empty(8, 20, 16), torch.empty(2, 8, 32)
        weights = [torch.empty(128, 16), torch.empty(128, 32), torch.empty(128), torch.empty(128)] * 2
        rest = (2, 32, 0, 2, True, 0.0, True, False, [], None, x, [True] * 4)
        given, hidden, cell, parts = op(x, weights, 4, x, state, state, x, x, None, None, *rest)
    assert (given.shape, hidden.shape, cell.shape) == (x.shape, state.shape, state.shape)
    assert [g.shape for g in parts] == [w.shape for w in weights]
    assert len({g.untyped_storage()._cdata for g in parts}) == 1
