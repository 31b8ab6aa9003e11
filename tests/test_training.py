"""Planned models in a training loop, and what applying leaves unchanged."""

import copy
import warnings
from functools import partial

import pytest
import torch
from torch import nn

from planner import ApplyError, plan

from .plans import for_budget
from .real_models import gpt2, resnet50
from .variants import more

pytestmark = pytest.mark.usefixtures("short_searches")


def resnet():
    """The first block of each of the first two stages of a ResNet-50."""
    return resnet50(depths=(1, 1))


def train(model, batches, evaluation):
    """Five AdamW steps with an evaluation pass between; the losses of all of them."""
    torch.manual_seed(3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for n, batch in enumerate(batches):
        if n == 3:
            model.eval()
            with torch.no_grad():
                losses.append(model(**evaluation).loss.item())
            model.train()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.compat
@pytest.mark.parametrize("make", [lambda: gpt2(dropout=0.1, layers=1), *more(resnet)], ids=["gpt2_dropout", "resnet"])
def test_five_adamw_steps_with_a_smaller_last_batch_and_an_evaluation(make):
    case = make()
    plain = copy.deepcopy(case.model)
    smaller = {k: v[:2] for k, v in case.batch.items()}
    batches = [case.batch] * 4 + [smaller]
    options = {"account_gb": {"optimizer state": 0, "optimizer step": 0}}  # for the step up to its backward pass
    everything = plan(case.model, case.batch, budget_gb="100%", **options)
    p = for_budget(everything, 0.9 * everything.baseline_peak_bytes / 2**30)
    assert p.overhead > 0
    p.apply()
    assert train(case.model, batches, case.batch) == train(plain, batches, case.batch)
    for (name, ours), theirs in zip(case.model.state_dict().items(), plain.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs), name


def test_without_a_batch_the_plan_is_made_at_the_first_step():
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4))
    p = plan(model, budget_gb=12)
    with pytest.raises(ApplyError, match="first training step"):
        _ = p.peak_bytes
    assert p.apply() is model
    model(torch.randn(8, 16)).sum().backward()
    assert 0 < p.peak_bytes <= p.budget_bytes == 12 * 2**30
    assert "saved activations are recomputed" in p.summary()
    p.remove()


@pytest.mark.parametrize("make", [lambda: gpt2(layers=1), *more(resnet)], ids=["gpt2", "resnet"])
def test_real_models_need_no_batch(make):
    """GPT-2's own dummy inputs serve; a ResNet's are token ids, and do not."""
    case = make()
    expected = case.loss(case.model(**case.batch)).detach()
    p = plan(case.model, budget_gb=12)
    p.apply()
    loss = case.loss(case.model(**case.batch))
    loss.backward()
    torch.testing.assert_close(loss.detach(), expected)
    assert p.peak_bytes > 0
    assert all(q.grad is not None for q in case.model.parameters())


def test_a_models_own_convention_is_used_for_a_batch():
    model = nn.Sequential(nn.Linear(16, 4))
    model.example_input_array = torch.randn(8, 16)
    assert plan(model, budget_gb=1).peak_bytes > 0


@pytest.mark.parametrize("as_batch", [lambda x: x, lambda x: (x,), lambda x: [x], lambda x: {"input": x}])
def test_a_batch_is_a_tensor_a_sequence_or_a_mapping(as_batch):
    x = torch.randn(8, 16)
    model = nn.Linear(16, 4)
    p = plan(model, as_batch(x), budget_gb=1)
    expected = torch.autograd.grad(model(x).sum(), model.weight)[0]
    p.apply()
    model(x).sum().backward()
    assert torch.equal(model.weight.grad, expected)


def test_apply_keeps_the_object_names_and_state_and_remove_undoes_it():
    case = resnet()
    model, state = case.model, {k: v.clone() for k, v in case.model.state_dict().items()}
    names = [name for name, _ in model.named_parameters()]
    p = plan(model, case.batch, budget_gb=1)
    assert p.apply() is model
    assert [name for name, _ in model.named_parameters()] == names
    assert list(model.state_dict()) == list(state)
    for k, v in model.state_dict().items():
        assert torch.equal(v, state[k]), k
    assert p.remove() is model
    with pytest.raises(ApplyError, match="no plan is applied"):
        p.remove()
    assert model(**case.batch).loss.grad_fn.name() == "NllLossBackward0"  # eager again


def test_verify_measures_a_real_step_and_leaves_no_trace():
    case = resnet()
    state = {k: v.clone() for k, v in case.model.state_dict().items()}
    everything = plan(case.model, case.batch, budget_gb="100%")
    p = for_budget(everything, 0.93 * everything.baseline_peak_bytes / 2**30)
    random_state = torch.get_rng_state()
    checked = p.verify()
    assert checked.within_budget
    assert abs(checked.prediction_error) < 0.02
    assert checked.gradients_agree
    assert checked.measured_bytes < checked.unplanned_bytes
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(p.grad is None for p in case.model.parameters())
    for k, v in case.model.state_dict().items():
        assert torch.equal(v, state[k]), k


class Writes(nn.Module):
    """Writes into its batch, and into a list that is given with it."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))

    def forward(self, x, log):
        log.append(len(log))
        return self.layers(x.mul_(2))


def test_verify_gives_each_of_its_steps_the_batch_as_it_was():
    model, x, log = Writes(), torch.randn(4, 8), []
    before = x.clone()
    p = plan(model, (x, log), budget_gb=1, loss_fn=torch.Tensor.mean)
    assert p.verify().gradients_agree
    assert torch.equal(x, before)
    assert log == []
    p.apply(verify=True)
    model(x, log).mean().backward()
    assert torch.equal(x, 2 * before)
    assert log == [0]
    eager = Writes()
    eager.load_state_dict(model.state_dict())
    eager(before, []).mean().backward()
    assert torch.equal(model.layers[0].weight.grad, eager.layers[0].weight.grad)


class ReturnsItsWeight(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.weight = nn.Sequential(nn.Linear(8, 8), nn.GELU()), nn.Parameter(torch.randn(64, 64))

    def forward(self, x):
        return self.layers(x), self.weight, self.weight.t()


@pytest.mark.parametrize("used", [(0,), (0, 1), (0, 1, 2)])
def test_gradients_of_parameters_that_the_model_returns_count(used):
    x = torch.randn(64, 8)
    seen = plan(
        ReturnsItsWeight(), x, budget_gb=1, loss_fn=lambda output: sum(output[at].square().mean() for at in used)
    ).verify(x)
    assert seen.measured_bytes == pytest.approx(seen.predicted_bytes, abs=64)


def test_verify_compares_sparse_gradients_by_their_values():
    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.layer = nn.Embedding(16, 8, sparse=True), nn.Linear(8, 8)

        def forward(self, ids):
            return self.layer(self.table(ids))

    seen = plan(Table(), ids := torch.tensor([1, 2, 1]), budget_gb=1, loss_fn=torch.Tensor.mean).verify(ids)
    assert seen.gradients_agree
    assert seen.gradient_error == 0


def test_verify_gives_no_gradients_to_what_the_batch_was_computed_from():
    before, model = nn.Sequential(nn.Linear(4, 8), nn.Tanh()), nn.Sequential(nn.Linear(8, 8), nn.GELU())
    x = before(torch.randn(16, 4))
    assert plan(model, x, budget_gb=1, loss_fn=torch.Tensor.mean).verify(x).gradients_agree
    assert all(p.grad is None for p in before.parameters())
    model(x).mean().backward()  # its graph is still there


def test_verify_leaves_an_optimizer_in_the_backward_pass_and_another_compiler_alone():
    model, x = torch.nn.Linear(64, 8), torch.randn(4, 64)

    def descend(p):
        p.data.sub_(0.1 * p.grad)

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(descend)
    before = [p.detach().clone() for p in model.parameters()]
    planned = plan(model, x, budget_gb=1, loss_fn=torch.Tensor.mean)
    assert planned.verify().gradients_agree
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    model(x).mean().backward()
    assert not any(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    model.compile(backend="eager")
    compiled = model._compiled_call_impl
    assert planned.verify().gradients_agree
    assert model._compiled_call_impl is compiled


def test_verify_sees_a_wrong_gradient(monkeypatch):
    case = gpt2(layers=1)
    baseline = plan(case.model, case.batch, budget_gb="100%").baseline_peak_bytes
    case.model.register_forward_pre_hook(_bias_when_planned, with_kwargs=True)
    p = plan(case.model, case.batch, budget_gb=0.8 * baseline / 2**30)
    assert not p.verify().gradients_agree


def _bias_when_planned(module, args, kwargs):
    """A model that trains differently once compiled: what `verify` is there to catch."""
    if torch.compiler.is_compiling():
        kwargs = {**kwargs, "labels": kwargs["labels"].flip(0)}
    return args, kwargs


def test_gradients_accumulate():
    case = gpt2(layers=1)
    plain = copy.deepcopy(case.model)
    plan(case.model, case.batch, budget_gb=1).apply()
    for model in (case.model, plain):
        for _ in range(2):
            model(**case.batch).loss.backward()
    for (name, ours), theirs in zip(case.model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, msg=lambda m, name=name: f"{name}: {m}")


def test_a_loss_of_several_outputs_with_loss_fn():
    case = gpt2(layers=1)

    def loss_fn(output):
        return output.loss + 1e-3 * output.logits.square().mean()

    loss_fn(case.model(**case.batch)).backward()
    expected = {name: p.grad.clone() for name, p in case.model.named_parameters()}
    case.model.zero_grad()
    plan(case.model, case.batch, budget_gb=1, loss_fn=loss_fn).apply()
    loss_fn(case.model(**case.batch)).backward()
    for name, p in case.model.named_parameters():
        torch.testing.assert_close(p.grad, expected[name], msg=lambda m, name=name: f"{name}: {m}")


def test_a_planned_model_can_be_copied_and_saved(tmp_path):
    case = gpt2(layers=1)
    plan(case.model, case.batch, budget_gb=1).apply()
    case.model(**case.batch)
    copied = copy.deepcopy(case.model)
    torch.save(case.model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    expected = case.model(**case.batch).loss
    assert torch.equal(copied(**case.batch).loss, expected)
    assert torch.equal(loaded(**case.batch).loss, expected)


class Transposed(torch.nn.Module):
    """Normalises and drops transposed tensors, for which fake tensors have other strides than the kernels return."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(32)
        self.across = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Dropout(0.1))
        self.head = torch.nn.Linear(32 * 8, 4)

    def forward(self, x):
        x = x + self.across(x.transpose(1, 2)).transpose(1, 2)
        return self.head(self.norm(x.transpose(1, 2)).transpose(1, 2).flatten(1)).square().mean()


def test_what_cannot_be_viewed_is_copied():
    model, x = Transposed(), torch.randn(48, 8, 32)

    def gradients():
        torch.manual_seed(1)
        model.zero_grad(set_to_none=True)
        model(x).backward()
        return [p.grad.clone() for p in model.parameters()]

    eager = gradients()
    plan(model, x, budget_gb=1).apply()
    assert all(map(torch.equal, gradients(), eager))


@torch.library.custom_op("planner_tests::noting_strides", mutates_args=())
def noting_strides(x: torch.Tensor) -> torch.Tensor:
    STRIDES.append(x.stride())
    return x.clone()


STRIDES: list[tuple[int, ...]] = []
noting_strides.register_fake(lambda x: x.clone())
noting_strides.register_autograd(lambda ctx, gradient: gradient)


def test_dimensions_of_one_element_have_the_strides_of_eager_mode():
    """By these kernels of `bmm` choose how to add up; a reshape tells them from its source, and a fake one does not."""

    class Attends(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.score = torch.nn.Linear(8, 1)

        def forward(self, x):
            scores = self.score(x).softmax(1).transpose(1, 2)
            return noting_strides(scores.expand(4, 1, 3).reshape(4, 1, 3)) @ x

    model, x = Attends(), torch.randn(4, 3, 8)
    model(x)
    plan(model, x, budget_gb=1, mode="aten").apply()
    model(x)
    assert STRIDES[0] == STRIDES[-1] == (3, 3, 1)


class LaidOut(torch.nn.Module):
    """Gives a layer tokens with their channels first, as they lie in memory, and drops what it makes."""

    def __init__(self, layer, image):
        super().__init__()
        self.first, self.layer, self.drop = torch.nn.Linear(8, 8), layer, torch.nn.Dropout(0.3)
        self.image, self.last = image, torch.nn.Conv2d(8, 8, 3) if image else torch.nn.Conv1d(8, 8, 3)

    def forward(self, x):
        y = self.first(x).transpose(1, 2)
        if self.image:
            y = y.reshape(*y.shape[:2], 4, -1)
        return self.layer(self.drop(self.last(self.drop(self.layer(y)))))


@pytest.mark.compat
@pytest.mark.thorough
@pytest.mark.parametrize("dynamic", [False, True], ids=["fixed", "dynamic"])
@pytest.mark.parametrize("image", [False, True], ids=["sequence", "image"])
@pytest.mark.parametrize("layer", [partial(torch.nn.GroupNorm, 2, 8), partial(torch.nn.BatchNorm2d, 8)])
def test_kernels_find_what_they_read_in_the_layouts_of_eager_mode(layer, image, dynamic):
    """Autograd copies the gradient for a group norm's kernel, where it does not lie in memory as the input does."""
    kind = torch.nn.BatchNorm1d if layer.func is torch.nn.BatchNorm2d and not image else layer.func
    torch.manual_seed(0)
    model = LaidOut(kind(*layer.args), image)
    plain = copy.deepcopy(model)
    plan(model, budget_gb=1, dynamic=dynamic, progress=False).apply()
    for rows in (3, 3, 2):
        x, y, results = torch.randn(rows, 16, 8), torch.randn(8, 1), []
        for m in (model, plain):
            torch.manual_seed(rows)
            m.zero_grad()
            loss = (m(x).mT - y[: 8 if not image else 2].mT).square().mean()
            loss.backward()
            results.append([loss, *(p.grad for p in m.parameters())])
        for found, expected in zip(*results, strict=True):
            # with symbols for sizes, gradients are laid out as the model's outputs are: their sums differ in last bits
            torch.testing.assert_close(found, expected, rtol=1e-4 * dynamic, atol=1e-6 * dynamic)


class Rotated(torch.nn.Module):
    """Multiplies pairs as complex numbers, and returns what it makes with its dimensions moved."""

    def forward(self, x):
        pairs = torch.view_as_complex(x.movedim(1, -1).contiguous().view(*x.shape[:1], *x.shape[2:], -1, 2))
        return torch.view_as_real(pairs * 1j).flatten(-2).movedim(-1, 1)


def normalised():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # there is a newer one
        return torch.nn.utils.weight_norm(torch.nn.Conv2d(8, 8, 3))


@pytest.mark.compat
@pytest.mark.parametrize(
    "layers",
    [
        lambda: [normalised()],
        lambda: [torch.nn.Conv2d(8, 8, 3), torch.nn.GroupNorm(2, 8), torch.nn.GLU(1)],
        lambda: [torch.nn.Conv2d(8, 8, 1), torch.nn.GroupNorm(2, 8), torch.nn.Conv2d(8, 8, 1)],
        lambda: [torch.nn.Conv2d(8, 8, 1), Rotated()],
    ],
    ids=["weight norm", "gated", "group norm", "rotary"],
)
def test_gradients_of_channels_last_images_are_eager_modes(layers):
    models = []
    for _ in range(2):  # weight norm cannot be copied
        torch.manual_seed(0)
        models.append(torch.nn.Sequential(*layers()))
    model, plain = models
    plan(model, budget_gb=1, progress=False).apply()
    for _ in range(3):
        x = torch.randn(4, 8, 6, 6).contiguous(memory_format=torch.channels_last)
        for m in models:
            m.zero_grad()
            m(x).mT.contiguous().sin().mean().backward()
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True))


class Reshaped(torch.nn.Module):
    """A number becomes a matrix of one, before the model's products and after them."""

    def __init__(self, shape):
        super().__init__()
        self.body, self.shape = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()), shape
        self.scale = torch.nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return (self.body(x) * self.scale.view(self.shape)).square().mean().reshape(self.shape)


@pytest.mark.parametrize("shape", [(1,), (1, 1)])
def test_a_number_may_be_reshaped(shape):
    model, x = Reshaped(shape), torch.randn(4, 8)
    plain = copy.deepcopy(model)
    plan(model, x, budget_gb=1).apply()
    for m in (model, plain):
        m(x).backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True))


class Outer(torch.nn.Module):
    """The product of two vectors as one of matrices, as rotary embeddings multiply frequencies and places."""

    def __init__(self):
        super().__init__()
        self.frequencies = torch.nn.Parameter(torch.rand(8))

    def forward(self, x):
        angles = self.frequencies.reshape(1, -1, 1) @ x.flatten().reshape(1, 1, -1)
        return (angles.cos() * angles.sin()).square().mean()


def test_vectors_are_multiplied_as_matrices():
    model, x = Outer(), torch.randn(4, 8)
    model(x).backward()
    eager = model.frequencies.grad.clone()
    model.zero_grad()
    plan(model, x, budget_gb=1).apply()
    model(x).backward()
    assert torch.equal(model.frequencies.grad, eager)
