"""What may happen to a planned model: copied, saved, moved, frozen, changed; in other modes, beside other models."""

import copy
import pickle
import subprocess
import sys
import threading
import warnings
from types import SimpleNamespace

import peft
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.utils import parametrizations

from planner import ApplyError, OptionError, PlanWarning, applied_plan, plan
from planner.devices.specs import DEVICES
from planner.requests.check import with_batch
from planner.runtime.interception import attached

from .measure import peak_of
from .plans import for_budget
from .real_models import llama
from .variants import more

pytestmark = pytest.mark.usefixtures("short_searches", "always_compiled")

BATCH, WIDTH = 256, 64


class Layers(nn.Module):
    def __init__(self, depth=3, dropout=0.1, norm=False):
        super().__init__()
        layers = []
        for _ in range(depth):
            layers += [nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(dropout)]
            layers += [nn.BatchNorm1d(WIDTH)] if norm else []
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x):
        return self.head(self.body(x))


def square(output):
    return output.float().square().mean()


def applied(model, x, share=0.8):
    """The model, planned for a share of its peak, and an unplanned twin."""
    twin = copy.deepcopy(model)
    options = {"loss_fn": square, "solver": "chen"}
    everything = plan(model, x, budget_gb=1, **options)
    p = for_budget(everything, share * everything.baseline_peak_bytes / 2**30)
    assert p.overhead > 0 or share > 1
    p.apply()
    return p, twin


@pytest.fixture
def x():
    return torch.randn(BATCH, WIDTH)


def step(model, x):
    square(model(x)).backward()


def gradients(model, run):
    torch.manual_seed(7)
    run(model)
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    found |= {name: b.clone() for name, b in model.named_buffers()}
    model.zero_grad()
    return found


def assert_same(model, twin, run, tolerance=0.0):
    """Gradients and buffers are those of the twin, and the model ran by a plan."""
    before = attached(model).regions.ran
    ours, theirs = gradients(model, run), gradients(twin, run)
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=tolerance, atol=tolerance * 1e-2, msg=name)
    assert attached(model).regions.ran > before
    return theirs


def change(model, twin, what):
    for m in (model, twin):
        what(m)


# copies and saves


def test_a_copy_of_what_torch_compile_made_evaluates_as_it_was_compiled(x):
    ran = []

    def backend(graph, inputs):
        def run(*args):
            ran.append(graph)
            return graph(*args)

        return run

    model = torch.compile(Layers(dropout=0.0), backend=backend)
    plan(model, x, budget_gb=1, mode="aten").apply()
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for p in copied.parameters():
            p.mul_(2)
        expected = Layers.forward(copied._orig_mod, x)
        ran.clear()
        for _ in range(2):
            assert torch.equal(copied(x), expected)
    assert len(ran) == 2
    step(copied, x)
    ran.clear()
    with torch.no_grad():
        assert torch.equal(copied(x), expected)
        assert torch.equal(copied._orig_mod(x), expected)
    assert len(ran) == 1


def test_a_copy_trains_by_the_plan_in_its_memory_and_apart_from_its_original(x, tmp_path):
    model = Layers(depth=4)
    p, twin = applied(model, x)
    assert_same(model, twin, lambda m: step(m, x))
    copied = copy.deepcopy(model)
    assert_same(copied, twin, lambda m: step(m, x))
    of_copy = applied_plan(copied)
    assert of_copy.request.model is copied
    assert applied_plan(model).request.model is model
    held = p.resident_bytes
    assert held + peak_of(lambda: step(copied, x), tmp_path) <= p.budget_bytes
    assert held + peak_of(lambda: step(twin, x), tmp_path) > p.budget_bytes
    copied.zero_grad()
    with torch.no_grad():
        for w in copied.parameters():
            w.mul_(2)
    twin.zero_grad()
    assert_same(model, twin, lambda m: step(m, x))
    assert p.remove(copied) is copied
    assert applied_plan(copied) is None
    assert applied_plan(copy.deepcopy(copied)) is None
    assert applied_plan(model).request.model is model


def test_a_copy_of_what_holds_a_planned_model_or_one_not_planned_yet(x):
    outer = Layers()
    twin = copy.deepcopy(outer)
    p = plan(outer.body, budget_gb=1, loss_fn=square)
    p.apply()
    copied = copy.deepcopy({"models": [outer]})["models"][0]
    assert gradients(copied, lambda m: step(m, x)).keys() == gradients(twin, lambda m: step(m, x)).keys()
    assert applied_plan(copied.body).request.model is copied.body
    assert applied_plan(outer.body) is None
    p.remove(copied.body)
    p.remove()


def test_a_graph_module_can_be_copied_and_saved(x):
    model = torch.fx.symbolic_trace(Layers(dropout=0.0))
    _, twin = applied(model, x)
    copied = copy.deepcopy(model)
    assert_same(copied, twin, lambda m: step(m, x))
    loaded = pickle.loads(pickle.dumps(model))
    assert applied_plan(loaded) is None
    assert torch.equal(loaded(x), twin(x))


def test_a_saved_model_loads_where_the_planner_is_not(x, tmp_path):
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
    plan(model, x, budget_gb=1, loss_fn=square).apply()
    step(model, x)
    expected = model[0].weight.grad.clone()
    model.zero_grad()
    torch.save(model, tmp_path / "model.pt")
    torch.save((x, expected), tmp_path / "expected.pt")
    script = (
        "import sys, copy, torch\n"
        "sys.modules['planner'] = None\n"
        "model = torch.load(sys.argv[1] + '/model.pt', weights_only=False)\n"
        "x, expected = torch.load(sys.argv[1] + '/expected.pt')\n"
        "for m in (model, copy.deepcopy(model)):\n"
        "    m.__call__(x).square().mean().backward()\n"
        "    torch.testing.assert_close(m[0].weight.grad, expected)\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True)
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    assert applied_plan(loaded) is None
    plan(loaded, x, budget_gb=1, loss_fn=square).apply()
    loaded(x)


def test_state_dicts_go_both_ways(x):
    model = Layers(norm=True)
    _, twin = applied(model, x)
    assert_same(model, twin, lambda m: step(m, x))
    for assign in (False, True):
        other = Layers(norm=True)
        model.load_state_dict({k: v.clone() for k, v in other.state_dict().items()}, assign=assign)
        assert_same(model, other, lambda m: step(m, x))
    fresh = Layers(norm=True)
    fresh.load_state_dict(model.state_dict())
    assert_same(model, fresh, lambda m: step(m, x))
    assert applied_plan(model).request.model is model


# moves


def test_from_meta_to_the_cpu(x):
    with torch.device("meta"):
        model = Layers()
    p = plan(model, torch.empty(BATCH, WIDTH, device="meta"), budget_gb=1, loss_fn=square, device="cpu")
    p.apply()
    twin = Layers()
    model.to_empty(device="cpu").load_state_dict(twin.state_dict())
    assert_same(model, twin, lambda m: step(m, x))
    moved = applied_plan(model).request
    assert (moved.model_device, moved.measure_on) == (torch.device("cpu"), torch.device("cpu"))


def test_a_moved_model_is_planned_for_where_it_is(x, monkeypatch):
    card = SimpleNamespace(workspaces=lambda device: 0)
    monkeypatch.setattr("planner.requests.check.present", lambda device: card if device.type == "cuda" else None)
    monkeypatch.setattr("planner.devices.find._card", lambda place: DEVICES["a100"])

    class OnACard(Layers):
        """What a model looks like there, for machines without a GPU."""

        def parameters(self, recurse=True):
            yield FakeTensor(FakeTensorMode(), torch.empty(1, device="meta"), torch.device("cuda:0"))

    request = plan(Layers(), x, budget_gb="50%", loss_fn=square).request
    moved = with_batch(request, OnACard(), (x,), {})
    assert (moved.model_device, moved.measure_on, moved.costs) == (
        torch.device("cuda:0"),
        torch.device("cuda:0"),
        "measured",
    )
    assert moved.device.type == "cuda"
    assert moved.budget_bytes == moved.device.memory // 2 != request.budget_bytes
    back = with_batch(moved, Layers(), (x,), {})
    assert (back.device, back.budget_gb, back.costs) == (request.device, request.budget_gb, "roofline")
    named = plan(Layers(), x, budget_gb=1, device="cpu", loss_fn=square).request
    assert with_batch(named, OnACard(), (x,), {}).device.name == "cpu"
    with torch.device("meta"), pytest.raises(OptionError, match="meta"):
        with_batch(request, Layers(), (x,), {})


def test_another_dtype_is_planned_anew(x):
    model = Layers(dropout=0.0)
    p, twin = applied(model, x, share=0.9)
    change(model, twin, nn.Module.bfloat16)
    assert_same(model, twin, lambda m: step(m, x.bfloat16()))
    assert applied_plan(model).account["parameters"] == p.account["parameters"] // 2
    change(model, twin, nn.Module.float)
    assert_same(model, twin, lambda m: step(m, x))


# modes


def test_plans_are_made_whatever_the_mode_of_the_caller(x):
    for mode in (torch.no_grad, torch.inference_mode):
        model = Layers()
        twin = copy.deepcopy(model)
        with mode():
            plan(model, x, budget_gb=1, loss_fn=square).apply()
            model(x)
        assert_same(model, twin, lambda m: step(m, x))


def test_evaluation_without_gradients_and_fine_tuning_without_dropout(x):
    model = Layers(norm=True)
    _, twin = applied(model, x)

    def validate_between(m):
        step(m, x)
        m.eval()
        with torch.inference_mode():
            m(x)
        m.train()
        with torch.set_grad_enabled(True):
            step(m, 2 * x)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PlanWarning)  # gradients of the first step
        assert_same(model, twin, validate_between)
    change(model, twin, nn.Module.eval)
    assert_same(model, twin, lambda m: step(m, x))
    change(model, twin, nn.Module.train)
    change(model, twin, lambda m: m.body[3].eval().requires_grad_(False))  # a frozen BatchNorm
    assert_same(model, twin, lambda m: step(m, x))


@pytest.mark.compat
@pytest.mark.parametrize("first", [False, True])
def test_autocast_changed_between_plan_and_use(x, first):
    model = Layers(depth=2, dropout=0.0)
    twin = copy.deepcopy(model)
    with torch.autocast("cpu", torch.bfloat16, enabled=first):
        plan(model, x, budget_gb=1, loss_fn=square).apply()

    def inside(m):
        with torch.autocast("cpu", torch.bfloat16):
            output = m(x)
        square(output).backward()

    assert_same(model, twin, inside)
    assert_same(model, twin, lambda m: step(m, x))


def test_a_scaler_clipping_and_settings_of_torch(x):
    model = Layers()
    _, twin = applied(model, x, share=0.9)  # with another default dtype, dropout takes one more tensor
    assert_same(model, twin, lambda m: step(m, x))
    try:
        torch.use_deterministic_algorithms(True)
        torch.set_default_dtype(torch.float64)
        assert_same(model, twin, lambda m: step(m, x))
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_default_dtype(torch.float32)

    def scaled(m):
        scaler, optimizer = torch.amp.GradScaler("cpu"), torch.optim.SGD(m.parameters())
        scaler.scale(square(m(x))).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(m.parameters(), 1e-3)

    assert_same(model, twin, scaled)


# what depends on the order of passes


def test_backward_again_and_backward_of_two_losses(x):
    model = Layers(norm=True)
    _, twin = applied(model, x, share=0.95)

    def again(m):
        loss = square(m(x))
        loss.backward(retain_graph=True)
        loss.backward()

    def two(m):
        output = m(x)
        output[:, :4].sum().backward(retain_graph=True)
        output[:, 4:].square().sum().backward()

    assert_same(model, twin, again)
    assert_same(model, twin, two)


def test_two_forward_passes_before_a_backward_pass_are_right_and_what_they_hold_is_said(x):
    model = Layers(norm=True)
    p, twin = applied(model, x)
    with warnings.catch_warnings():
        warnings.simplefilter("error", PlanWarning)
        for _ in range(4):  # a pass that is thrown away holds nothing, nor does one that has been through
            model(x)
            loss = square(model(x))
            loss.backward()
            model.zero_grad()
    twin.load_state_dict(model.state_dict())
    with pytest.warns(PlanWarning, match="more than its budget") as seen:
        assert_same(model, twin, lambda m: (square(m(x)) + square(m(2 * x))).backward())
    assert seen[0].filename == __file__
    room = 4 * p.budget_bytes
    ample = plan(twin, x, budget_gb=room / 2**30, loss_fn=square)
    ample.apply()
    with warnings.catch_warnings():
        warnings.simplefilter("error", PlanWarning)
        step(twin, x)
        twin.zero_grad()
        (square(twin(x)) + square(twin(x))).backward()


def test_after_an_exception_the_plan_is_still_on(x):
    class Fails(Layers):
        fails = False

        def forward(self, x):
            hidden = self.body(x)
            if self.fails:
                raise ValueError("on purpose")
            return self.head(hidden)

    model = Fails()
    _, twin = applied(model, x)
    assert_same(model, twin, lambda m: step(m, x))
    model.fails = True
    with pytest.raises(ValueError, match="on purpose"):
        model(x)
    model.fails = False
    output = model(x)
    output.register_hook(lambda gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        square(output).backward()
    model.zero_grad()
    del output
    assert_same(model, twin, lambda m: step(m, x))


def test_threads_train_one_model(x):
    model = Layers(dropout=0.0)
    _, twin = applied(model, x)
    expected = torch.autograd.grad(square(twin(x)), list(twin.parameters()))
    found = []

    def work():
        found.append(torch.autograd.grad(square(model(x)), list(model.parameters())))

    threads = [threading.Thread(target=work) for _ in range(3)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PlanWarning)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(found) == 3
    for each in found:
        for ours, theirs in zip(each, expected, strict=True):
            assert torch.equal(ours, theirs)


# other models


def test_a_student_and_its_teacher(x):
    (student, teacher), twins = (Layers(), Layers(depth=2)), []
    for model in (student, teacher):
        twins.append(applied(model, x, share=1.5)[1])  # each step holds the other model's, too
    others = {id(student): teacher, id(twins[0]): twins[1]}

    def distill(m):
        (m(x) - others[id(m)](x)).square().mean().backward()

    assert_same(student, twins[0], distill)
    change(teacher, twins[1], lambda m: m.requires_grad_(False))  # runs without gradients: nothing to hold
    assert_same(student, twins[0], distill)
    assert not teacher(x).requires_grad


def test_a_planned_part_of_a_model_that_is_not_and_of_one_that_is_compiled(x):
    model = Layers()
    twin = copy.deepcopy(model)
    applied(model.body, x)
    before = attached(model.body).regions.ran
    for call in (model, torch.compile(model, backend="aot_eager")):
        ours = gradients(model, lambda m, call=call: step(call, x))
        for name, expected in gradients(twin, lambda m: step(m, x)).items():
            assert torch.equal(ours[name], expected), name
    assert attached(model.body).regions.ran == before + 2


def test_a_planned_part_of_a_planned_model_is_refused(x):
    model = Layers()
    inner, _ = applied(model.body, x)
    outer = plan(model, x, budget_gb=1, loss_fn=square)
    with pytest.raises(ApplyError, match="body of this Layers"):
        outer.apply()
    assert applied_plan(model) is None
    inner.remove()
    outer.apply()
    inner.apply()
    with pytest.raises(ApplyError, match="body of this Layers"):
        model(x)
    inner.remove()
    step(model, x)
    model.head.compile(backend="eager")
    with pytest.raises(ApplyError, match="head of this Layers"):
        model(x)
    model.head._compiled_call_impl = None
    step(model, x)


# changes after the first step

CHANGES = {
    "frozen layers": lambda m: m.body[:3].requires_grad_(False),
    "a head of another size": lambda m: setattr(m, "head", _seeded(lambda: nn.Linear(WIDTH, 5))),
    "another activation": lambda m: m.body.__setitem__(1, nn.Tanh()),
    "one module more": lambda m: m.body.append(nn.Tanh()),
    "another rate of dropout": lambda m: setattr(m.body[2], "p", 0.5),
    "another forward": lambda m: setattr(m.body[4], "forward", torch.tanh),
    "spectral_norm": lambda m: _seeded(lambda: parametrizations.spectral_norm(m.body[3])),
    "a layer used twice": lambda m: m.body.append(m.body[0]),
    "a hook on the model": lambda m: m.register_forward_hook(lambda module, args, output: 2 * output),
    "a hook on a part": lambda m: m.body[4].register_forward_hook(lambda module, args, output: 2 * output),
    "a backward hook": lambda m: m.register_full_backward_pre_hook(lambda module, gradient: (2 * gradient[0],)),
}


def _seeded(make):
    torch.manual_seed(5)
    return make()


TENSORS_CHANGED = {
    "one part in another mode": lambda m: m.body[2].eval(),
    "a frozen weight": lambda m: m.head.weight.requires_grad_(False),
    "a weight that is trained again": lambda m: m.head.weight.requires_grad_(True),
    "another parameter": lambda m: setattr(m.head, "bias", nn.Parameter(torch.arange(8.0))),
    "data of another size": lambda m: [setattr(p, "data", p.data[:5].clone()) for p in m.head.parameters()],
    "no bias": lambda m: setattr(m.head, "bias", None),
    "a weight of two layers": lambda m: setattr(m.body[4], "weight", m.body[0].weight),
    "another buffer": lambda m: setattr(m.body[3], "running_mean", torch.full((WIDTH,), 3.0)),
    "statistics in use": lambda m: m.body[3].eval(),
    "other statistics": lambda m: setattr(m.body[3], "running_var", torch.full((WIDTH,), 2.0)),
    "a module less": lambda m: m.body.__delitem__(5),
}


@pytest.mark.filterwarnings("ignore:Full backward hook")
@pytest.mark.parametrize("changes", [*more(CHANGES), TENSORS_CHANGED], ids=["modules", "tensors"])
def test_a_model_changed_after_its_first_step(x, changes):
    model = Layers(depth=2, norm=changes is TENSORS_CHANGED)
    twin = copy.deepcopy(model)
    plan(model, x, budget_gb=1, loss_fn=square, solver="chen").apply()
    before = assert_same(model, twin, lambda m: step(m, x))
    for what, how in changes.items():
        change(model, twin, how)
        after = assert_same(model, twin, lambda m: step(m, x))
        assert before.keys() != after.keys() or any(not torch.equal(before[n], after[n]) for n in after), what
        before = after


def test_a_class_changed_after_the_first_step(x, monkeypatch):
    class Slope(nn.Module):
        def forward(self, x):
            return 2 * x

    class Scaled(Layers):
        def __init__(self):
            super().__init__(depth=2)
            self.slope = Slope()

        def forward(self, x):
            return super().forward(self.slope(x))

    model = Scaled()
    _, twin = applied(model, x)
    before = assert_same(model, twin, lambda m: step(m, x))
    monkeypatch.setattr(Slope, "forward", lambda self, x: 3 * x)
    after = assert_same(model, twin, lambda m: step(m, x))
    assert any(not torch.equal(before[n], after[n]) for n in after)
    change(model, twin, lambda m: setattr(m.slope, "__class__", nn.Identity))
    change(model, twin, lambda m: setattr(m, "training", False))  # of this module alone
    last = assert_same(model, twin, lambda m: step(m, x))
    assert any(not torch.equal(after[n], last[n]) for n in after)


def test_a_model_that_is_as_before_has_its_plan_again(x):
    model = Layers()
    _, twin = applied(model, x)
    runtime = model._compiled_call_impl
    for _ in range(2):  # the first shows what the loop holds
        assert_same(model, twin, lambda m: step(m, x))
    state = runtime.state
    change(model, twin, lambda m: m.head.requires_grad_(False))
    assert_same(model, twin, lambda m: step(m, x))
    assert runtime.state != state
    assert len(runtime.plans) == 2
    change(model, twin, lambda m: m.head.requires_grad_(True))
    assert_same(model, twin, lambda m: step(m, x))
    assert runtime.state == state
    assert len(runtime.plans) == 2
    again = runtime.state
    change(model, twin, lambda m: m.load_state_dict(Layers().state_dict()) and None)
    twin.load_state_dict(model.state_dict())
    assert_same(model, twin, lambda m: step(m, x))
    assert runtime.state is again


def test_a_hook_on_every_module_after_the_first_step(x):
    model = Layers()
    _, twin = applied(model, x)
    assert_same(model, twin, lambda m: step(m, x))
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, args, output: 1.5 * output if isinstance(module, nn.GELU) else None
    )
    try:
        assert_same(model, twin, lambda m: step(m, x))
    finally:
        handle.remove()
    assert_same(model, twin, lambda m: step(m, x))


def test_an_input_that_needs_a_gradient_and_nothing_else(x):
    model = Layers(dropout=0.0)
    _, twin = applied(model, x)
    change(model, twin, lambda m: m.requires_grad_(False))
    assert not model(x).requires_grad
    found = []
    for m in (model, twin):
        needs = x.clone().requires_grad_()
        step(m, needs)
        found.append(needs.grad)
    assert torch.equal(*found)
    assert attached(model).regions.ran == 1


# LoRA


@pytest.mark.parametrize("planned_first", [False, *more(True)])
def test_lora(planned_first):
    case = llama(batch=2, layers=1)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    base = case.model
    if planned_first:
        first = plan(base, case.batch, budget_gb=1, solver="chen")
        first.apply()
        base(**case.batch).loss.backward()
        base.zero_grad()
    model = peft.get_peft_model(base, config)
    planned = base if planned_first else model
    twin = copy.deepcopy(model)
    if planned_first:
        first.remove(twin.get_base_model())
    else:
        plan(model, case.batch, budget_gb=1, solver="chen").apply()

    def train(m):
        m(**case.batch).loss.backward()

    def same():
        before = attached(planned).regions.ran
        ours, theirs = gradients(model, train), gradients(twin, train)
        assert ours.keys() == theirs.keys()
        for name in ours:
            torch.testing.assert_close(ours[name], theirs[name], rtol=1e-4, atol=1e-6, msg=name)
        assert attached(planned).regions.ran > before

    same()
    change(model, twin, lambda m: m.merge_adapter())
    with torch.no_grad():
        assert torch.equal(model(**case.batch).loss, twin(**case.batch).loss)
    change(model, twin, lambda m: m.unmerge_adapter())
    same()
