"""Plans of every kind to be drawn, made once."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from planner import Plan, plan

from .plans import for_budget
from .problems import shorten
from .real_models import gpt2

HOSTILE = "<script>alert('1')&\"[" + "x" * 180


class Broken(nn.Module):
    """Three regions."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128)) for _ in range(6)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[1](self.layers[0](x))
        torch._dynamo.graph_break()
        x = self.layers[3](self.layers[2](x))
        torch._dynamo.graph_break()
        return self.layers[5](self.layers[4](x))


class Hostile(nn.Module):
    """Modules of the most awkward names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 128)
        self.add_module(HOSTILE, nn.ModuleList(nn.Sequential(nn.Linear(128, 128), nn.Tanh()) for _ in range(3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in getattr(self, HOSTILE):
            x = layer(x)
        return x


class LongNamed(nn.Module):
    """A GPT-2 under a name as long as some are."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.a_language_model_with_a_rather_long_name_of_its_own = model

    def forward(self, **batch: torch.Tensor) -> Any:
        return self.a_language_model_with_a_rather_long_name_of_its_own(**batch)


@contextmanager
def without_graphviz() -> Iterator[None]:
    """Graphs are drawn as they are where Graphviz is not installed."""
    with patch.object(shutil, "which", lambda name: None):
        yield


def square(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def at(share: float, whole: Plan, **options: Any) -> Plan:
    """A plan with a share of what keeping everything needs beside what is always there."""
    budget = whole.resident_bytes + share * (whole.baseline_peak_bytes - whole.resident_bytes)
    return for_budget(whole, budget / 2**30, **options)


@cache
def pictures() -> dict[str, tuple[Plan, nn.Module]]:
    """Plans by name, with their models, which they do not hold."""
    torch.manual_seed(0)
    case = gpt2(dropout=0.1, layers=3, batch=2)
    model, broken, hostile = LongNamed(case.model), Broken(), Hostile()
    whole = plan(model, case.batch, budget_gb="100%", optimizer="adamw", progress=False)
    three = plan(broken, torch.zeros(256, 128), budget_gb="100%", loss_fn=square, progress=False)
    awkward = plan(hostile, torch.zeros(256, 64), budget_gb="100%", loss_fn=square, progress=False)
    with pytest.MonkeyPatch.context() as short:
        shorten(short)
        return {
            "gpt2": (at(0.4, whole), model),
            "everything kept": (whole, model),
            "eager": (at(0.6, whole, mode="eager"), model),
            "regions": (at(0.6, three), broken),
            "hostile": (at(0.7, awkward), hostile),
        }
