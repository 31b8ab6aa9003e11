"""Loops that go past a planned model's call, and what else may stand in the place of that call."""

import copy
import gc
import pickle
import warnings
import weakref

import pytest
import torch
from torch import nn, optim
from torch.optim import optimizer as torch_optimizer

from planner import ApplyError, PlanWarning, applied_plan, plan
from planner.compat.modules import GLOBAL_HOOKS
from planner.runtime.optimizer_steps import listen
from planner.runtime.signature import call_signature
from planner.runtime.unread import unread

pytestmark = pytest.mark.usefixtures("short_searches", "always_compiled")


class AutoEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 16), nn.Tanh())
        self.layers = nn.ModuleList([nn.Linear(16, 16)])
        self.decoder = nn.Linear(16, 8)

    def encode(self, x):
        return self.encoder(x)

    def decode(self, z):
        return self.decoder(self.layers[0](z))

    def forward(self, x):
        return self.decode(self.encode(x)).square().mean()


def functional(model, x):
    for linear in (model.encoder[0], model.layers[0], model.decoder):
        x = nn.functional.linear(x, linear.weight, linear.bias)
    return x.square().mean()


LOOPS = {
    "functional": functional,
    "forward": lambda model, x: model.decoder.forward(model.layers[0].forward(model.encoder[0].forward(x))).sum(),
}


def train(model, loss_of, steps=3):
    optimizer = optim.AdamW(model.parameters())
    for _ in range(steps):
        loss_of(model, torch.randn(4, 8)).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("early", [True, False], ids=["planned before", "at the first step"])
@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_that_goes_past_the_plan_is_told_so_once(loop, early):
    model = AutoEncoder()
    listen()  # the first planned model of a process does, for good
    gc.collect()  # planned models of other tests take their hooks with them
    hooks = len(torch_optimizer._global_optimizer_pre_hooks)
    p = plan(model, torch.randn(4, 8) if early else None, budget_gb=1)
    p.apply()
    with torch.no_grad():
        model(torch.randn(4, 8))
    with pytest.warns(PlanWarning, match="trains without its plan") as said:
        train(model, LOOPS[loop])
    (warning,) = said
    assert "plan(model.encoder, ...), plan(model.layers.0, ...), plan(model.decoder, ...)" in str(warning.message)
    assert warning.filename == __file__
    p.remove()
    assert len(torch_optimizer._global_optimizer_pre_hooks) == hooks


def test_a_loop_that_calls_the_model_hears_nothing():
    model, other, x = AutoEncoder(), AutoEncoder(), torch.randn(4, 8)
    LOOPS["forward"](model, x).backward()  # these gradients were there before the plan
    gc.collect()  # planned models of other tests take their hooks with them
    hooks = len(torch_optimizer._global_optimizer_pre_hooks)
    p = plan(model, x, budget_gb=1)
    p.apply()
    with warnings.catch_warnings():
        warnings.simplefilter("error", PlanWarning)
        optim.SGD(model.parameters()).step()
        model.zero_grad()
        train(other, LOOPS["forward"])
        train(model, lambda m, x: m(x))
    assert len(torch_optimizer._global_optimizer_pre_hooks) == hooks + 1  # asks whether the model is still called
    p.remove()
    assert len(torch_optimizer._global_optimizer_pre_hooks) == hooks


def test_a_planned_model_that_is_dropped_before_its_first_call_takes_its_hook_with_it():
    listen()
    gc.collect()
    hooks = len(torch_optimizer._global_optimizer_pre_hooks)
    plan(AutoEncoder(), torch.randn(4, 8), budget_gb=1).apply()
    gc.collect()
    assert len(torch_optimizer._global_optimizer_pre_hooks) == hooks


def test_a_model_that_only_its_plan_has_yet():
    model = plan(AutoEncoder(), budget_gb=1).apply()
    train(model, lambda m, x: m(x))
    assert applied_plan(model) is not None


def test_a_model_that_waits_for_its_first_call_can_be_freed():
    model = AutoEncoder()
    gone = weakref.ref(model)
    plan(model, budget_gb=1).apply()
    del model
    gc.collect()
    assert gone() is None
    train(AutoEncoder(), LOOPS["forward"])


def test_compile_after_apply_is_refused_and_the_plan_stays():
    model, x = AutoEncoder(), torch.randn(4, 8)
    p = plan(model, x, budget_gb=1)
    p.apply()
    for planned in (model, copy.deepcopy(model)):
        with pytest.raises(ApplyError, match="runs under a plan"):
            planned.compile()
        planned(x).backward()
        assert planned._compiled_call_impl.regions.ran == 1
    loaded = pickle.loads(pickle.dumps(model))
    loaded.compile(backend="eager")
    loaded(x).backward()
    nn.Module.compile(model, backend="eager")  # past the refusal
    p.remove()
    assert applied_plan(model) is None
    del model._compiled_call_impl
    model.compile(backend="eager")
    model(x).backward()
    with pytest.raises(ApplyError, match="no plan"):
        p.remove()


def test_equal_states_of_a_model_are_one_object_that_is_found_without_comparing_them():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    states = [call_signature(model, (), {})[2] for _ in range(2)]
    model.eval()
    assert states[0] is states[1] != call_signature(model, (), {})[2]
    assert hash(states[0].described[1]) == hash(tuple(states[0].described[1]))


@pytest.mark.parametrize("given", [True, False], ids=["as an argument", "as an attribute"])
def test_a_number_that_changes_from_step_to_step_is_warned_of(given):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.factor = nn.Linear(8, 8), 1.0

        def forward(self, x, factor=None):
            return self.inner(x) * (self.factor if factor is None else factor)

    model, x = Scaled(), torch.randn(4, 8)
    plan(model, budget_gb=1).apply()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for factor in (1.0, 1.0, 0.9, 0.8, 0.7, 0.6):
            model.factor = 1.0 if given else factor
            model(x, factor if given else None).sum().backward()
    said = [str(each.message) for each in caught if issubclass(each.category, PlanWarning)]
    assert len(said) == 1
    assert "for the 3rd time" in said[0]


def test_views_of_a_detached_output_are_as_in_eager_mode():
    class Views(nn.Linear):
        def forward(self, x):
            h = super().forward(x).tanh()
            return h, h.detach().view(-1), h.detach()[1:3]

    eager, x = Views(8, 8), torch.randn(4, 8)
    model = copy.deepcopy(eager)
    plan(model, budget_gb=1).apply()
    for _ in range(2):
        ours, theirs = model(x), eager(x)
        assert [t.requires_grad for t in ours] == [t.requires_grad for t in theirs] == [True, False, False]
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a, b)
        ours[0].sum().backward()
        theirs[0].sum().backward()
    assert torch.equal(model.weight.grad, eager.weight.grad)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_a_batch_that_is_an_object_may_refer_to_anything():
    class Batch:
        def __init__(self):
            self.x, self.itself = torch.randn(4, 8), self
            self.sparse = [torch.eye(4).to_sparse(), torch.eye(4).to_sparse_csr(), torch.eye(4).to_sparse_csc()]
            self.data_set = list(range(100_000))

    class Inner(nn.Linear):
        def forward(self, batch):
            return super().forward(batch.x)

    model = Inner(8, 8)
    plan(model, budget_gb=1).apply()
    for _ in range(3):
        model(Batch()).sum().backward()
    assert applied_plan(model) is not None


def test_what_refers_to_a_copy_that_is_gone_can_be_copied_and_saved():
    model = nn.Sequential(nn.Linear(8, 8))
    plan(model, budget_gb=1).apply()
    shallow = copy.copy(copy.deepcopy(model))
    gc.collect()
    for each in (shallow, copy.deepcopy(shallow), pickle.loads(pickle.dumps(shallow))):
        assert each(torch.ones(2, 8)).shape == (2, 8)


class Told(nn.Module):
    """Is told numbers, and reads some of them."""

    def forward(self, x, index, scale=1.0, *, epoch=0):
        return x * scale

    def closure(self, x, index):
        return (lambda: x * index)()

    def everything(self, x, index):
        return locals()["index"] * x

    def packed(self, x, *numbers):
        return x


def test_numbers_that_code_never_loads_are_known(monkeypatch):
    told, x = Told(), torch.ones(2)
    batch = {"x": x, "more": [x, x]}
    assert unread(told, None, (batch, 3), {"epoch": 1, "scale": 2.0}) == {3, 4}
    assert unread(told, None, (x, torch.ones(1)), {"scale": 1.0}) == set()
    for method in (Told.closure, Told.everything, Told.packed):
        assert unread(told, method, (x, 3), {}) == set()
    hook = told.register_forward_pre_hook(lambda module, args: (args[0] * args[1], args[1]))
    assert unread(told, None, (x, 3), {}) == set()
    hook.remove()
    with monkeypatch.context() as patch:
        patch.setitem(GLOBAL_HOOKS[0], 0, lambda module, args: None)
        assert unread(told, None, (x, 3), {}) == set()
    told.forward = Told.closure.__get__(told)
    assert unread(told, None, (x, 3), {}) == set()
    told.forward = lambda x, times, step: x.repeat(times, 1)  # of the instance: it is not given the module
    assert unread(told, None, (x, 3, 4), {}) == {2}
