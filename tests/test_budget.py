"""What a budget may be, what counts against it, and what is done where a prediction is wrong."""

import os
import warnings
from functools import partial

import numpy
import pytest
import torch
import transformers
from torch import nn

import planner
from planner import PlanWarning, applied_plan, plan
from planner.capture.trace.step import capture
from planner.codegen.emit import keep_everything
from planner.devices.caching_allocator import reserved
from planner.devices.specs import DEVICES
from planner.lowering.margin import allocator_events
from planner.planning.fragmentation import solve_with_margin
from planner.planning.pipeline import lower
from planner.planning.solution import solution_of
from planner.requests.check import check
from solvers import simulate

from .measure import held_before, peak_of, results, step_peak
from .plans import for_budget
from .real_models import Case, gpt2, tokens, unet
from .variants import more

pytestmark = pytest.mark.usefixtures("short_searches")

RAM = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
EARLIER = "gradients of earlier microbatches"


def layers() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(*[m for _ in range(6) for m in (nn.Linear(64, 64), nn.GELU())]), torch.randn(512, 64)


def convolutions() -> tuple[nn.Module, torch.Tensor]:
    blocks = [m for _ in range(8) for m in (nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU())]
    return nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), *blocks).train(), torch.zeros(16, 3, 112, 112)


def tiny_llama() -> transformers.PreTrainedModel:
    config = transformers.LlamaConfig(
        num_hidden_layers=2, hidden_size=256, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=1000, max_position_embeddings=512, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).train()


def on_meta() -> transformers.PreTrainedModel:
    with torch.device("meta"):
        return tiny_llama()


# What a budget may be


def test_a_share_of_the_memory_is_a_budget():
    model, x = layers()
    p = plan(model, x, budget_gb="50%", loss_fn=torch.Tensor.mean)
    assert p.budget_bytes == pytest.approx(RAM / 2, abs=1)
    on_a_card = plan(model, x, budget_gb="12.5 %", loss_fn=torch.Tensor.mean, device="a100-40gb")
    assert 4 * 2**30 < on_a_card.budget_bytes < 5 * 2**30


@pytest.mark.parametrize("budget", ["12", "0%", "101%", "-5%", "half", "%", "nan%"])
def test_words_that_are_no_budget(budget):
    model, x = layers()
    with pytest.raises(planner.BudgetError, match=budget):
        plan(model, x, budget_gb=budget)


@pytest.mark.parametrize(
    ("given", "nbytes"),
    [
        (".5 GB", 2**29),
        ("12GB", 12 * 2**30),
        ("12 GiB", 12 * 2**30),
        ("500 MiB", 500 * 2**20),
        ("1.5mb", 3 * 2**19),
        ("1.5e9 B", 1.5e9),
    ],
)
def test_a_budget_may_have_a_unit(given, nbytes):
    model, x = layers()
    assert plan(model, x, budget_gb=given, loss_fn=torch.Tensor.mean).budget_bytes == nbytes


def test_a_budget_may_be_a_number_of_numpys():
    model, x = layers()
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        p = plan(model, x, budget_gb=numpy.float32(12), loss_fn=torch.Tensor.mean)
    assert p.budget_bytes == 12 * 2**30
    with pytest.raises(planner.BudgetError) as e:
        plan(model, x, budget_gb=10**400)
    assert len(str(e.value)) < 400


@pytest.mark.parametrize("given", [12e9, 12 * 2**30, 3_000_000])
def test_bytes_in_the_place_of_gigabytes_are_no_budget(given):
    model, _ = layers()
    with pytest.raises(planner.BudgetError, match=r"more than any device has. As bytes it would be .* give budget_gb="):
        plan(model, budget_gb=given)


def test_megabytes_in_the_place_of_gigabytes_are_warned_of():
    model, x = layers()
    with pytest.warns(PlanWarning, match="give '12000 MB'"):
        plan(model, x, budget_gb=12000, loss_fn=torch.Tensor.mean)


@pytest.mark.parametrize(
    ("loss_fn", "words"),
    [
        (nn.CrossEntropyLoss(), r"input, target.*lambda output: CrossEntropyLoss\(\)\(output, target\)"),
        (nn.functional.mse_loss, r"lambda output: mse_loss\(output, target\)"),
        (nn.MSELoss, r"is a class.*lambda output: MSELoss\(\)\(output, target\)"),
    ],
)
def test_a_loss_that_takes_targets_is_explained(loss_fn, words):
    model, _ = layers()
    with pytest.raises(planner.OptionError, match=words):
        plan(model, budget_gb=1, loss_fn=loss_fn)


def test_no_budget_is_the_memory_of_the_card_that_is_planned_for():
    model, x = layers()
    p = plan(model, x, loss_fn=torch.Tensor.mean, device="t4")
    assert 14 * 2**30 < p.budget_bytes < 16 * 2**30
    with pytest.raises(planner.BudgetError, match="None"):
        plan(model, x, loss_fn=torch.Tensor.mean)


def test_a_budget_above_the_memory_is_warned_of():
    model, x = layers()
    with pytest.warns(PlanWarning, match=r"budget_gb=64.*t4"):
        plan(model, x, budget_gb=64, device="t4", loss_fn=torch.Tensor.mean)


# What counts


def test_a_card_adds_its_lines_and_they_can_be_set():
    model, x = layers()
    options = {"budget_gb": 4, "loss_fn": torch.Tensor.mean, "device": "h100"}
    p = plan(model, x, **options)
    assert p.account["CUDA context"] > 2**28
    assert p.account["cuBLAS workspace"] == DEVICES["h100"].blas
    assert p.account["fragmentation margin"] > 0
    mine = {"CUDA context": 0.25, "fragmentation margin": 0, "an average of the weights": 1}
    q = plan(model, x, account_gb=mine, **options)
    assert q.account["CUDA context"] == 2**28
    assert q.account["an average of the weights"] == 2**30
    assert not q.account["fragmentation margin"]
    for each in (p, q):
        assert sum(each.account.values()) == each.peak_bytes
    on_cpu = plan(model, x, budget_gb=1, loss_fn=torch.Tensor.mean)
    assert not on_cpu.account["CUDA context"]
    assert not on_cpu.account["cuBLAS workspace"]


def test_a_budget_named_as_feasible_on_a_card_is(monkeypatch):
    model, images = convolutions()
    options = {"device": "h100", "loss_fn": torch.Tensor.mean, "solver": "chen"}
    for allocator in ("", "expandable_segments:True"):
        monkeypatch.setenv("PYTORCH_ALLOC_CONF", allocator)
        with pytest.raises(planner.InfeasibleBudgetError) as e:
            plan(model, images, budget_gb=1e-3, **options)
        p = plan(model, images, budget_gb=e.value.minimum_gb, **options)
        assert p.peak_bytes <= p.budget_bytes


@pytest.mark.parametrize("share", more(1.0, 1.02))
def test_a_known_plan_for_a_card_is_taken_with_its_margin(share, tmp_path):
    model, images = convolutions()
    options = {"device": "rtx3090", "loss_fn": torch.Tensor.mean}
    with pytest.raises(planner.InfeasibleBudgetError) as e:
        plan(model, images, budget_gb=1e-3, **options)
    p = plan(model, images, budget_gb=share * e.value.minimum_gb, **options)
    p.save(tmp_path / "plan.json")
    q = plan(model, images, budget_gb=share * e.value.minimum_gb, known=tmp_path / "plan.json", **options)
    assert "the same step and budget" in q.note
    assert (q.account, q.timeline) == (p.account, p.timeline)


@pytest.mark.parametrize("share", [1.0, *more(1.02), 1.1, *more(1.3)])
def test_a_plan_for_a_card_fits_its_caching_allocator(share):
    """What the allocator reserves by simulation, at the least budget that is named and above it."""
    model, images = convolutions()
    options = {"device": "rtx3090", "loss_fn": torch.Tensor.mean}
    with pytest.raises(planner.InfeasibleBudgetError) as e:
        plan(model, images, budget_gb=1e-3, **options)
    request = check(model, images, None, budget_gb=share * e.value.minimum_gb, **options)
    graph = capture(request.model, request.args, request.kwargs, keep_everything, request.loss_fn)
    bare = lower(request, graph)
    step, solution = solve_with_margin(bare, request, partial(solution_of, request=request, graph=graph))
    assert solution.timeline.peak <= request.budget_bytes
    assert simulate(step.problem, solution.schedule).peak == solution.timeline.peak
    events = allocator_events(bare, request, solution.schedule)
    assert not reserved(events, request.budget_bytes - step.account["CUDA context"]).out_of_memory
    assert step.account["fragmentation margin"] > 0


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"device": "h1000"}, "h100"),
        ({"device": torch.device("meta")}, "h100"),
        ({"optimizer": "adamwx"}, "adamw"),
        ({"account_gb": {"activations": 1}}, "activations"),
        ({"account_gb": {"CUDA context": -1}}, "CUDA context"),
        ({"account_gb": 3}, "account_gb=3"),
        ({"account_gb": {"a": 1e300}}, "account_gb="),
        ({"time_limit": 10**400}, "time_limit="),
        ({"progress": "no"}, "progress='no'"),
        ({"host_gb": 10**400}, "host_gb="),
        ({"shard": 0}, "shard=0"),
        ({"accumulate": 2}, "accumulate=2"),
        ({"costs": "guessed"}, "guessed"),
        ({"costs": "measured", "device": "t4"}, "measured"),
    ],
    ids=str,
)
def test_options_that_cannot_be_used_are_named(options, named):
    model, x = layers()
    with pytest.raises(planner.OptionError, match=named):
        plan(model, x, budget_gb=1, loss_fn=torch.Tensor.mean, **options)


@pytest.mark.thorough
def test_a_model_on_meta_is_planned_as_the_real_one():
    batch = tokens(1000, 2, 256)
    options = {"budget_gb": 1, "device": "rtx4090", "optimizer": "adamw"}
    there, here = plan(on_meta(), batch, **options), plan(tiny_llama(), batch, **options)
    assert there.account == here.account
    assert there.baseline_peak_bytes == here.baseline_peak_bytes
    with pytest.raises(planner.OptionError, match="meta"):
        plan(on_meta(), batch, budget_gb=1)


@pytest.mark.thorough
def test_devices_share_parameters_gradients_and_state():
    batch = tokens(1000, 1, 64)
    model = on_meta()
    whole = sum(p.nbytes for p in model.parameters())
    alone = plan(model, batch, device="h200", optimizer="adamw-fused")
    shared = plan(model, batch, device="h200", optimizer="adamw-fused", shard=8)
    assert alone.account["parameters"] == whole
    assert whole / 8 <= shared.account["parameters"] < whole / 8 + 8 * 100
    assert shared.account["optimizer state"] == pytest.approx(alone.account["optimizer state"] / 8, rel=0.01)
    block = sum(p.nbytes for p in model.model.layers[0].parameters())
    others = whole - 2 * block
    assert shared.account["parameters gathered for use"] == others + 2 * block
    last = [m.held_bytes for m in alone.timeline if m.phase == "optimizer"]
    assert len(last) == 1


# What is done where a prediction is wrong


@pytest.fixture
def no_workspaces(monkeypatch):
    """A planted misprediction: the planner believes that ops need no memory of their own."""
    monkeypatch.setattr("planner.costs.ops.measure", lambda *_, **__: {})


def tight(case: Case) -> planner.Plan:
    everything = plan(case.model, case.batch, budget_gb="100%", loss_fn=case.loss_fn)
    return for_budget(everything, 0.6 * everything.baseline_peak_bytes / 2**30)


@pytest.mark.thorough
@pytest.mark.usefixtures("no_workspaces")
def test_a_misprediction_is_found_and_repaired(tmp_path):
    case = unet(channels=(32,), middle=False)
    p = tight(case)
    seen = p.verify()
    assert seen.measured_bytes > p.budget_bytes
    assert not seen.within_budget
    with pytest.raises(planner.VerificationError, match="after 0 repairs"):
        p.repair(attempts=0)
    q = p.repair()
    assert "more than predicted" in q.note
    assert q.account["found by a real step"] > 0
    assert q.verify().within_budget
    assert case.model._compiled_call_impl is None
    q.apply()
    assert held_before(case) + step_peak(case, tmp_path) <= p.budget_bytes == q.budget_bytes


@pytest.mark.thorough
@pytest.mark.usefixtures("no_workspaces")
def test_a_plan_may_verify_itself_at_the_first_step(tmp_path):
    case = unet(channels=(32,), middle=False)
    expected = results(case)
    p = tight(case)
    p.apply(verify=True)
    ours = results(case)
    for key, theirs in expected.items():
        torch.testing.assert_close(ours[key], theirs, msg=lambda m, key=key: f"{key}: {m}")
    repaired = applied_plan(case.model)
    assert repaired is not p
    assert "more than predicted" in repaired.note
    assert held_before(case) + step_peak(case, tmp_path) <= p.budget_bytes


def test_a_plan_that_holds_is_left_alone():
    case = gpt2(layers=1)
    p = plan(case.model, case.batch, budget_gb=1)
    q = p.repair()
    assert (q.peak_bytes, q.note) == (p.peak_bytes, p.note)
    assert applied_plan(case.model) is None
    p.apply(verify=True)
    case.loss(case.model(**case.batch)).backward()
    assert applied_plan(case.model).peak_bytes == p.peak_bytes


def test_gradients_that_the_plan_does_not_count_are_planned_for():
    model, x = layers()
    options = {"loss_fn": torch.Tensor.mean}
    roomy = plan(model, x, budget_gb=1, **options)
    everything = roomy.baseline_peak_bytes
    p = for_budget(roomy, 0.7 * everything / 2**30)
    p.apply()
    with warnings.catch_warnings():
        warnings.simplefilter("error", PlanWarning)
        model(x).mean().backward()
        model(x).mean().backward()
    assert p.account.get(EARLIER, 0) == 0
    assert applied_plan(model).account[EARLIER] == sum(w.nbytes for w in model.parameters())
    assert applied_plan(model).peak_bytes <= p.budget_bytes
    p.remove()
    q = plan(model, x, budget_gb=everything / 2**30, accumulate=True, **options)
    q.apply()
    with warnings.catch_warnings():
        warnings.simplefilter("error", PlanWarning)
        model(x).mean().backward()


# What changes from step to step


@pytest.mark.thorough
def test_a_larger_second_batch_is_planned_within_the_budget(tmp_path):
    case = gpt2(layers=1)
    larger = gpt2(layers=1, batch=6)
    everything = plan(case.model, larger.batch, budget_gb="100%").baseline_peak_bytes
    p = plan(case.model, case.batch, budget_gb=0.7 * everything / 2**30)
    p.apply()
    assert held_before(case) + step_peak(case, tmp_path) <= p.budget_bytes
    second = Case(case.model, larger.batch)
    assert held_before(second) + step_peak(second, tmp_path) <= p.budget_bytes
    assert applied_plan(case.model).overhead > 0


@pytest.mark.thorough
def test_half_precision_with_a_scaler(tmp_path):
    case = gpt2(layers=1)

    def step(scaler):
        with torch.autocast("cpu", torch.float16):
            output = case.model(**case.batch)
        scaler.scale(output.loss).backward()
        return output

    def gradients():
        case.model.zero_grad()
        step(torch.amp.GradScaler("cpu", init_scale=1024.0))
        return {name: p.grad.clone() for name, p in case.model.named_parameters()}

    expected = gradients()
    with torch.autocast("cpu", torch.float16):
        everything = plan(case.model, case.batch, budget_gb="100%")
        p = for_budget(everything, 0.8 * everything.baseline_peak_bytes / 2**30)
    assert p.overhead > 0
    p.apply()
    for name, ours in gradients().items():
        torch.testing.assert_close(ours, expected[name], rtol=2e-2, atol=2e-2, msg=lambda m, name=name: f"{name}: {m}")
    case.model.zero_grad()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    assert held_before(case) + peak_of(lambda: step(scaler), tmp_path) <= p.budget_bytes + 1024


def test_bf16_weights(tmp_path):
    case = gpt2(layers=1)
    case.model.to(torch.bfloat16)
    everything = plan(case.model, case.batch, budget_gb="100%")
    p = for_budget(everything, 0.75 * everything.baseline_peak_bytes / 2**30)
    p.apply()
    measured = held_before(case) + step_peak(case, tmp_path)
    assert measured <= p.budget_bytes
    assert measured == pytest.approx(p.peak_bytes, rel=0.01)
