"""Everything that a training step takes, optimizer and all, at five budgets: predicted against measured."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from planner import applied_plan, pareto

from .measure import held_before, peak_of
from .real_models import SMALL, Case, gpt2, llama, unet
from .variants import keeping

pytestmark = pytest.mark.usefixtures("short_searches")

MiB = 2**20


@dataclass
class Setting:
    """How a model is trained."""

    make: Callable[[], Case]
    optimizer: Callable[[Any], torch.optim.Optimizer] = torch.optim.AdamW
    autocast: bool = False
    microbatches: int = 1


class Convolutions(nn.Module):
    """BatchNorm after every convolution, a skip around each pair, a loss outside the model."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3, padding=1)
        self.pairs = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(inplace=True),
                nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32),
            )
            for _ in range(4)
        )  # fmt: skip
        self.head = nn.Linear(32, 10)

    def forward(self, pixels):
        x = self.stem(pixels)
        for pair in self.pairs:
            x = torch.relu(x + pair(x))
        return self.head(x.mean((2, 3)))


def convolutions() -> Case:
    labels = torch.arange(8) % 10
    return Case(
        Convolutions().train(),
        {"pixels": torch.randn(8, 3, 32, 32)},
        lambda output: nn.functional.cross_entropy(output, labels),
    )


def attention_dropout() -> Case:
    config = transformers.BertConfig(
        num_hidden_layers=1, hidden_size=128, num_attention_heads=4, intermediate_size=256, vocab_size=300,
        attention_probs_dropout_prob=0.2, hidden_dropout_prob=0.0, num_labels=3,
    )  # fmt: skip
    ids = torch.randint(0, 300, (8, 64))
    model = transformers.BertForSequenceClassification(config).train()
    return Case(model, {"input_ids": ids, "labels": torch.arange(8) % 3})


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)


def foreach(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, foreach=True)


# of one layer, or two stages of a block: a prediction is as exact or not at any depth
SETTINGS = {
    "gpt2": Setting(partial(gpt2, layers=1), foreach),
    "llama": Setting(partial(llama, layers=1), torch.optim.Adafactor),
    "resnet": Setting(SMALL["resnet50"], momentum),
    "unet": Setting(partial(unet, channels=(32,), middle=False)),
    "batch norm": Setting(convolutions, momentum),
    "attention dropout": Setting(attention_dropout),
    "bf16 autocast": Setting(partial(gpt2, layers=1), autocast=True),
    "gradient accumulation": Setting(partial(gpt2, layers=1), microbatches=3),
}


def train_step(case: Case, setting: Setting, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(setting.microbatches):
        with autocast(setting):
            output = case.model(**case.batch)
            loss = case.loss(output)
        loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def autocast(setting: Setting) -> Any:
    return torch.autocast("cpu", torch.bfloat16) if setting.autocast else contextlib.nullcontext()


@pytest.mark.parametrize("name", keeping("gpt2", of=SETTINGS))
def test_a_whole_training_step_peaks_as_predicted_at_five_budgets(name, tmp_path):
    setting = SETTINGS[name]
    case = setting.make()
    optimizer = setting.optimizer(case.model.parameters())
    with autocast(setting):
        plans = pareto(
            case.model, case.batch, points=6, loss_fn=case.loss_fn, optimizer=optimizer,
            accumulate=setting.microbatches > 1,
        )  # fmt: skip
    distinct = {p.peak_bytes: p for p in plans}  # a short search may find the same at two budgets
    assert len(distinct) >= 5
    for p in distinct.values():
        p.apply()
        for _ in range(2):  # compile, and give the optimizer its state; some models change their config when called
            train_step(case, setting, optimizer)
        state = sum(t.nbytes for s in optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor))
        step = peak_of(lambda: train_step(case, setting, optimizer), tmp_path)
        planned = applied_plan(case.model)  # for what the first step has shown
        p.remove()
        measured = held_before(case) + state + step
        assert measured <= p.budget_bytes
        assert measured <= planned.peak_bytes + MiB
        assert measured == pytest.approx(planned.peak_bytes, rel=0.01), f"{p.overhead:.1%} {dict(p.account)}"
