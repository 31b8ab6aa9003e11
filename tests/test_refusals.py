"""What cannot be captured: the construct in words, the module and the line, what to try; and what can be, after all."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
import transformers
from torch import nn

from planner import CaptureError, InfeasibleBudgetError, plan

from .measure import peak_of
from .variants import more

pytestmark = pytest.mark.usefixtures("short_searches")


class Inner(nn.Module):
    def __init__(self, ask):
        super().__init__()
        self.layer, self.ask = nn.Linear(8, 8), ask

    def forward(self, x):
        return self.ask(self.layer(x))


class Outer(nn.Module):
    def __init__(self, ask):
        super().__init__()
        self.first, self.blocks, self.last = nn.Linear(8, 12), nn.ModuleList([Inner(ask)]), nn.Linear(8, 4)
        self.narrow = nn.Linear(12, 8)

    def forward(self, x):
        return self.last(self.blocks[0](self.narrow(self.first(x)))).square().mean()


def by_item(x):
    return x * 2 if x.sum().item() > 0 else x


def by_if(x):
    if x.sum() > 0:
        x = x * 2
    return x


def by_while(x):
    while x.abs().max() > 1:
        x = x / 2
    return x


def by_list(x):
    return x * sum(x.mean(0).tolist())


def by_numpy(x):
    return x * float(np.mean(x.detach().numpy()))


def dropped_layer(x):
    if torch.rand([]) < 0.5:
        return x.exp()
    return x


def by_index(x):
    return x + x[x > 0].sum()


def by_unique(x):
    return x * torch.unique(x.round()).sum()


def caught(x):
    try:
        return x.view(3, 3)
    except RuntimeError:
        return x.exp()


REFUSED = {  # what is asked, and what the message says of it
    by_item: ".item()",
    by_if: "`if` on a tensor",
    by_while: "`while` on a tensor",
    by_list: ".tolist()",
    by_numpy: "numpy",
    by_index: "an index of booleans",
    by_unique: "torch.unique()",
    caught: "shape '[3, 3]' is invalid",
}
VALUES = by_item, by_if, by_while, by_list, by_index, by_unique  # a model that can run answers


@pytest.mark.parametrize("ask", REFUSED, ids=lambda ask: ask.__name__)
@pytest.mark.filterwarnings("ignore")
def test_a_refusal_names_the_construct_the_module_the_line_and_what_to_try(ask):
    where = "meta" if ask in VALUES else "cpu"
    model = Outer(ask).to(where)
    x, device = torch.randn(16, 8, device=where), "h100" if ask in VALUES else None
    with pytest.raises(CaptureError) as e:
        plan(model, x, budget_gb=1, device=device, mode="aten")
    message = str(e.value)
    assert REFUSED[ask] in message
    assert "blocks.0 (Inner)" in message
    assert any(f"test_refusals.py:{ask.__code__.co_firstlineno + n}: `" in message for n in range(1, 3)), message
    assert "plan " in message
    assert "'first'" in message  # the largest part without it
    assert ('mode="eager"' in message) == (ask is caught)  # where the model runs on fake tensors
    assert model._compiled_call_impl is None


def test_a_refusal_names_the_line_of_torch_that_asks():
    with torch.device("meta"):
        model, x = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, momentum=None)), torch.randn(4, 8)
    with pytest.raises(CaptureError, match=r"in 1 \(BatchNorm1d\).*num_batches_tracked.*plan .*'0'"):
        plan(model, x, budget_gb=1, device="h100")


class Asks(nn.Module):
    """Asks for values of its batch, and of what it makes of it."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x, mask):
        x = self.first(x)
        if not mask.all():
            x = x * mask[:, None]
        places = torch.arange(6)
        places[2] += 4
        if places.sum().item() == 19:
            x = x.exp() * mask.nonzero().shape[0]
        return self.last(x).square().mean()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("padded", [*more(False), True])
def test_values_of_the_batch_are_known_at_planning(padded):
    model, x, mask = Asks(), torch.randn(16, 8), torch.ones(16, dtype=torch.bool)
    mask[3] = not padded
    batch = x.clone(), mask.clone()
    expected = torch.autograd.grad(model(*batch), list(model.parameters()))
    p = plan(model, batch, budget_gb=1)
    assert torch.equal(batch[0], x)
    assert torch.equal(batch[1], mask)
    p.apply()
    loss = model(*batch)
    loss.backward()
    for q, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(q.grad, gradient)


@pytest.fixture
def no_real_call(monkeypatch):
    """Values that the batch and constants do not tell stay unknown."""
    monkeypatch.setattr("planner.capture.trace.data_dependent.Answers.learn", lambda *_: False)


@pytest.mark.usefixtures("no_real_call")
def test_memory_without_values_is_not_known():
    class Uninitialised(Asks):
        def forward(self, x, mask):
            return super().forward(x, mask) * (2 if mask.long().new_empty(16, 2).sum() > 7 else 1)

    with pytest.raises(CaptureError, match="asks for a tensor's value"):
        plan(Uninitialised(), (torch.randn(16, 8), torch.ones(16, dtype=torch.bool)), budget_gb=1, mode="aten")


@pytest.mark.usefixtures("no_real_call")
def test_what_is_written_into_the_batch_is_known_no_more():
    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x):
            y = x.clone()
            y += self.layer(x).detach()
            return self.layer(y).sum() if y.sum() > 0 else self.layer(x).mean()

    model, x = Writes(), torch.randn(4, 8)
    before = x.clone()
    with pytest.raises(CaptureError, match="asks for a tensor's value"):
        plan(model, x, budget_gb=1)
    assert torch.equal(x, before)


def bart(rate):
    config = transformers.BartConfig(
        vocab_size=100, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=32,
        encoder_layerdrop=rate, use_cache=False,
    )  # fmt: skip
    return transformers.BartForConditionalGeneration(config).train()


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("no_real_call")
def test_layers_that_are_dropped_seldom_are_planned_as_kept():
    ids = torch.randint(3, 100, (2, 8))
    kept, dropped = (plan(bart(rate), {"input_ids": ids, "labels": ids}, budget_gb=1) for rate in (0.0, 0.1))
    assert dropped.baseline_peak_bytes == pytest.approx(kept.baseline_peak_bytes, rel=0.1)


class Causal(nn.Module):
    """torch's own layers compare the mask with a causal one."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerDecoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerDecoder(layer, 2)

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.layers(x, x, tgt_mask=mask).square().mean()


def test_masks_of_torchs_transformers():
    model, x = Causal(), torch.randn(2, 8, 16)
    expected = torch.autograd.grad(model(x), list(model.parameters()))
    p = plan(model, x, budget_gb=1)
    assert len(p.graph_modules) == 1
    p.apply()
    model(x).backward()
    for q, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(q.grad, gradient)


def test_constructs_that_need_no_refusal():
    class Fine(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x, *, scale=1.0, **others):
            assert (x > -1e6).all(), "a tensor"
            total = sum(self.layer(x) * i for i in (n for n in range(1, 3)))
            wave = torch.fft.ifft(torch.fft.fft(total)).real
            return (wave * scale * len(others["names"]) * len(f"{x.shape}")).square().mean()

    model, batch = Fine(), {"x": torch.randn(4, 8), "scale": 2.0, "names": ["a", "b"]}
    expected = torch.autograd.grad(model(**batch), list(model.parameters()))
    plan(model, batch, budget_gb=1).apply()
    model(**batch).backward()
    for q, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(q.grad, gradient)


def test_the_size_of_ctc_loss_is_known_by_its_targets(tmp_path):
    class Recogniser(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Sequential(torch.nn.Conv1d(1, 16, 9, 4), torch.nn.GELU(), torch.nn.Conv1d(16, 20, 3))

        def forward(self, sound, said):
            scores = self.net(sound).permute(2, 0, 1).log_softmax(-1)
            lengths = torch.full((len(said),), said.shape[1])
            return torch.nn.functional.ctc_loss(scores, said, torch.full_like(lengths, len(scores)), lengths)

    model, batch = Recogniser(), (torch.randn(4, 1, 200), torch.randint(1, 20, (4, 12)))
    p = plan(model, batch, budget_gb=1)

    def gradients():
        model.zero_grad(set_to_none=True)
        model(*batch).backward()
        return [q.grad.clone() for q in model.parameters()]

    eager = gradients()
    p.apply()
    for _ in range(2):  # the first shows the loop, for which the second may be planned anew
        assert all(map(torch.equal, gradients(), eager))
    model.zero_grad(set_to_none=True)
    assert p.resident_bytes + peak_of(lambda: model(*batch).backward(), tmp_path) <= p.peak_bytes


class Layers(nn.Module):
    """Layers of torch.nn, in a loop with something between them."""

    def __init__(self, between):
        super().__init__()
        self.layers, self.between = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)]), between

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
            self.between(x)
        return x.square().mean()


def printed(x):
    print(end="")


def asked(x):
    if x.sum().item() > 1e9:
        raise ValueError


@pytest.mark.parametrize(
    ("between", "line", "why"), [(printed, 'print(end="")', "`print`"), (asked, "x.sum().item()", "`.item()`")]
)
def test_what_breaks_the_graph_in_a_loop_over_layers_is_named(between, line, why):
    with pytest.raises(CaptureError) as refused:
        plan(Layers(between), torch.randn(4, 8), budget_gb=1, mode="aten")
    said = str(refused.value)
    assert line in said
    assert why in said
    assert f"{__file__}:{between.__code__.co_firstlineno + 1}" in said
    assert "torch.compiler.disable" not in said


class Noisy(nn.Module):
    """Draws from a generator of its own."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)
        self.generators = [torch.Generator().manual_seed(3)]

    def forward(self, x):
        noise = torch.rand(x.shape, generator=self.generators[0])
        return x + self.b((self.a(x) * noise).tanh()).tanh()


@pytest.mark.parametrize("mode", ["aten", "eager"])
def test_a_generator_of_the_models_own_is_planned_around(mode):
    model, x = nn.Sequential(*[Noisy() for _ in range(4)]), torch.randn(512, 64)

    def step():
        model.zero_grad()
        for noisy in model:
            noisy.generators[0].manual_seed(3)
        model(x).square().mean().backward()
        return [p.grad for p in model.parameters()] + [noisy.generators[0].get_state() for noisy in model]

    expected = step()
    options = {"loss_fn": lambda output: output.square().mean(), "mode": mode}
    try:
        p = plan(model, x, budget_gb=0.002, **options)
    except InfeasibleBudgetError as e:
        p = plan(model, x, budget_gb=e.minimum_gb, **options)
    assert torch.equal(model[0].generators[0].get_state(), expected[-1])
    p.apply()
    assert all(map(torch.equal, step(), expected))


@dataclass
class Answer:
    logits: torch.Tensor
    loss: torch.Tensor


class Answers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        logits = self.layer(x).tanh()
        return [Answer(logits, logits.square().mean())]


def test_a_dataclass_in_the_output_is_looked_into():
    model, x = Answers(), torch.randn(4, 8)
    (gradient,) = torch.autograd.grad(model(x)[0].loss, model.layer.weight)
    plan(model, x, budget_gb=1, loss_fn=lambda output: output[0].loss).apply()
    model(x)[0].loss.backward()
    assert torch.equal(model.layer.weight.grad, gradient)


class Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize("with_batch", [True, False], ids=["batch", "first step"])
@pytest.mark.parametrize(
    ("x", "words"),
    [
        (torch.nested.nested_tensor([torch.randn(3, 8), torch.randn(5, 8)]), "nested tensor"),
        (torch.nested.nested_tensor([torch.randn(3, 8), torch.randn(5, 8)], layout=torch.jagged), "nested tensor"),
        (torch.eye(8).to_sparse(), r"sparse tensor \(torch.sparse_coo\)"),
        (torch.eye(8).to_sparse_csr(), r"sparse tensor \(torch.sparse_csr\)"),
        (torch.randn(4, 8).as_subclass(Subclass), r"Subclass.*as_subclass\(torch.Tensor\)"),
    ],
    ids=["nested", "jagged", "sparse", "rows", "subclass"],
)
def test_tensors_that_no_plan_can_be_made_for_are_named(x, words, with_batch):
    model = nn.Linear(8, 8)
    given = (x,) if with_batch else ()
    with pytest.raises(CaptureError, match=rf"\[0\] of the batch.*{words}"):
        plan(model, *given, budget_gb=1).apply()(x)


def test_a_subclass_among_the_parameters_is_named():
    model = nn.Linear(8, 8)
    model.weight = nn.Parameter(torch.randn(8, 8).as_subclass(Subclass))
    with pytest.raises(CaptureError, match=r"parameter weight.*Subclass"):
        plan(model, torch.randn(4, 8), budget_gb=1)


class InRows(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))

    def forward(self, x):
        rows = torch.nested.nested_tensor([x[0], x[1, :5]], layout=torch.jagged)
        return self.layers(rows).values().square().sum()


def test_a_nested_tensor_made_within_the_model_is_planned_where_it_is_compiled():
    model, x = InRows(), torch.randn(2, 8, 16)
    assert plan(model, x, budget_gb=1).verify().gradients_agree
    with pytest.raises(CaptureError, match="nested tensor"):
        plan(model, x, budget_gb=1, mode="eager")


class Reassigning(nn.Linear):
    def forward(self, x):
        self.weight.data = self.weight.data * 1.0
        return super().forward(x)


def test_a_parameter_whose_data_a_forward_pass_assigns_is_refused_in_words():
    with pytest.raises(CaptureError, match=r"another storage \(`.data =`, `set_`\)\. Do that elsewhere, or plan mode"):
        plan(Reassigning(8, 8), torch.randn(4, 8), budget_gb=1, mode="aten")
