"""What a plan knows of the training loop around its model, and what it holds of it."""

import gc
import weakref

import pytest
import torch
from torch import nn

from planner import OptionError, plan

pytestmark = pytest.mark.usefixtures("short_searches")


def perceptron():
    return nn.Sequential(*[layer for _ in range(3) for layer in (nn.Linear(32, 32), nn.GELU())])


def test_a_plan_keeps_no_batch_alive():
    model = perceptron()
    plan(model, budget_gb=1).apply()
    refs = []
    for _ in range(3):
        batch = torch.randn(16, 32)
        refs.append(weakref.ref(batch.untyped_storage()))
        model(batch).square().mean().backward()
    gc.collect()
    assert [ref() is not None for ref in refs] == [False, False, True]


def test_an_optimizer_is_found_and_one_of_another_model_is_refused():
    model, batch = perceptron(), torch.randn(16, 32)
    optimizer = torch.optim.Adam(model.parameters())
    p = plan(model, batch, budget_gb=1, loss_fn=torch.Tensor.mean)
    assert p.account["optimizer state"] >= 2 * sum(w.nbytes for w in model.parameters())
    with pytest.raises(OptionError, match="trains none"):
        plan(perceptron(), batch, budget_gb=1, loss_fn=torch.Tensor.mean, optimizer=optimizer)
