"""Progress is shown where it is wanted, and an interruption leaves everything as it was."""

import copy
import functools
import gc
import io
import random
import sys

import numpy as np
import pytest
import torch
from torch import nn
from tqdm import tqdm

import planner.api.front
import planner.eager.pipeline
import planner.planning.pipeline
import planner.planning.record
import solvers.search.annealing
from planner import Plan, applied_plan, max_batch, pareto, plan
from planner.runtime import regions as run
from planner.runtime.interception import attached

from .variants import more

pytestmark = pytest.mark.usefixtures("short_searches")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.BatchNorm1d(64), nn.Dropout(0.1)) for _ in range(3)
        )

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


def loss(output):
    return output


@pytest.fixture
def step():
    return Net().train(), torch.randn(512, 64)


TIGHT = {"budget_gb": 0.00125, "loss_fn": loss, "time_limit": 0.2}


@pytest.fixture
def at_once(monkeypatch):
    """Bars are drawn from the start, and anew at each step of theirs: what is shown hangs on no clock."""
    monkeypatch.setattr("solvers.progress.DELAY", 0.0)
    monkeypatch.setattr("solvers.progress.tqdm", functools.partial(tqdm, mininterval=0, miniters=1))


def stages(model, x, progress):
    p = plan(model, x, progress=progress, costs="roofline", **TIGHT)
    yield "plan", p
    p.apply()
    model(x).backward()
    yield "step", p
    p.remove()
    yield "eager", plan(model, x, progress=progress, mode="eager", budget_gb=0.002, loss_fn=loss)
    options = {"loss_fn": loss, "time_limit": 0.2, "progress": progress}
    yield "pareto", pareto(model, x, points=3, **options)
    yield "max_batch", max_batch(model, lambda n: x[: 16 * n], budget_gb=0.002, most=2, **options)


EXPECTED = {
    "plan": ["capturing", "1 graphs", "solving"],
    "step": ["compiling", "/1"],
    "eager": ["planning", "steps traced"],
    "pareto": ["solving", "writing plans", "/3"],
    "max_batch": ["max_batch: n = 2"],
}


@pytest.mark.thorough
def test_every_stage_says_what_it_does_and_how_far_it_is(step, at_once, capfd):
    shown = {}
    for name, _ in stages(*step, True):
        captured = capfd.readouterr()
        assert captured.out == ""
        shown[name] = captured.err
    for name, words in EXPECTED.items():
        for word in words:
            assert word in shown[name], (name, word, shown[name][-500:])


@pytest.mark.parametrize("progress", [*more(False), None])
def test_nothing_is_shown_where_nobody_watches_or_it_is_not_wanted(progress, step, at_once, capfd):
    for _ in stages(*step, progress):
        pass
    assert capfd.readouterr() == ("", "")


def test_a_plan_of_the_first_step_shows_its_progress_in_a_terminal(step, at_once, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    model, x = step
    monkeypatch.setattr("sys.stderr", Terminal())
    plan(model, costs="roofline", **TIGHT).apply()
    model(x).backward()
    shown = sys.stderr.getvalue()
    assert all(word in shown for word in ("capturing", "solving", "compiling"))


def interrupted(*_, **__):
    raise KeyboardInterrupt


def state(model):
    attributes = {name: dict(vars(m)) for name, m in model.named_modules()}
    tensors = {name: t.clone() for name, t in model.state_dict().items()}
    return attributes, tensors, torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()


def unchanged(model, before):
    attributes, tensors, *generators = state(model)
    assert all(torch.equal(t, before[1][name]) for name, t in tensors.items())
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(generators[0], before[2])
    assert tuple(generators[1:]) == before[3:]
    for name, own in attributes.items():
        assert own.keys() == before[0][name].keys()


PLACES = [
    (planner.planning.pipeline, "keep_everything", {}),
    (planner.planning.pipeline, "estimate", {}),
    (planner.planning.pipeline, "split_by_region", {}),
    (planner.planning.record, "planned_timeline", {}),
    (solvers.search.annealing, "machine_code", {"solver": "auto"}),
    (planner.eager.pipeline, "trace_step", {"mode": "eager", "budget_gb": 0.002}),
    (planner.eager.pipeline, "search", {"mode": "eager", "budget_gb": 0.002}),
]


@pytest.mark.parametrize(("module", "name", "options"), PLACES, ids=[name for _, name, _ in PLACES])
def test_an_interruption_while_planning_leaves_everything_as_it_was(module, name, options, step, monkeypatch):
    model, x = step
    before = state(model)
    settings = torch._dynamo.config.recompile_limit
    monkeypatch.setattr(module, name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        plan(model, x, **{**TIGHT, **options})
    monkeypatch.undo()
    unchanged(model, before)
    assert torch._dynamo.config.recompile_limit == settings
    assert gc.isenabled()
    assert not torch.is_inference_mode_enabled()
    assert torch.is_grad_enabled()


def test_graphs_are_emitted_when_asked_for_and_may_be_interrupted(step, monkeypatch):
    model, x = step
    before = state(model)
    monkeypatch.setattr(planner.planning.pipeline, "emit", interrupted)
    p = plan(model, x, **TIGHT)
    with pytest.raises(KeyboardInterrupt):
        p.graph_modules  # noqa: B018
    monkeypatch.undo()
    unchanged(model, before)
    (emitted,) = p.graph_modules
    assert p.graph_modules[0] is emitted
    assert emitted.backward.graph.output_node()


@pytest.mark.parametrize("from_file", [False, True])
def test_a_first_step_that_is_interrupted_runs_by_the_plan_the_next_time(from_file, step, tmp_path, monkeypatch):
    model, x = step
    plain = copy.deepcopy(model)
    p = plan(model, x, **TIGHT)
    if from_file:
        p.save(tmp_path / "plan.json")
        p = Plan.load(tmp_path / "plan.json", loss)
    p.apply(model)
    attached(model).unwatch()  # as the first call does
    before = state(model)
    monkeypatch.setattr(run, "emit_planned", interrupted)
    with pytest.raises(KeyboardInterrupt):
        model(x)
    monkeypatch.undo()
    unchanged(model, before)
    random_state = torch.get_rng_state()
    model(x).backward()
    torch.set_rng_state(random_state)
    plain(x).backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
    assert applied_plan(model).peak_bytes == p.peak_bytes
    assert model._compiled_call_impl.regions.ran == 1
