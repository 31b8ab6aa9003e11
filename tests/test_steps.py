"""A model that a loop trains by its methods, or by modules in it, has one plan for all calls of a step."""

import copy
import gc
import io
import warnings

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensor
from torch.nn import functional as F

from planner import ApplyError, InfeasibleBudgetError, PlanWarning, applied_plan, plan
from planner.session import provider

from .loop_harness import STEPS, Loop, differences, judged
from .loops import Autoencoder, VariationalAutoencoder, mlp
from .variants import more

pytestmark = pytest.mark.usefixtures("short_searches")


def grads(model):
    found = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    return found


def same(ours, theirs):
    return all(
        (a is None) == (b is None) and (a is None or torch.equal(a, b)) for a, b in zip(ours, theirs, strict=True)
    )


def step(model, x):
    F.mse_loss(model.decode(model.encode(x)), x).backward()
    return grads(model)


@pytest.fixture
def planned_steps(monkeypatch):
    """The plans that are made."""
    made, make = [], provider.make_plan
    monkeypatch.setattr(provider, "make_plan", lambda *a, **k: made.append(a) or make(*a, **k))
    return made


@pytest.fixture
def autoencoder():
    torch.manual_seed(0)
    return Autoencoder()


@pytest.mark.compat
@pytest.mark.parametrize("mode", ["aten", "eager"])
def test_both_modes_run_a_step_of_two_calls_with_the_gradients_of_eager(autoencoder, mode):
    twin, x = copy.deepcopy(autoencoder), torch.randn(64, 64)
    plan(autoencoder, budget_gb=1, mode=mode).apply()
    for _ in range(3):
        assert same(step(autoencoder, x), step(twin, x))
    assert applied_plan(autoencoder).options.mode == mode


def test_a_step_that_makes_other_calls_runs_without_a_plan_and_says_so(autoencoder):
    twin, x = copy.deepcopy(autoencoder), torch.randn(64, 64)
    plan(autoencoder, budget_gb=1).apply()
    for _ in range(2):
        step(autoencoder, x)
    with pytest.warns(PlanWarning, match="decode comes as call 1"):
        autoencoder.decode(torch.ones(4, 16)).sum().backward()
    twin.decode(torch.ones(4, 16)).sum().backward()
    assert same(grads(autoencoder), grads(twin))
    assert same(step(autoencoder, x), step(twin, x))


def test_a_loop_that_calls_methods_first_and_the_model_later_has_a_plan_for_both(autoencoder):
    twin, x = copy.deepcopy(autoencoder), torch.randn(64, 64)
    plan(autoencoder, budget_gb=1).apply()
    for _ in range(2):
        step(autoencoder, x)
    for i in range(3):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore" if i == 0 else "error", PlanWarning)  # the first such step has no plan
            autoencoder(x).square().mean().backward()
        twin.zero_grad()
        twin(x).square().mean().backward()
        assert same(grads(autoencoder), grads(twin))
        autoencoder.zero_grad()


@pytest.mark.filterwarnings("error::planner.PlanWarning")
@pytest.mark.parametrize("laid_out", [*more(lambda t: t.t().contiguous().t()), lambda t: t[:1].expand(64, -1)])
def test_what_the_loop_gives_from_one_call_to_the_next_may_be_laid_out_in_any_way(autoencoder, laid_out):
    twin, x = copy.deepcopy(autoencoder), torch.randn(64, 64)
    plan(autoencoder, budget_gb=1).apply()
    for _ in range(2):
        found = []
        for model in (autoencoder, twin):
            z = model.encode(laid_out(x))
            z.register_hook(lambda g: g.contiguous())  # as torch.compile's graphs take it
            model.decode(laid_out(2 * z)).square().mean().backward()
            found.append(grads(model))
        assert same(*found)
    assert applied_plan(autoencoder) is not None


class CallsItself(Autoencoder):
    """As a LightningModule whose criterion is a module of its own."""

    def __init__(self):
        super().__init__()
        self.criterion = nn.MSELoss()

    def training_step(self, x, number):
        return self.criterion(self(x), x)


@pytest.mark.filterwarnings("error::planner.PlanWarning")
def test_a_method_that_calls_the_model_trains_by_the_models_own_plan():
    twin = copy.deepcopy(model := CallsItself())
    x = torch.randn(64, 64)
    plan(model, budget_gb=1).apply()
    for number in range(3):
        for each in (model, twin):
            each.training_step(x, number).backward()
        assert same(grads(model), grads(twin))
    assert applied_plan(model) is not None


class Unplannable(Autoencoder):
    def encode(self, x):
        return self._run(self.encoder, x)

    def decode(self, z):
        return self._run(self.decoder, z)

    @torch.compiler.disable
    def _run(self, module, x):
        return module(x)


def test_a_plan_that_cannot_be_made_of_a_steps_calls_leaves_nothing_behind():
    model, x = Unplannable(), torch.randn(67, 64)
    plan(model, budget_gb=1, mode="aten").apply()
    before = gc.get_threshold()
    gc.set_threshold(10**6)
    try:
        step(model, x)
        with pytest.warns(PlanWarning, match="trains without a plan"):
            step(model, x)
        tensors = [t for t in gc.get_objects() if type(t) is torch.Tensor]
        assert not [t for t in tensors if t.shape == x.shape and not t.any()]  # what stood for the batch
    finally:
        gc.set_threshold(*before)


def test_a_first_step_that_keeps_its_graph_is_warned_of_where_the_second_has_no_room_for_it(autoencoder):
    optimizer, x = torch.optim.SGD(autoencoder.parameters(), 1e-3), torch.randn(4096, 64)
    plan(autoencoder, budget_gb="12 MB").apply()
    said = []
    for _ in range(3):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loss = autoencoder.decode(autoencoder.encode(x)).square().mean()
        said.append([str(each.message) for each in caught if issubclass(each.category, PlanWarning)])
        loss.backward(retain_graph=True)
        optimizer.step()
        optimizer.zero_grad()
    assert [len(each) for each in said] == [0, 1, 0]
    assert "its graph is still there" in said[1][0]


def test_evaluation_between_the_calls_of_a_step_is_no_part_of_it(autoencoder):
    twin, x = copy.deepcopy(autoencoder), torch.randn(64, 64)
    plan(autoencoder, budget_gb=1).apply()
    for _ in range(3):
        z = autoencoder.encode(x)
        with torch.no_grad():
            assert torch.equal(autoencoder(x), twin(x))
        autoencoder.decode(z).square().mean().backward()
        twin.decode(twin.encode(x)).square().mean().backward()
        assert same(grads(autoencoder), grads(twin))


@pytest.mark.parametrize("steps", [0, 2])
def test_copies_and_files_of_a_model_go_without_what_sees_its_calls(autoencoder, steps):
    x = torch.randn(64, 64)
    plan(autoencoder, budget_gb=1).apply()
    for _ in range(steps):
        step(autoencoder, x)
    file = io.BytesIO()
    torch.save(autoencoder, file)
    file.seek(0)
    with torch.no_grad():
        right = autoencoder.encode(x)
        assert torch.equal(torch.load(file, weights_only=False).encode(x), right)
        twin = copy.deepcopy(autoencoder)
        next(autoencoder.encoder.parameters()).add_(1)
        assert torch.equal(twin.encode(x), right)


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_remove_leaves_the_model_as_it_was(autoencoder, steps):
    before = [set(vars(module)) for module in autoencoder.modules()]
    p = plan(autoencoder, budget_gb=1)
    p.apply()
    for _ in range(steps):
        step(autoencoder, torch.randn(64, 64))
    (applied_plan(autoencoder) or p).remove()
    assert [set(vars(module)) for module in autoencoder.modules()] == before


def test_a_model_that_is_called_is_planned_as_it_is_called(autoencoder):
    plan(autoencoder, budget_gb=1).apply()
    autoencoder(torch.randn(64, 64)).sum().backward()
    assert "encode" not in vars(autoencoder)
    assert applied_plan(autoencoder) is not None


def test_an_interruption_in_a_step_leaves_the_next_one_as_planned(autoencoder):
    twin, x = copy.deepcopy(autoencoder), torch.randn(64, 64)
    plan(autoencoder, budget_gb=1).apply()
    for _ in range(2):
        step(autoencoder, x)
    handle = autoencoder.decoder.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        step(autoencoder, x)
    handle.remove()
    autoencoder.zero_grad()
    assert same(step(autoencoder, x), step(twin, x))
    assert same(step(autoencoder, x), step(twin, x))


def test_calls_that_no_plan_can_be_made_of_are_named():
    class Setting:
        scale = 2.0

    class Scaled(Autoencoder):
        def encode(self, x, setting):
            return super().encode(x) * setting.scale

    model = Scaled()
    plan(model, budget_gb=1).apply()
    model.encode(torch.randn(8, 64), Setting()).sum().backward()
    with pytest.warns(PlanWarning, match="an object of type Setting"):
        model.encode(torch.randn(8, 64), Setting()).sum().backward()


def test_a_budget_that_no_plan_of_the_calls_meets_is_refused_with_their_names(autoencoder):
    plan(autoencoder, budget_gb=0.0003).apply()
    step(autoencoder, torch.randn(64, 64))
    with pytest.raises(InfeasibleBudgetError) as refused:
        step(autoencoder, torch.randn(64, 64))
    assert "encode, decode" in refused.value.__notes__[0]


def test_a_model_that_cannot_be_planned_is_warned_of_once_where_that_is_asked_for(autoencoder):
    plan(autoencoder, budget_gb=0.0003, on_failure="warn").apply()
    twin, x = copy.deepcopy(autoencoder), torch.randn(64, 64)
    with pytest.warns(PlanWarning, match="on_failure='warn'") as said:
        steps = [same(step(autoencoder, x), step(twin, x)) for _ in range(3)]
    assert all(steps)
    assert len(said) == 1


def test_calls_whose_graphs_change_from_step_to_step_are_planned_once(planned_steps):
    class Counting(Autoencoder):
        calls = 0

        def encode(self, x):
            self.calls += 1
            return super().encode(x) * self.calls

    model = Counting()
    plan(model, budget_gb=1).apply()
    twin, x = Counting(), torch.randn(64, 64)
    twin.load_state_dict(model.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PlanWarning)
        for _ in range(5):
            assert same(step(model, x), step(twin, x))
    assert len(planned_steps) == 1


class Weighted(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def loss(self, x, beta):
        return self.layers(x).square().mean() * beta


def test_verify_says_that_it_checks_the_models_own_call(autoencoder):
    model = plan(autoencoder, budget_gb=1).apply()
    x = torch.randn(64, 64)
    for _ in range(2):
        model.decode(model.encode(x)).square().mean().backward()
    with pytest.raises(ApplyError, match="a loop that calls encode, decode"):
        applied_plan(model).verify(x)


def test_numbers_that_change_in_each_step_are_planned_a_few_times_and_then_warned_of(planned_steps):
    torch.manual_seed(0)
    model, x = Weighted(), torch.randn(16, 8)
    twin, betas = copy.deepcopy(model), [i / 10 for i in range(1, 9)]
    plan(model, budget_gb=1).apply()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for beta in betas:
            for each in (model, twin):
                each.loss(x, beta).backward()
            assert same(grads(model), grads(twin))
    assert sum("they are given other numbers in each step" in str(w.message) for w in seen) == 1
    assert len(planned_steps) == 3


def test_dropout_of_methods_draws_as_without_a_plan():
    torch.manual_seed(0)
    model = VariationalAutoencoder()
    twin, x = copy.deepcopy(model), torch.randn(64, 64)
    plan(model, budget_gb=1).apply()
    for seed in range(3):
        for each in (model, twin):
            torch.manual_seed(seed)
            each.decode(sum(each.encode(x))).sum().backward()
        assert same(grads(model), grads(twin))


def test_no_copy_of_the_batch_stays_where_a_graph_breaks():
    class Broken(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x):
            x = torch.tanh(self.first(x))
            torch._dynamo.graph_break()
            return self.last(x).sum()

    model = Broken()
    plan(model, budget_gb=1).apply()
    model(torch.randn(512, 64)).backward()
    gc.collect()
    fakes = [t for t in gc.get_objects() if issubclass(type(t), FakeTensor)]
    assert all(t.constant is None or t.constant.numel() < 512 for t in fakes)


class Gan(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator, self.critic = mlp(), mlp(out=1)


@pytest.mark.thorough
def test_parts_that_are_frozen_in_turn_are_planned_each_while_it_is_trained():
    def loop(put, ended):
        model = put(Gan())
        parts = [model.generator, model.critic]
        optimizers = [torch.optim.Adam(part.parameters(), lr=1e-4) for part in parts]
        for _ in range(STEPS):
            real, noise, losses = torch.randn(512, 64), torch.randn(512, 64), []
            for trained in (1, 0):
                for at, part in enumerate(parts):
                    part.requires_grad_(at == trained)
                if trained:
                    made = model.generator(noise).detach()
                    loss = F.softplus(model.critic(made)).mean() + F.softplus(-model.critic(real)).mean()
                    del made
                else:
                    loss = F.softplus(-model.critic(model.generator(noise))).mean()
                optimizers[trained].zero_grad()
                loss.backward()
                optimizers[trained].step()
                losses.append(loss.detach())
            ended(losses)

    unplanned, seen = judged(Loop(loop, share=0.85))
    assert differences(seen, unplanned) == []
    assert seen.plans <= 4
    assert max(seen.measured[1:]) <= min(seen.budget, 1.01 * max(seen.predicted[1:]))  # both are planned by then
