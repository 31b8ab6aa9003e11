"""Mode "inductor" in loops that go through one graph several times: gradients and peaks against those of eager mode."""

from functools import partial

import pytest
import torch
import torch._inductor.config as inductor_config
from torch import nn

from planner import plan

from .loop_harness import GB, STEPS, Loop, run
from .variants import more

pytestmark = pytest.mark.usefixtures("short_searches")


@pytest.fixture(scope="module", autouse=True)
def _as_the_machine_says():
    """Do not compile a program to see whether this machine's vector instructions work."""
    with inductor_config.patch({"cpp.vec_isa_ok": True}):
        yield


class Residual(nn.Module):
    """A model whose saved tensors Inductor's backward code writes gradients into, where it may."""

    def __init__(self):
        super().__init__()
        self.embedding, self.norm, self.head = nn.Embedding(32, 64), nn.LayerNorm(64), nn.Linear(64, 32)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + nn.functional.gelu(layer(self.norm(x)))
        return self.head(x)


def again(model, output, target, at):
    loss = nn.functional.cross_entropy(output, target)
    loss.backward(retain_graph=True)
    loss.backward()
    return loss


def of_two_losses(model, output, target, at):
    loss = nn.functional.cross_entropy(output, target)
    loss.backward(retain_graph=True)
    output.square().mean().backward()
    return loss


def weighed_by_gradients(model, output, target, at):
    one, other = nn.functional.cross_entropy(output, target), output.square().mean()
    (a,) = torch.autograd.grad(one, model.embedding.weight, retain_graph=True)
    (b,) = torch.autograd.grad(other, model.embedding.weight, retain_graph=True)
    loss = one + (a.norm() / b.norm()).clamp(0, 10) * other
    loss.backward()
    return loss


def late(model, output, target, at):
    if at > 2:
        return again(model, output, target, at)
    loss = nn.functional.cross_entropy(output, target)
    loss.backward()
    return loss


def trained(passes, put, ended):
    model = put(Residual())
    optimizer = torch.optim.AdamW(model.parameters())
    for at in range(STEPS):
        optimizer.zero_grad()
        tokens = torch.randint(32, (1024,))
        loss = passes(model, model(tokens), tokens.roll(1), at)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        optimizer.step()
        ended([loss, norm])


@pytest.mark.parametrize(
    "passes", more(pytest.param(again, marks=pytest.mark.compat), of_two_losses, weighed_by_gradients, late)
)
def test_each_backward_pass_of_a_kept_graph_is_right_and_within_the_budget(passes):
    """Until a loop is known to keep its graph, it is given copies of what Inductor's code writes into: not counted."""
    loop = Loop(partial(trained, passes))
    unplanned = run(loop)
    budget = 0.8 * unplanned.peak
    seen = run(loop, lambda model: plan(model, budget_gb=budget / GB, mode="inductor", progress=False).apply())
    assert seen.losses == pytest.approx(unplanned.losses, rel=1e-4)
    known = slice(-1, None) if passes is late else slice(None)
    assert max(seen.measured[known]) <= min(budget, 1.001 * max(seen.predicted[known]))
