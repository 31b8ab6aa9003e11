"""The optimizer inside the backward pass: the same training, to the bit, without gradients that wait for it."""

import copy
import gc
import weakref
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import fx, nn, optim

import planner
from planner import applied_plan, plan
from planner.capture.passes.order import Order
from planner.capture.passes.steps import add_steps, steps_in
from planner.compat.fake import FakeTensorMode
from planner.compat.fx import PlainAOTInput
from planner.errors import ApplyError, CaptureError, OptionError, PlannerError
from planner.stepping.step import ONE_BY_ONE

from .measure import peak_of
from .variants import more

pytestmark = pytest.mark.usefixtures("short_searches")

B, D, WORDS = 8, 16, 32


class Tied(nn.Module):
    """A weight that is used twice, one that is frozen, one that nothing uses, and two that share a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, D)
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(D), nn.Linear(D, D), nn.GELU()) for _ in range(2))
        self.offset, self.again = nn.Parameter(torch.randn(B, D)), nn.Parameter(torch.randn(B, D))
        self.frozen = nn.Linear(D, D).requires_grad_(False)
        self.unused = nn.Parameter(torch.randn(3))
        self.head = nn.Linear(D, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, at: torch.Tensor) -> torch.Tensor:
        h = self.words(at)
        for layer in self.layers:
            h = self.frozen(h + layer(h))
        return nn.functional.cross_entropy(self.head(torch.tanh(h + self.offset + self.again)), at)


def mlp(width: int = 128, depth: int = 4) -> nn.Sequential:
    return nn.Sequential(*(layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.Tanh())))


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


def train(model: nn.Module, optimizer: optim.Optimizer, batches: list[torch.Tensor]) -> list[float]:
    schedule = optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = model(batch).mean()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses


def same_state(ours: optim.Optimizer, theirs: optim.Optimizer) -> bool:
    a, b = ours.state_dict(), theirs.state_dict()
    assert a["param_groups"] == b["param_groups"]
    assert a["state"].keys() == b["state"].keys()
    return all(
        torch.equal(torch.as_tensor(a["state"][p][name]), torch.as_tensor(value))
        for p, state in b["state"].items()
        for name, value in state.items()
        if value is not None
    )


def like_usual(
    make: Callable[[], nn.Module], optimizer: Callable[..., optim.Optimizer], batches: list[torch.Tensor], **options
) -> nn.Module:
    usual, model = seeded(make), seeded(make)
    theirs, ours = optimizer(usual.parameters()), optimizer(model.parameters())
    plan(
        model, batches[0], optimizer=ours, step_in_backward=True, progress=False, **{"budget_gb": 1, **options}
    ).apply()
    assert train(model, ours, batches) == train(usual, theirs, batches)
    assert all(map(torch.equal, model.parameters(), usual.parameters()))
    assert same_state(ours, theirs)
    assert all(p.grad is None for p in model.parameters())
    return model


WORDS_IN = [torch.randint(WORDS, (B,), generator=torch.Generator().manual_seed(i)) for i in range(4)]


@pytest.mark.parametrize(
    "optimizer",
    [
        partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True, foreach=True),  # writes into gradients
        partial(optim.AdamW, lr=1e-2),
        *more(partial(optim.Adafactor, lr=1e-2)),
    ],
)
def test_training_is_the_same_to_the_bit(optimizer):
    like_usual(Tied, optimizer, WORDS_IN)


def test_a_gradient_is_laid_out_as_its_parameter():
    batches = [torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(i)) for i in range(2)]

    def make() -> nn.Module:
        return nn.Conv2d(3, 6, 3).to(memory_format=torch.channels_last)

    optimizer = partial(optim.SGD, lr=0.1, momentum=0.9)
    model, usual = seeded(make), seeded(make)
    ours, theirs = optimizer(model.parameters()), optimizer(usual.parameters())
    plan(
        model, batches[0], budget_gb=1, optimizer=ours, step_in_backward=True, loss_fn=torch.mean, progress=False
    ).apply()
    train(model, ours, batches)
    train(usual, theirs, batches)
    momenta = [o.state[m.weight]["momentum_buffer"] for o, m in ((ours, model), (theirs, usual))]
    assert momenta[0].stride() == momenta[1].stride() == usual.weight.stride()


def test_values_are_recomputed_from_weights_as_they_were():
    batches = [torch.randn(64, 8, generator=torch.Generator().manual_seed(i)) for i in range(2)]
    make, optimizer = partial(mlp, 8, 6), partial(optim.SGD, lr=0.1)
    model = seeded(make)
    asked = {"optimizer": optimizer(model.parameters()), "step_in_backward": True, "loss_fn": torch.mean}
    most = plan(model, batches[0], budget_gb=1, progress=False, **asked)
    tight = 0.85 * most.peak_bytes / 2**30
    trained = like_usual(make, optimizer, batches, loss_fn=torch.mean, budget_gb=tight)
    assert applied_plan(trained).overhead > 0


@pytest.mark.thorough
def test_every_optimizer_that_is_taken_trains_the_same():
    batches = [torch.randn(4, 6, generator=torch.Generator().manual_seed(i)) for i in range(2)]
    assert optim.LBFGS not in ONE_BY_ONE
    for kind in sorted(ONE_BY_ONE, key=lambda kind: kind.__name__):
        like_usual(partial(nn.Linear, 6, 6, bias=False), partial(kind, lr=1e-2), batches, loss_fn=torch.mean)


@pytest.mark.parametrize("optimizer", [partial(optim.SGD, lr=0.1, momentum=0.9), partial(optim.AdamW, foreach=True)])
def test_no_gradient_waits(optimizer, tmp_path):
    batch = torch.randn(4, 128)
    model = seeded(mlp)
    ours = optimizer(model.parameters())
    asked = {"optimizer": ours, "loss_fn": torch.mean}
    today, stepping = (
        plan(model, batch, budget_gb=1, step_in_backward=given, progress=False, **asked) for given in (False, True)
    )
    gradients = sum(p.nbytes for p in model.parameters())
    assert today.peak_bytes - stepping.peak_bytes >= 0.7 * gradients  # one layer's are there
    budget = stepping.peak_bytes / 2**30
    plan(model, batch, budget_gb=budget, step_in_backward=True, progress=False, **asked).apply()

    def step() -> None:
        ours.zero_grad()
        out = model(batch)
        out.mean().backward()
        ours.step()

    for _ in range(3):
        step()
    p = applied_plan(model)
    resident = [*model.parameters(), *(s for state in ours.state.values() for s in state.values())]
    measured = peak_of(step, tmp_path) + batch.nbytes + sum(t.nbytes for t in resident)
    assert measured == pytest.approx(p.peak_bytes, rel=0.01)
    assert measured <= p.budget_bytes


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"optimizer": None}, "needs the optimizer that steps"),
        ({"optimizer": "adamw"}, "optimizer='adamw'"),
        ({"optimizer": optim.LBFGS}, "LBFGS, which is not known to treat each parameter alone"),
        ({"accumulate": True}, "cannot be added"),
        ({"shard": 2}, "shard=2"),
        ({"in_flight": 2}, "in_flight=2"),
        ({"pieces": "auto"}, "pieces="),
        ({"offload": "disk"}, "offload="),
        ({"mode": "eager"}, "mode='eager'"),
        ({"step_in_backward": 1}, "must be True"),
    ],
)
def test_what_does_not_go_with_it_is_refused(given, words):
    model = nn.Linear(4, 4)
    options = {"optimizer": optim.SGD, "step_in_backward": True, **given}
    if isinstance(options["optimizer"], type):
        options["optimizer"] = options["optimizer"](model.parameters())
    with pytest.raises(OptionError, match=words):
        plan(model, torch.zeros(2, 4), budget_gb=1, loss_fn=torch.mean, **options)


def test_parameters_that_cannot_be_stepped_are_refused():
    def refused(model, trained, words):
        optimizer = optim.SGD(trained, lr=0.1)
        with pytest.raises(OptionError, match=words):
            plan(model, torch.zeros(2, 4), budget_gb=1, loss_fn=torch.mean, optimizer=optimizer, step_in_backward=True)

    refused(model := nn.Linear(4, 4), [model.weight], r"SGD lacks \(bias\)")
    model = nn.Linear(4, 4)
    model.weight.register_hook(lambda g: g)
    refused(model, model.parameters(), r"hooks on gradients of parameters \(weight\)")
    model = nn.Linear(4, 4)
    model.weight.register_post_accumulate_grad_hook(lambda p: None)
    refused(model, model.parameters(), "hooks on gradients")
    model = nn.Linear(4, 4)
    model.register_buffer("same", model.weight.data)
    refused(model, model.parameters(), "share their storage")


class Broken(nn.Module):
    """Two graphs, of which both may use one weight."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        if tied:
            self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.first(x))
        torch._dynamo.graph_break()
        return self.second(h)


def test_a_parameter_is_stepped_by_the_one_graph_that_uses_it():
    batches = [torch.randn(2, 4), torch.randn(2, 4)]
    like_usual(partial(Broken, tied=False), partial(optim.SGD, lr=0.1), batches, loss_fn=torch.mean)
    model = Broken(tied=True)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(CaptureError, match="several of the 2 parts"):
        plan(model, batches[0], budget_gb=1, loss_fn=torch.mean, optimizer=optimizer, step_in_backward=True)


@pytest.fixture
def planned():
    """A planned MLP, its optimizer, and a loss of it."""
    model = seeded(partial(mlp, 8, 2))
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batch = torch.randn(2, 8)
    plan(
        model, batch, budget_gb=1, loss_fn=torch.mean, optimizer=optimizer, step_in_backward=True, progress=False
    ).apply()
    return model, optimizer, lambda: model(batch).mean()


def test_a_loop_that_reads_gradients_is_refused(planned):
    model, optimizer, loss = planned

    def reads(read: Callable[[], object]) -> None:
        loss().backward()
        with pytest.raises(ApplyError, match=r"a gradient was read by .*, and it was used in the backward pass"):
            read()
        optimizer.zero_grad()

    reads(lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    reads(lambda: nn.utils.clip_grad_value_(model.parameters(), 1.0))
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    reads(lambda: scaler.unscale_(optimizer))
    reads(lambda: model[0].weight.grad.norm())
    loss().backward()
    assert "used by the optimizer" in repr(model[0].weight.grad)
    optimizer.zero_grad()
    with pytest.raises(PlannerError, match="a gradient was read"):  # a term of the loss outside the model
        (loss() + model[0].weight.sum()).backward()


def test_backward_passes_that_must_not_step_step_nothing(planned):
    model, optimizer, loss = planned

    def refused(words: str, backward: Callable[[], object]) -> None:
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(ApplyError, match=words):
            backward()
        assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())
        optimizer.zero_grad()

    loss().backward()
    refused("gradient accumulation", lambda: loss().backward())
    both = loss() + loss()
    refused("another call of the model waits", both.backward)
    del both
    refused("retain_graph=True", lambda: loss().backward(retain_graph=True))
    refused("asks for some gradients", lambda: torch.autograd.grad(loss(), model[0].weight))
    handle = model[0].weight.register_hook(lambda g: g)
    refused("has a hook on its gradient", lambda: loss().backward())
    handle.remove()
    model[0].weight.grad = torch.zeros_like(model[0].weight)
    refused("gradient accumulation", lambda: loss().backward())
    refused("without a closure", lambda: optimizer.step(loss))
    before = model[0].weight.clone()
    loss().backward()  # the next step works
    assert not torch.equal(before, model[0].weight)


def test_a_learning_rate_that_is_set_too_late_is_refused(planned):
    _, optimizer, loss = planned
    schedule = optim.lr_scheduler.StepLR(optimizer, 1)
    loss().backward()
    optimizer.step()
    schedule.step()
    loss().backward()
    schedule.step()  # the parameters are stepped already
    with pytest.raises(ApplyError, match=r"lr=0\.001.* was set between loss\.backward\(\)"):
        optimizer.step()
    optimizer.zero_grad()
    loss().backward()  # by the rate that was set
    optimizer.step()


def test_gradients_are_cleared_as_a_loop_clears_them(planned, monkeypatch):
    model, optimizer, loss = planned
    for clear in (
        partial(optimizer.zero_grad, set_to_none=False),
        partial(model.zero_grad, set_to_none=False),
        model.zero_grad,
        optimizer.step,
    ):
        loss().backward()
        clear()

    def fails(*_: object) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(optim.SGD.step, "__wrapped__", fails)
        with pytest.raises(RuntimeError, match="out of memory"):
            loss().backward()
    assert len(optimizer.param_groups[0]["params"]) == 4
    assert model[2].weight.grad is None
    optimizer.zero_grad()
    loss().backward()
    optimizer.step()


def test_without_its_plan_the_optimizer_steps_as_usual(planned):
    model, optimizer, loss = planned
    loss().backward()
    twin = copy.deepcopy(model)
    with pytest.raises(ApplyError, match="is not in the model that the plan is on"):
        twin(torch.randn(2, 8)).mean().backward()
    with pytest.raises(ApplyError, match="would step the optimizer"):
        applied_plan(model).verify(torch.randn(2, 8))
    applied_plan(model).remove()
    assert model[0].weight.grad is None
    before = model[0].weight.clone()
    loss().backward()
    assert torch.equal(before, model[0].weight)
    optimizer.step()
    assert not torch.equal(before, model[0].weight)


def test_smaller_batches_step_too():
    batches = [torch.randn(n, 8) for n in (4, 3, 2)]
    like_usual(partial(mlp, 8, 2), partial(optim.SGD, lr=0.1), batches, loss_fn=torch.mean, dynamic=True)


def test_a_step_waits_for_all_that_may_be_computed_from_its_parameter():
    graph = fx.Graph()
    with FakeTensorMode() as mode:
        nodes: dict[str, fx.Node] = {}

        def value(name: str, node: fx.Node, *, like: fx.Node | None = None) -> fx.Node:
            node.meta["val"] = mode.from_tensor(torch.empty(4, 4)) if like is None else like.meta["val"].t()
            nodes[name] = node
            return node

        aten = torch.ops.aten
        weight = value("weight", graph.placeholder("primals_1"))
        bias = value("bias", graph.placeholder("primals_2"))
        tangent = value("tangent", graph.placeholder("tangents_1"))
        for at, node in enumerate((weight, bias)):
            node.meta["desc"] = PlainAOTInput(at)
        made = value("made", graph.call_function(aten.exp.default, (weight,)))
        out = value("out", graph.call_function(aten.mul.Tensor, (made, bias)))
        gradient = value("gradient", graph.call_function(aten.mul.Tensor, (tangent, tangent)))
        view = value("view", graph.call_function(aten.t.default, (gradient,)), like=gradient)
        late = value("late", graph.call_function(aten.mul.Tensor, (tangent, made)))
        last = value("last", graph.call_function(aten.mul.Tensor, (late, view)))
        graph.output((out, gradient, last))
        order = add_steps(graph, Order([made, out, gradient, view, late, last], {weight, bias, made, out}), 1, {0, 1})
    steps = {step.args[0]: step for step in steps_in(graph)}
    places = {node: i for i, node in enumerate(order.nodes)}
    assert places[late] < places[steps[weight]] < places[last]  # what is made of it may be recomputed until then
    copied = steps[weight].args[1]
    assert (copied.target, copied.args) == (aten.clone.default, (gradient,))  # it is read later, through a view
    assert places[steps[bias]] > places[last]
    assert steps[bias].args[1] is last
    assert graph.output_node().args[0] == (out, None, None)


def test_a_plan_may_wait_for_the_first_step_and_keeps_no_model_alive():
    model = seeded(partial(mlp, 128, 6))
    optimizer, batch = optim.SGD(model.parameters(), lr=0.1), torch.randn(2, 128)
    parameters = sum(p.nbytes for p in model.parameters())
    asked = {"loss_fn": torch.mean, "optimizer": optimizer, "step_in_backward": True, "progress": False}
    p = plan(model, budget_gb=1.5 * parameters / 2**30, **asked)  # gradients of all would not fit
    p.apply()
    for _ in range(2):
        model(batch).mean().backward()
        optimizer.step()
    held = weakref.ref(model[0].weight)
    del model, optimizer, p, asked
    gc.collect()
    assert held() is None


def test_the_plan_says_so(tmp_path):
    model = nn.Linear(4, 4)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    asked = {"budget_gb": 1, "loss_fn": torch.mean, "optimizer": optimizer, "progress": False}
    usual, stepping = (plan(model, torch.zeros(2, 4), step_in_backward=given, **asked) for given in (False, True))
    assert "steps in the backward pass" in str(planner.compare(usual, stepping))
    assert "optimizer step" not in stepping.phase_peaks
    stepping.save(tmp_path / "plan.json")
    filed = planner.Plan.load(tmp_path / "plan.json")
    with pytest.raises(OptionError, match="needs the optimizer that steps"):
        filed.apply(model)
