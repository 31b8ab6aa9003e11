"""What a training loop does around a planned model is seen, and leaves the loop as it is."""

import copy
import gc
import inspect
import logging
import re
import warnings
import weakref
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensor, FakeTensorMode

from planner import InfeasibleBudgetError, OptionError, PlanWarning, applied_plan, plan
from planner.capture.trace import step as traced_step
from planner.compat.dispatch import modes_here
from planner.compat.fake import DynamicOutputShapeException
from planner.compat.tensors import TorchDispatchMode, storage_key
from planner.core.call import bytes_of_elements, storages
from planner.lowering.between import BETWEEN
from planner.planning.raised import with_between
from planner.runtime.interception import attached
from planner.runtime.loss_seen import loss_seen
from planner.runtime.made import LossEvents
from planner.runtime.rebound import bound_alone, places_of
from planner.runtime.recorded import stays
from planner.runtime.recorder import Recorder
from planner.runtime.rounds import Rounds
from planner.runtime.used_gradients import LONG
from planner.session import provider
from solvers import simulate

from .loops import Recommender

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


class Masked(nn.Module):
    """An index of booleans has a size that depends on values, as the edges of a graph without its loops."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x):
        return self.linear(x[x[:, 0] != 0])


def test_what_fake_tensors_cannot_run_leaves_no_error_that_holds_a_batch_until_the_collector_comes():
    gc.collect()
    gc.disable()
    try:
        plan(Masked(), torch.randn(16, 32), budget_gb=1)
        errors = [e for e in gc.get_objects() if type(e) is DynamicOutputShapeException]
    finally:
        gc.enable()
    assert errors  # torch leaves some
    assert not any(e.__traceback__.tb_frame.f_code.co_filename == traced_step.__file__ for e in errors)


def test_a_loop_may_copy_models_and_verify_between_its_steps():
    model, batch = perceptron(), torch.randn(16, 32)
    p = plan(model, batch, budget_gb=1, loss_fn=torch.Tensor.mean)
    p.apply()
    model(batch).mean().backward()
    ema = copy.deepcopy(model)
    assert p.verify().gradients_agree
    optimizer = torch.optim.SGD(model.parameters(), lr=0)
    for _ in range(4):
        model(batch).mean().backward()
        optimizer.step()
    assert modes_here() == []  # in the fourth round
    assert torch.equal(ema[0].weight, model[0].weight)
    p.remove()


def test_an_optimizer_is_found_and_one_of_another_model_is_refused():
    model, batch = perceptron(), torch.randn(16, 32)
    optimizer = torch.optim.Adam(model.parameters())
    p = plan(model, batch, budget_gb=1, loss_fn=torch.Tensor.mean)
    assert p.account["optimizer state"] >= 2 * sum(w.nbytes for w in model.parameters())
    with pytest.raises(OptionError, match="trains none"):
        plan(perceptron(), batch, budget_gb=1, loss_fn=torch.Tensor.mean, optimizer=optimizer)


@pytest.mark.parametrize("hosts", [("cpu",), ()])
def test_data_on_a_device_that_batches_are_drawn_from_count(hosts, monkeypatch):
    monkeypatch.setattr("planner.runtime.recorded.HOSTS", hosts)
    model, data = perceptron(), torch.randn(256, 32)
    plan(model, budget_gb=0.0005).apply()
    for _ in range(2):
        model(data[torch.randint(256, (16,))]).square().mean().backward()
        model.zero_grad()
    others = applied_plan(model).account.get("other tensors of the training loop", 0)
    assert others == (0 if hosts else data.nbytes)


def test_what_a_loop_does_later_is_seen_and_another_shape_has_its_own_reason(caplog):
    model, batch = perceptron(), torch.randn(16, 32)
    own = sum(p.nbytes for p in model.parameters())

    def train(budget, steps):
        plan(model, budget_gb=budget).apply()
        optimizer, averaged = torch.optim.SGD(model.parameters(), 0.1), None
        for i in range(steps):
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if i == 3:
                averaged = torch.optim.swa_utils.AveragedModel(model)
            elif averaged is not None:
                averaged.update_parameters(model)
        return applied_plan(model)

    p = train(0.0005, 2)
    p.remove()
    p = train((p.peak_bytes + own / 2) / 2**30, 7)
    assert own <= p.account["other tensors of the training loop"] < 2 * own
    caplog.clear()
    with caplog.at_level("INFO", "planner"):
        model(torch.randn(24, 32)).square().mean().backward()
    assert "comes for the first time" in caplog.text


def test_a_recording_that_ends_in_inference_mode_or_in_a_backward_pass_leaves_no_mode_and_no_key():
    model, batch = perceptron(), torch.randn(16, 32)
    p = plan(model, batch, budget_gb=1, loss_fn=torch.Tensor.mean)
    for ends in ("inference mode", "backward pass", "", "", ""):
        if applied_plan(model) is None:
            p.apply()
        loss = model(batch).mean()
        if ends == "inference mode":
            with torch.inference_mode():
                p.remove()
        if ends == "backward pass":
            loss.register_hook(lambda _: p.remove() and None)
        loss.backward()
        assert torch.ones(2).add(1).tolist() == [2, 2]  # fails where a key is left without a mode
    p.remove()
    assert modes_here() == []


def test_a_refusal_says_that_the_loss_is_not_known_where_it_is_not():
    x = torch.randn(512, 32)
    with pytest.raises(InfeasibleBudgetError) as unknown:
        plan(perceptron(), budget_gb=5e-5).apply()(x)
    note = "".join(unknown.value.__notes__)
    assert "whether gradients add up over several calls (12.38 kB): the first step may show that more is needed" in note
    with pytest.raises(InfeasibleBudgetError) as known:
        plan(perceptron(), x, budget_gb=5e-5, loss_fn=torch.sum)
    assert not hasattr(known.value, "__notes__")


def test_a_budget_that_leaves_room_for_little_of_a_loss_is_tried_before_it_is_refused():
    model, x = perceptron(), torch.randn(512, 32)
    p = plan(model, budget_gb=5e-5)
    with pytest.raises(InfeasibleBudgetError) as refused:
        p.apply()(x)
    p.remove()
    from_there = float(re.search(r"budget_gb=([\d.e-]+) on are tried", "".join(refused.value.__notes__))[1])
    assert from_there < 0.9 * refused.value.minimum_gb
    tried = plan(model, budget_gb=from_there)
    tried.apply()(x)
    assert applied_plan(model).peak_bytes <= from_there * 2**30
    tried.remove()
    plan(model, budget_gb=0.9 * refused.value.minimum_gb).apply()
    for taken in (True, False):  # the first step shows what the loss holds
        model(x).sum().backward()
        p = applied_plan(model)
        assert ("is taken to hold nothing but the gradients of outputs" in p.note) is taken
        assert p.peak_bytes <= p.budget_bytes
        model.zero_grad()


def test_a_loop_that_runs_no_op_between_its_steps_but_on_sparse_gradients_is_looked_at():
    model = Recommender()
    plan(model, budget_gb=0.0093).apply()
    tables = [*model.bags.parameters(), *model.items.parameters()]
    optimizers = torch.optim.SparseAdam(tables), torch.optim.Adam(model.head.parameters())
    for _ in range(2):
        loss = model(torch.randint(1000, (64, 5)), torch.randint(1000, (64,))).square().mean()
        for each in optimizers:
            each.zero_grad()
        loss.backward()
        for each in optimizers:
            each.step()


def test_gradients_that_stay_are_planned_for_once():
    model, batch = perceptron(), torch.randn(16, 32)
    plan(model, budget_gb=1).apply()
    for _ in range(4):
        model(batch).mean().backward()
    assert applied_plan(model).step.loop.gradients == "accumulated"


@pytest.mark.parametrize("clears", [True, False])
def test_gradients_of_parameters_that_the_loop_changes_itself_are_cleared_unless_they_are_added_to(clears):
    model, batch = perceptron(), torch.randn(16, 32)
    plan(model, budget_gb=1).apply()
    seen = []
    for _ in range(4):
        loss = model(batch).square().mean()
        seen.append(applied_plan(model).step.loop.gradients)
        if clears:
            model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.01 * p.grad
    assert seen == ["cleared", "cleared late", *["cleared late" if clears else "accumulated"] * 2]


def test_the_address_of_a_gradient_that_is_gone_may_come_again():
    """As the allocator gives it to the loss of the next microbatch."""
    recorder = Recorder(nn.Linear(2, 2), torch.device("cpu"), (), ())
    left = [{1: (1, 400), 2: (2, 4)}, {1: (3, 4), 2: (4, 400)}]
    recorder.losses += [LossEvents((), 0, (), each, frozenset(), {}) for each in left]
    recorder.arrived += [{1: (1, 400)}, {2: (4, 400)}]
    found = stays(recorder, (), ())
    assert found.left == 4
    seen = loss_seen(recorder, {}, found, first=True)
    assert seen is not None
    assert seen.tangents == 400


def test_a_backward_pass_of_results_that_were_let_go_of_before_is_eagers():
    model, batch = nn.Sequential(perceptron(), nn.BatchNorm1d(32)), torch.randn(16, 32)
    eager = copy.deepcopy(model)
    plan(model, budget_gb=1).apply()

    def train(model):
        losses = []
        for used in (False, False, True, True):
            model.train()
            model(batch).square().mean().backward()
            model.eval()
            losses.append(model(batch).abs().mean())
            if used:
                losses[-1].backward()
                assert applied_plan(model) is None or len(losses) < 4 or not applied_plan(model).step.loop.unused
        return [*losses, *(p.grad for p in model.parameters())]

    for ours, theirs in zip(train(model), train(eager), strict=True):
        assert torch.equal(ours, theirs)


def test_calls_whose_results_are_let_go_of_are_in_flight_no_more():
    model, batch = perceptron(), torch.randn(16, 32)
    plan(model, budget_gb=1).apply()
    held = None
    for _ in range(3):
        model.train()
        model(batch).square().mean().backward()
        loop = attached(model).watch.loop
        model.zero_grad()
        model.eval()
        held = model(batch)
    assert loop.in_flight == 1
    assert 0 < loop.left_over < 7 * batch.nbytes
    assert held.requires_grad


@pytest.mark.thorough
def test_outputs_that_a_loop_keeps_ever_more_of_are_said_once_and_other_lengths_are_not():
    model, kept, warned = perceptron(), [], []

    def train(budget, sizes, keeps):
        p = plan(model, budget_gb=budget)
        p.apply()
        optimizer, held = torch.optim.SGD(model.parameters(), 0.1), None
        for size in sizes:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                first = model(torch.randn(size, 32))
                first.square().mean().backward()
                held = model(torch.randn(size, 32))
                held.abs().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            kept.extend([first.detach()] * keeps)
            warned.extend(str(each.message) for each in caught if "outputs of earlier calls" in str(each.message))
        last = applied_plan(model)
        p.remove()
        return last

    p = train(1, (64, 64, 64), keeps=False)
    train(p.peak_bytes / 2**30, (32, 40, 48, 56, 64), keeps=False)
    assert warned == []
    train(p.peak_bytes / 2**30, [64] * 8, keeps=True)
    assert len(warned) == 1


def test_calls_that_no_optimizer_ends_are_looked_at_ever_less_often():
    rounds, chosen = Rounds(), []
    for at in range(40):
        rounds.call_begins(optimizer_seen=False)
        if rounds.chosen:
            chosen.append(at)
    assert chosen == [*range(10), 11, 14, 19, 27]


def test_a_call_without_gradients_that_takes_more_than_the_budget_is_said_once():
    model, batch = perceptron(), torch.randn(16, 32)
    p = plan(model, batch, budget_gb=1, loss_fn=torch.Tensor.mean)
    peak = p.peak_bytes
    plan(model, budget_gb=(peak + 10_000) / 2**30).apply()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(5):  # what comes in the first four calls ends the training
            model(batch).mean().backward()
            with torch.no_grad():
                model(batch)
        assert not caught
        wider, stacked = torch.randn(64, 32), {name: torch.stack([p, 2 * p]) for name, p in model.named_parameters()}
        with torch.no_grad():  # the parameters of several, in the place of the model's
            several = torch.vmap(lambda own: torch.func.functional_call(model, own, (wider,)))
            assert len(several(stacked)) == 2
        with torch.inference_mode():
            model(torch.randn(1000, 32))
            model(torch.randn(2000, 32))
    assert len([each for each in caught if "without gradients take" in str(each.message)]) == 1
    assert model(batch).requires_grad


def test_what_the_loop_makes_of_an_evaluation_is_looked_at_until_the_next_step():
    model, batch, held = perceptron(), torch.randn(16, 32), []
    peak = plan(model, batch, budget_gb=1, loss_fn=torch.Tensor.mean).peak_bytes
    plan(model, budget_gb=(peak + 20_000) / 2**30).apply()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(12):
            model(batch).mean().backward()
            model.zero_grad()
            if step == 6:  # of no step that is looked at
                with torch.no_grad():
                    held += [model(batch) for _ in range(20)]
                assert torch.cat(held).shape == (320, 32)
        assert applied_plan(model).record.step.loop.around == sum(t.nbytes for t in held)
    assert len([each for each in caught if "without gradients take" in str(each.message)]) == 1


def test_what_only_a_reference_cycle_holds_of_an_evaluation_does_not_count():
    """As torch.compile leaves the results of the first one."""
    model, batch = perceptron(), torch.randn(16, 32)
    plan(model, budget_gb=1, loss_fn=torch.Tensor.mean).apply()
    gc.disable()
    try:
        for step in range(4):
            model(batch).mean().backward()
            model.zero_grad()
            if step == 2:
                with torch.no_grad():
                    cycle = [model(torch.randn(64, 32))]
                cycle.append(cycle)
                del cycle
    finally:
        gc.enable()
    assert attached(model).watch.loop.around == 0


def trained(budget_gb=1.0, optimizer=torch.optim.SGD):
    """A model, a batch of its training, and an optimizer: nothing more is to be learnt of the loop."""
    model, batch = perceptron(), torch.randn(16, 32)
    plan(model, budget_gb=budget_gb, loss_fn=torch.Tensor.mean).apply()
    steps = optimizer(model.parameters())
    for _ in range(6):
        model(batch).mean().backward()
        steps.step()
        steps.zero_grad()
    assert modes_here() == []
    return model, batch, steps


@pytest.mark.parametrize("context", ["inference", "compiled"])
def test_an_evaluation_leaves_no_mode_that_hides_those_of_the_loop(context):
    model, batch, _ = trained()
    if context == "inference":
        with torch.inference_mode():
            held = [model(batch) for _ in range(3)]
    else:
        held = torch.compile(torch.no_grad()(lambda x: [model(x) for _ in range(3)]), backend="eager")(batch)
    with FakeTensorMode():
        assert isinstance(torch.empty(4), FakeTensor)
    assert modes_here() == []
    model(batch)
    assert attached(model).watch.loop.around == sum(t.nbytes for t in held)


def test_what_the_account_has_lines_for_is_not_what_an_evaluation_has_left():
    model, batch, _ = trained()
    adam = torch.optim.Adam(model.parameters())
    model(batch).mean().backward()
    with torch.no_grad():
        model(batch)
        for p in model.parameters():
            p.data = p.data.clone()
    adam.step()  # makes its state
    model(batch)
    assert attached(model).watch.loop.around == 0


def test_an_evaluation_counts_no_fake_tensors_and_no_batch_twice():
    model, _, _ = trained(budget_gb="600 kB")  # of 1000 rows, the batch and what its call makes take 384 kB at once
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with torch.no_grad():
            for rows in (600, 800, 1000, 1300):
                model(torch.randn(rows, 32))
        with FakeTensorMode():
            torch.empty(2**20).relu()
        model(torch.randn(16, 32))


def test_an_evaluation_may_be_of_tensors_that_have_no_storage():
    model, batch, _ = trained()
    with torch.no_grad():
        plain = model(batch)
        each = torch.vmap(model)(batch)  # while the first is looked at
        model[0].forward = lambda x: nn.functional.linear(x.to_dense(), model[0].weight, model[0].bias)
        rows = torch.cat([batch, batch])
        assert torch.equal(model(rows.to_sparse_csr()), model(rows.to_mkldnn()))
    assert torch.allclose(each, plain, atol=1e-6)


def test_an_evaluation_in_what_leaves_inference_mode_leaves_no_mode():
    model, batch, _ = trained()
    with torch.inference_mode(), torch.inference_mode(False), torch.no_grad():
        model(batch)
    with FakeTensorMode():
        assert isinstance(torch.empty(4), FakeTensor)


def test_fake_tensors_between_the_steps_take_nothing():
    model, batch = perceptron(), torch.randn(16, 32)
    plan(model, budget_gb="1 MB", loss_fn=torch.Tensor.mean).apply()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(4):
            model(batch).mean().backward()
            model.zero_grad()
            with FakeTensorMode():
                _held = torch.empty(2**20).relu_()
    loop = attached(model).watch.loop
    assert (loop.beside, loop.around) == (0, 0)


def test_what_was_there_in_an_evaluation_and_is_gone_counts_no_more():
    model, batch, _ = trained(budget_gb="80 kB")
    model(batch).mean().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with torch.no_grad():
            model(batch)
        model.zero_grad()  # 12.7 kB
        torch.randn(15_000)  # with parameters and two batches, 76 kB
        model(batch)


def test_what_looks_at_evaluations_ends_with_the_model():
    model, batch, _ = trained()
    with torch.no_grad():
        model(batch)
    (mode,) = modes_here()
    assert not mode.over
    del model, _
    gc.collect()
    assert mode.over
    trained()
    assert modes_here() == []


def test_a_model_without_a_plan_that_takes_more_than_the_budget_between_the_steps_is_said_once():
    model, other, batch = perceptron(), perceptron(), torch.randn(16, 32)
    plan(model, budget_gb="100 kB", loss_fn=torch.Tensor.mean).apply()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for rows in (16, 16, 16, 16, 2000, 2000, 2000, 2000, 2000):
            for each, x in ((model, batch), (other, torch.randn(rows, 32))):
                each(x).mean().backward()
                each.zero_grad()
    assert len([each for each in caught if "before it called the model again, the loop held" in str(each.message)]) == 1


def test_the_batch_counts_among_what_the_loop_holds_between_the_steps():
    model = perceptron()
    plan(model, budget_gb="16 MiB", loss_fn=torch.Tensor.mean).apply()

    def train():
        for _ in range(3):
            x = torch.randn(2**13, 32)  # 1 MiB
            model(x).mean().backward()
            model.zero_grad()
            torch.ones(31 * 2**17)  # 15.5 MiB

    with pytest.raises(InfeasibleBudgetError, match="between its steps") as found:
        train()
    assert found.value.minimum_bytes == pytest.approx(16.5 * 2**20, rel=0.002)
    assert "what it does once, as a check, it may do before the first one" in str(found.value)


def test_gradients_that_are_gone_by_the_next_call_count_among_what_the_loop_held_between_the_steps():
    model = nn.Linear(512, 512, bias=False)  # 1 MiB
    plan(model, budget_gb="3.5 MiB", loss_fn=torch.Tensor.mean).apply()

    def train():
        for _ in range(3):
            model(torch.randn(4, 512)).mean().backward()
            held = model.weight.grad * 2, torch.ones(5 * 2**16)  # with the weight 3.25 MiB, and the gradient is 1 MiB
            model.zero_grad()
            del held

    with pytest.raises(InfeasibleBudgetError, match="between its steps") as found:
        train()
    assert found.value.minimum_bytes == pytest.approx(4.25 * 2**20, rel=0.002)


@pytest.mark.parametrize("made", [13, 15])
def test_what_earlier_calls_saw_made_counts_among_what_the_loop_holds_between_the_steps(made):
    """Microbatches of which each is stepped: what is added up was made before the last of them."""
    model = perceptron()
    plan(model, budget_gb="16 MiB", loss_fn=torch.Tensor.mean).apply()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(5):
            total = torch.zeros(2**18)  # 1 MiB, beside the one of the step before
            for _ in range(2):
                model(torch.randn(16, 32)).mean().backward()
                total += 1
                model.zero_grad()
            if step > 1:  # in the first four calls, it would end the training
                torch.ones(made * 2**18 + 2**17)
    said = [each for each in caught if "the step takes 16.5" in str(each.message)]
    assert len(said) == (made == 15)
    # it is in the prediction where it fits; else the step itself is within the budget
    assert applied_plan(model).peak_bytes // 2**20 == {13: 14, 15: 1}[made]


def test_gradients_that_turn_out_not_to_be_cleared_are_said():
    model = nn.Sequential(perceptron(), perceptron(), nn.Linear(32, 4))

    def train(budget, steps):
        model.zero_grad()
        plan(model, budget_gb=budget).apply()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(steps):
            loss = model(torch.randn(128, 32)).square().mean()
            optimizer.zero_grad(set_to_none=False)  # they stay, which is seen in the second backward pass
            loss.backward()
            optimizer.step()
        return applied_plan(model)

    p = train(1, 2)
    p.remove()
    with pytest.warns(PlanWarning, match="gradients are there already"):
        train(0.8 * p.peak_bytes / 2**30, 2)


class Around(torch.optim.Optimizer):
    """Steps by another optimizer, and keeps weights of its own."""

    def __init__(self, base):
        super().__init__(base.param_groups, {})
        self.base = base

    def step(self):
        self.base.step()
        for p in self.param_groups[0]["params"]:
            self.state[p].setdefault("slow", p.detach().clone()).lerp_(p.detach(), 0.5)


def test_an_optimizer_around_another_one_is_planned_for_once(monkeypatch):
    accounts, make_plan = [], provider.make_plan

    def counting(*args, **kwargs):
        planned = make_plan(*args, **kwargs)
        accounts.append(planned.record.account)
        return planned

    monkeypatch.setattr(provider, "make_plan", counting)
    model = plan(perceptron(), budget_gb=2e-3).apply()
    optimizer = Around(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(64, 32)).square().mean().backward()
        optimizer.step()
    size = sum(p.nbytes for p in model.parameters())
    assert len(accounts) == 2
    assert accounts[-1]["optimizer state"] == size
    assert accounts[-1]["other tensors of the training loop"] >= size


def test_two_optimizers_that_step_the_same_parameters_are_both_counted():
    model = plan(perceptron(), budget_gb=1).apply()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for _ in range(2)]
    for at in range(4):
        model.zero_grad()
        model(torch.randn(64, 32)).square().mean().backward()
        optimizers[at % 2].step()
    assert applied_plan(model).account["optimizer state"] == 2 * sum(p.nbytes for p in model.parameters())


def _train(budget, steps, left_out=(), both=(), mode="aten"):
    """A loop that leaves steps out before their backward pass, or calls the model twice in them; the peaks of its plans
    in bytes, by step.
    """
    model = plan(perceptron(), budget_gb=budget, mode=mode).apply()
    batch, peaks = torch.randn(64, 32), []
    for at in range(steps):
        loss = model(batch).square().mean()
        if at in both:
            loss = loss + model(batch).mean()
        if at not in left_out:
            loss.backward()
            model.zero_grad()
        peaks.append(applied_plan(model).peak_bytes)
    return peaks


@pytest.mark.parametrize("at", [0, 3])
def test_a_step_that_is_left_out_and_still_holds_its_activations_is_said(at):
    budget = _train(1, 2)[-1] / 2**30
    with pytest.warns(PlanWarning, match="earlier call of the model still held.*loss = None"):
        _train(budget, 6, left_out=[at])


@pytest.mark.parametrize("mode", ["aten", "eager"])
@pytest.mark.parametrize("at", [0, 4])
def test_the_plan_is_for_one_call_again_a_while_after_a_step_was_left_out(at, mode, caplog):
    caplog.set_level("INFO", logger="planner")
    peaks = _train(1, 12, left_out=[at], mode=mode)
    assert "got no backward pass" in caplog.text
    assert peaks[-1] < 0.8 * max(peaks)


def test_calls_that_wait_for_their_backward_pass_now_and_then_stay_in_the_plan():
    peaks = _train(1, 14, both=[4, 10])
    assert peaks[4:] == [max(peaks)] * 10


@pytest.mark.parametrize("kept", [copy.deepcopy, dict, None])
def test_weights_that_are_kept_in_each_step_are_there_until_others_are(kept):
    """`copy.deepcopy` makes them without an op; a dictionary of the weights themselves takes nothing."""
    model = perceptron()
    size = sum(p.nbytes for p in model.parameters())

    def train(budget):
        plan(model, budget_gb=budget / 2**30).apply()
        best = None
        for _ in range(6):
            model.zero_grad()
            model(torch.randn(4, 32)).square().mean().backward()
            best = kept and kept(model.state_dict())
        return best

    assert (train(100 * size) is None) is (kept is None)
    applied_plan(model).remove()
    with pytest.raises(InfeasibleBudgetError) if kept is copy.deepcopy else nullcontext():
        train(3.5 * size)  # weights, gradients, and two copies


class Places(TorchDispatchMode):
    """Knows in which instructions of its callers' code the first op ran."""

    of = ()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.of = self.of or places_of(inspect.currentframe().f_back)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("held", ["by its variable", "by two", "in a list", "by a view", "by an attribute"])
@pytest.mark.parametrize("returned", ["alone", "with others", "by a function"])
def test_only_what_a_variable_alone_holds_is_let_go_of_where_that_is_bound_anew(held, returned):
    class Holder:
        pass

    def features(x):
        y = x @ x
        return [y, y + 1]

    holder, others = Holder(), []
    x = torch.randn(4, 4)
    with Places() as places:
        if returned == "alone":
            product = x @ x
        elif returned == "with others":
            product = (x, x @ x)
        else:
            product = features(x)
    t = product if returned == "alone" else next(each for each in product if each is not x)
    if held == "by two":
        before = product if returned == "with others" else t  # noqa: F841
    if held == "in a list":
        others.append(t)
    if held == "by a view":
        others.append(t[0])
    if held == "by an attribute":
        holder.product = product
    key, here = storage_key(t), inspect.currentframe()
    del t
    assert any(bound_alone(place, key, here) for place in places.of) is (held == "by its variable")
    with Places() as places:
        others.append(x @ x)  # of no variable
    assert not any(bound_alone(place, storage_key(others[-1]), here) for place in places.of)


def test_outputs_have_as_many_bytes_on_fakes_as_in_a_step():
    """`mse_loss` returns a number in the storage of what it has summed up: a loss outside is not of other outputs."""
    real = torch.randn(64, 32)
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(real)
    both = [[x, nn.functional.mse_loss(x, x + 1)] for x in (real, fake)]
    assert len({sum(storages(outputs).values()) for outputs in both}) == 2
    assert {bytes_of_elements(outputs) for outputs in both} == {64 * 32 * 4 + 4}


def test_a_copy_of_a_planned_model_goes_when_the_loop_lets_go_of_it():
    """It has the plan nevertheless: as soon as it is trained, or somebody asks."""
    model, batch = perceptron(), torch.randn(16, 32)
    plan(model, budget_gb=1).apply()
    model(batch).mean().backward()
    gc.disable()
    try:
        best = copy.deepcopy(copy.deepcopy(model))
        with torch.no_grad():
            assert torch.equal(best(batch), model(batch))
        alive = weakref.ref(best)
        del best
        assert alive() is None
    finally:
        gc.enable()
    trained, asked = copy.deepcopy(model), copy.deepcopy(model)
    trained(batch).mean().backward()
    assert attached(trained).regions.ran == 1
    assert applied_plan(asked) is not None


def test_a_call_that_failed_leaves_no_batch_behind(monkeypatch):
    # pytest keeps what is logged, with the frames of an exception
    monkeypatch.setattr(logging.getLogger("torch._subclasses.fake_tensor"), "disabled", True)
    model, failed = perceptron(), 0
    plan(model, budget_gb=1).apply()
    model(torch.randn(16, 32)).mean().backward()
    batch = torch.randn(16, 31)
    alive = weakref.ref(batch)
    try:  # pytest.raises() would keep the traceback
        model(batch)
    except RuntimeError:
        failed += 1
    del batch
    model(torch.randn(16, 32)).mean().backward()
    assert failed == 1
    assert alive() is None


def test_planning_is_no_anomaly(recwarn):
    model = perceptron()
    with torch.autograd.set_detect_anomaly(True):
        plan(model, budget_gb=1).apply()
        for _ in range(2):
            nn.functional.huber_loss(model(torch.randn(16, 32)), torch.zeros(16, 32)).backward()
        assert torch.is_anomaly_enabled()
    assert not [w for w in recwarn if "Error detected" in str(w.message)]


@pytest.mark.parametrize("late", [False, True])
def test_gradients_that_stay_after_many_steps_without_any_are_seen_all_the_same(late):
    model, x = nn.Linear(8, 8), torch.randn(4, 8)
    plan(model, budget_gb=1, progress=False).apply()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(LONG + 4):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    watch = attached(model).watch
    assert (watch.loop.gradients, watch.settled) == ("cleared", True)
    for _ in range(3):
        loss = model(x).square().mean()
        if late:
            optimizer.zero_grad()
        loss.backward()
        if late:
            optimizer.step()
    assert watch.loop.gradients == ("cleared late" if late else "accumulated")
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    other.step()
    assert other in watch.optimizers()


def test_a_step_is_verified_with_the_loss_that_the_loop_trains():
    class Scored(nn.Module):
        def __init__(self):
            super().__init__()
            layers = [layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.GELU())]
            self.body = nn.Sequential(*layers, nn.Linear(64, 64))

        def forward(self, x, y):
            logits = self.body(x)
            return logits, nn.functional.cross_entropy(logits, y)

    model, x, y = Scored(), torch.randn(256, 64), torch.randint(64, (256,))
    plan(model, budget_gb=0.0012).apply()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        _logits, loss = model(x, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    seen = applied_plan(model).verify((x, y))
    assert seen.gradients_agree
    assert seen.measured_bytes <= seen.predicted_bytes


@pytest.mark.parametrize("told", [False, True])
def test_verify_says_that_it_lacks_a_loss_that_the_plan_counts(told):
    model = perceptron()
    more = {"loss_fn": lambda output: output.exp().square().mean()} if told else {}
    plan(model, budget_gb=1, **more).apply()
    for batch in torch.randn(4, 512, 32):
        model(batch).exp().square().mean().backward()
        model.zero_grad()
    seen = applied_plan(model).verify(batch)
    assert seen.loss_left_out is not told
    assert ("without the loss that a loop computes" in str(seen)) is not told
    assert told == (abs(seen.prediction_error) < 0.01)


def test_a_compiled_function_around_the_model_is_warned_of_as_its_loss_is_not_seen():
    model = plan(nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16)), budget_gb=1).apply()
    step = torch.compile(lambda x: model(x).square().mean(), backend="eager")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", PlanWarning)
        for _ in range(6):
            step(torch.randn(8, 16)).backward()
    said = [w for w in warned if "called by a function that torch.compile was given" in str(w.message)]
    assert len(said) == 1


class Averaging(nn.Module):
    """The loss is against what an average of the trained weights makes."""

    def __init__(self):
        super().__init__()
        self.net, self.average = (nn.Linear(512, 512, bias=False) for _ in range(2))
        self.average.requires_grad_(False)

    def forward(self, x):
        return (self.net(x) - self.average(x)).square().mean()


def test_weights_that_others_take_the_place_of_between_steps_are_there_until_then():
    """Each takes 1 MB: two, a gradient, what is computed for the next average in three parts."""
    model = Averaging()

    def train(budget):
        plan(model, budget_gb=budget).apply()
        mean, trained = model.average.weight, model.net.weight
        for _ in range(4):
            model.zero_grad()
            model(torch.randn(4, 512)).backward()
            with torch.no_grad():
                trained -= 0.1 * trained.grad
            mean.data = mean.data * 0.5 + 0.5 * trained.data
        return applied_plan(model)

    with pytest.raises(InfeasibleBudgetError, match="between its steps") as found:
        train("5.5 MiB")
    assert found.value.minimum_bytes == pytest.approx(6 * 2**20, rel=0.005)
    applied_plan(model).remove()
    assert train(found.value.minimum_gb).peak_bytes == found.value.minimum_bytes


@pytest.mark.parametrize("mode", ["aten", "eager"])
def test_what_shows_late_between_the_steps_and_fits_is_in_the_figures_of_the_plan(mode):
    p = plan(perceptron(), (torch.randn(512, 32),), budget_gb=1, mode=mode).record
    for peak in (p.peak_bytes + 100, p.peak_bytes + 300):
        p = with_between(p, peak)
        assert p.peak_bytes == p.baseline_peak_bytes == peak == sum(p.account.values()) == p.phase_peaks["optimizer"]
        assert max(m.held_bytes for m in p.timeline) == p.baseline_timeline[-1].held_bytes == peak
        if mode == "aten":
            assert simulate(p.problem, p.schedule).peak == peak
    assert [m.op for m in p.timeline].count(BETWEEN) == [m.op for m in p.baseline_timeline].count(BETWEEN) == 1
    assert with_between(p, p.peak_bytes - 100) is p


def test_what_shows_late_between_the_steps_changes_the_prediction_of_the_plan_that_stays():
    """1 MB each: weights, a gradient, and copies of the weights, one more from step to step up to the third."""
    model = plan(nn.Sequential(nn.Linear(512, 512, bias=False)), budget_gb="20 MiB").apply()
    peaks = []
    for step in range(6):
        model(torch.randn(4, 512)).square().mean().backward()
        copies = [model[0].weight.detach().clone() for _ in range(min(step, 3))]
        del copies
        model.zero_grad()
        peaks.append(round(applied_plan(model).peak_bytes / 2**20))
    assert peaks[-4:] == [3, 4, 5, 5]


@pytest.mark.parametrize(("megabytes", "refused"), [(4.7, True), (5.3, False)])
def test_a_copy_of_the_state_that_others_take_the_place_of_is_there_until_then(megabytes, refused):
    """Reptile: each takes 1 MB: the weights, their copy, a gradient, the next weights, and one part of these."""
    model = plan(nn.Sequential(nn.Linear(512, 512, bias=False)), budget_gb=f"{megabytes} MiB").apply()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def train():
        for _ in range(6):
            before = copy.deepcopy(model.state_dict())
            for _ in range(2):
                optimizer.zero_grad()
                model(torch.randn(4, 512)).square().mean().backward()
                optimizer.step()
            after = model.state_dict()
            model.load_state_dict({name: t + 0.5 * (after[name] - t) for name, t in before.items()})

    with pytest.raises(InfeasibleBudgetError) if refused else nullcontext() as found:
        train()
    assert not refused or found.value.minimum_bytes == pytest.approx(5 * 2**20, rel=0.005)


def test_states_of_optimizers_that_are_the_models_own_memory_are_not_moved_aside():
    model = nn.Linear(8, 8)
    plan(model, budget_gb=1, progress=False).apply()
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.state[model.weight]["last"] = model.weight.data
    averages = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    states = {t.data_ptr() for t in attached(model).states()}
    assert states.issuperset(t.data_ptr() for t in averages)
    assert model.weight.data_ptr() not in states
