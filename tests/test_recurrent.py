"""Recurrent layers: by the kernels of eager mode, or step by step of the sequence; measured, as eager."""

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from planner import CaptureError, plan

from .measure import held_before, results, step_peak
from .plans import leanest
from .real_models import Case

pytestmark = pytest.mark.usefixtures("short_searches")

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


MODELS = {
    "LSTM": lambda: Recurrent(nn.LSTM, num_layers=2),
    "both ways, projected": lambda: Recurrent(nn.LSTM, bidirectional=True, proj_size=8),
    "GRU": lambda: Recurrent(nn.GRU),
    "RNN": lambda: Recurrent(nn.RNN, nonlinearity="relu"),
    "LSTMCell": lambda: Cell(nn.LSTMCell),
    "GRUCell": lambda: Cell(nn.GRUCell),
}


@pytest.mark.parametrize("name", MODELS)
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


@pytest.mark.parametrize("options", [{"num_layers": 2, "dropout": 0.2}, {"bidirectional": True}, {"bias": False}])
def test_an_lstm_runs_by_the_kernel_of_eager_mode(options, tmp_path):
    case = case_of(Recurrent(nn.LSTM, **options))
    eager, peak = results(case), held_before(case) + step_peak(case, tmp_path)
    full = plan(case.model, case.batch, budget_gb=1)
    (graphs,) = full.graph_modules
    nodes = [n for graph in (graphs.forward, graphs.backward) for n in graph.graph.nodes]
    calls = [n for n in nodes if "mkldnn" in str(n.target)]
    layers = options.get("num_layers", 1) * (1 + options.get("bidirectional", False))
    assert len(calls) == 2 * layers  # however long the sequence is
    assert full.eager_peak_bytes == pytest.approx(peak, rel=0.001)
    for p in (full, leanest(full, solver="chen")):
        p.apply()
        ours, measured = results(case), held_before(case) + step_peak(case, tmp_path)
        p.remove()
        assert all(torch.equal(ours[key], value) for key, value in eager.items())
        assert measured == pytest.approx(p.peak_bytes, rel=0.001)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_dropout_between_layers_is_drawn_once_and_as_without_a_plan(kind):
    case = case_of(Recurrent(kind, num_layers=3, dropout=0.2))
    eager = results(case)
    full = plan(case.model, case.batch, budget_gb=1)
    full.apply()
    expected = results(case)
    full.remove()
    leanest(full, solver="chen").apply()
    ours = results(case)
    assert all(torch.equal(ours[key], value) for key, value in expected.items())
    for key, value in eager.items():
        torch.testing.assert_close(ours[key], value, msg=lambda m, key=key: f"{key}: {m}")


def test_packed_sequences_are_refused_in_words():
    case = case_of(Packed(nn.LSTM))
    with pytest.raises(CaptureError, match=r"pack_padded_sequence\(\).*test_recurrent"):
        plan(case.model, case.batch, budget_gb=1)
