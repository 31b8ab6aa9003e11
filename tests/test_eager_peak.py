"""The step without a plan: what it takes in eager mode, and that a plan with room to spare takes no more."""

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

from planner import applied_plan, compare, plan
from planner.codegen.emit import keep_everything
from planner.planning.pipeline import graph_of

from .measure import held_before, results, step_peak
from .plans import changed
from .real_models import Case, gpt2, resnet50, tokens
from .variants import keeping, more

pytestmark = pytest.mark.usefixtures("short_searches", "always_compiled")


def squared(output):
    return output.square().mean()


def case_of(model, *shape):
    return Case(model.train(), {"input": torch.randn(*shape)}, squared)


class Autocast(nn.Module):
    def __init__(self, case):
        super().__init__()
        self.model = case.model

    def forward(self, **batch):
        with torch.autocast("cpu", torch.bfloat16):
            return self.model(**batch)


def autocast(case):
    return Case(Autocast(case), case.batch, case.loss_fn)


def mamba():
    config = transformers.MambaConfig(
        hidden_size=32, num_hidden_layers=1, vocab_size=100, state_size=8, use_cache=False
    )
    return Case(transformers.MambaForCausalLM(config).train(), tokens(100, 2, 12))


def t5():
    config = transformers.T5Config(
        d_model=32, d_kv=8, d_ff=128, num_layers=1, num_decoder_layers=1, num_heads=4, vocab_size=100, use_cache=False,
        decoder_start_token_id=0,
    )  # fmt: skip
    return Case(transformers.T5ForConditionalGeneration(config).train(), tokens(100, 2, 32))


class UNet(nn.Module):
    """Group norms, SiLU, a skip connection, and upsampling."""

    def __init__(self, mode):
        super().__init__()
        self.mode = mode
        self.convolutions = nn.ModuleList(nn.Conv2d(n, 16, 3, padding=1) for n in (3, 16, 32))
        self.norms = nn.ModuleList(nn.GroupNorm(4, 16) for _ in range(3))

    def forward(self, input):
        def block(at, x):
            return F.silu(self.norms[at](self.convolutions[at](x)))

        fine = block(0, input)
        coarse = block(1, F.max_pool2d(fine, 2))
        return block(2, torch.cat([fine, F.interpolate(coarse, scale_factor=2, mode=self.mode)], 1))


class Steps(nn.Module):
    """A cell that runs step by step, of which autograd adds up a gradient as large as the sequence for each step."""

    def __init__(self):
        super().__init__()
        self.first, self.cell, self.last = nn.Linear(8, 32), nn.GRUCell(32, 32), nn.Linear(32, 4)

    def forward(self, input):
        x, state, states = self.first(input), None, []
        for t in range(x.shape[1]):
            state = self.cell(x[:, t], state)
            states.append(state)
        return self.last(torch.stack(states, 1))


class OneOutput(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def forward(self, input):
        return self.layers(input)[0]


def perceptron():
    return case_of(nn.Sequential(nn.Linear(64, 256), nn.LayerNorm(256), nn.GELU(), nn.Linear(256, 16)), 64, 64)


def dropouts():
    return case_of(nn.Sequential(*[m for _ in range(3) for m in (nn.Linear(64, 64), nn.Dropout(0.2))]), 64, 64)


CASES = {
    "GPT-2": lambda: gpt2(layers=1),
    "GPT-2 in bf16": lambda: autocast(gpt2(layers=1)),
    "ResNet": lambda: resnet50(1, (1, 1)),
    "T5": t5,
    "Mamba": mamba,
    "perceptron": perceptron,
    "dropouts": dropouts,
    "bicubic": lambda: case_of(UNet("bicubic"), 2, 3, 16, 16),
    "LSTM": lambda: case_of(OneOutput(nn.LSTM(32, 64, 2, batch_first=True)), 16, 12, 32),
    "steps": lambda: case_of(Steps(), 8, 8, 8),
}


@pytest.mark.parametrize("name", keeping("GPT-2", "ResNet", "perceptron", "dropouts", "LSTM", of=CASES))
def test_a_plan_with_room_to_spare_peaks_no_higher_than_eager_mode(name, tmp_path):
    case = CASES[name]()
    before = held_before(case)
    eager = step_peak(case, tmp_path) + before
    p = plan(case.model, case.batch, budget_gb=1, loss_fn=case.loss_fn, progress=False)
    assert p.eager_peak_bytes == pytest.approx(eager, rel=0.01)
    p.apply()
    measured = step_peak(case, tmp_path) + before
    assert measured <= 1.01 * eager
    assert measured == pytest.approx(applied_plan(case.model).peak_bytes, rel=0.01)
    assert p.overhead < 0.06


@pytest.mark.parametrize("name", ["bicubic", *more("steps")])
def test_what_eager_mode_computes_is_computed(name):
    case = CASES[name]()
    eager = results(case)
    plan(case.model, case.batch, budget_gb=1, loss_fn=case.loss_fn, progress=False).apply()
    planned = results(case)
    if name != "steps":  # cells are captured as other ops than eager mode's fused ones
        assert all(torch.equal(planned[key], eager[key]) for key in eager)
    torch.testing.assert_close(planned, eager)


class Branches(nn.Module):
    """What autograd adds up is as large as all that is saved."""

    def forward(self, x):
        wide = x.expand(16, -1) * 2
        return (wide.exp() + wide.sin() + wide.tanh() + wide * 3 + wide.view(-1).cos().view(16, -1)).square().mean()


class Leaf(Branches):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2048))

    def forward(self, x):
        return super().forward(self.weight * x)


def test_gradients_are_added_in_place(tmp_path):
    case = Case(Leaf(), {"x": torch.ones(2048)}, lambda loss: loss)
    eager_peak, eager = step_peak(case, tmp_path) + held_before(case), results(case)
    p = plan(case.model, case.batch, budget_gb=1, progress=False)
    assert p.baseline_peak_bytes <= eager_peak
    (region,) = graph_of(p.request).regions
    code = keep_everything(region)[1].code
    assert code.count("aten.add_.Tensor") == 4
    assert "aten.add.Tensor" not in code
    p.apply()
    planned = results(case)
    assert all(torch.equal(planned[key], eager[key]) for key in eager)


class Returned(nn.Module):
    """Gradients that are added up are read again, or returned: the sum has no place in them."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64))

    def forward(self, x, y):
        a = self.weight * x
        b = a * y
        return (a.exp() * b + b).square().mean()


def test_no_gradient_that_is_still_needed_is_written_into():
    def run(model):
        x, y = (torch.randn(64, 64, generator=torch.Generator().manual_seed(s)).requires_grad_() for s in (1, 2))
        loss = model(x, y)
        model.zero_grad()
        loss.backward()
        return x.grad, y.grad, model.weight.grad.clone()

    model = Returned()
    eager = run(model)
    batch = tuple(torch.randn(64, 64, requires_grad=True) for _ in range(2))
    tight = plan(model, batch, budget_gb="100%", progress=False).baseline_peak_bytes
    for budget in (tight, 0.95 * tight):
        p = plan(model, batch, budget_gb=budget / 2**30, progress=False)
        p.apply()
        assert all(map(torch.equal, run(model), eager))
        p.remove()


def test_an_lstm_reads_the_batch_itself():
    """Torch would have oneDNN's kernel run it in the way that saves nothing for the backward pass."""
    case = CASES["LSTM"]()
    eager = results(case)
    plan(case.model, case.batch, budget_gb=1, loss_fn=case.loss_fn, progress=False).apply()
    torch.testing.assert_close(results(case), eager)


def test_both_peaks_are_shown():
    case = perceptron()
    p, q = (
        plan(case.model, case.batch, budget_gb=1, loss_fn=case.loss_fn, progress=False, mode=mode)
        for mode in ("aten", "eager")
    )
    assert q.eager_peak_bytes == q.baseline_peak_bytes
    p = changed(p, eager_peak_bytes=q.baseline_peak_bytes + 2**30)
    text = " ".join(str(p).split())
    assert "Without a plan: 1.00 GB (eager mode), " in text
    assert "with everything kept" in text
    assert "(eager mode)" in p.to_html()
    assert "eager, without a plan" in {fact.name for fact in compare(p, q).facts}
    assert "eager mode" not in str(changed(p, eager_peak_bytes=None))


def test_what_cannot_be_traced_has_no_peak_in_eager_mode():
    case = perceptron()
    p = plan(case.model, case.batch, budget_gb=1, loss_fn=case.loss_fn, progress=False, in_flight=2)
    assert p.eager_peak_bytes is None
