"""The largest batch that fits: against every n planned for by itself, and against the profiler."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from planner import BatchError, BudgetError, InfeasibleBudgetError, ModelError, OptionError, plan
from planner.api.max_batch import Trial, _faster, _fastest, _larger, max_batch

from .measure import held_before, step_peak
from .real_models import Case, gpt2, tokens
from .variants import more

pytestmark = pytest.mark.usefixtures("short_searches")

GB = 2**30
BUDGET = 2e-4


def deep():
    return nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.Tanh())])


def convolution(channels):
    return nn.Sequential(nn.Conv2d(channels, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())


def rows(n):
    return torch.ones(48 * n, 32)


def search(model, make_batch=rows, budget_gb=BUDGET, **options):
    return max_batch(model, make_batch, budget_gb=budget_gb, loss_fn=torch.sum, progress=False, **options)


@pytest.mark.thorough
def test_as_planning_for_every_n_says():
    model = deep()
    found = search(model)
    options = {"budget_gb": BUDGET, "loss_fn": torch.sum, "progress": False}
    each = {n: plan(model, rows(n), **options) for n in range(1, found.largest + 1)}
    with pytest.raises(InfeasibleBudgetError) as refused:
        plan(model, rows(found.largest + 1), **options)
    assert each[found.largest].overhead > 0
    assert found.plan.budget_bytes == found.fastest_plan.budget_bytes == each[1].budget_bytes
    assert found.plan.request.args[0].shape == rows(found.largest).shape
    assert found.fastest_plan.request.args[0].shape == rows(found.fastest).shape
    assert [t.n for t in found.trials] == sorted(t.n for t in found.trials)
    for t in found.trials:
        if t.feasible:
            p = each[t.n]
            assert (t.peak_bytes, t.overhead, t.step_seconds) == (p.peak_bytes, p.overhead, p.step_seconds)
    beyond = next(t for t in found.trials if t.n == found.largest + 1)
    assert not beyond.feasible
    assert beyond.peak_bytes == refused.value.minimum_bytes > BUDGET * GB
    assert max(n for n, p in each.items() if p.overhead == 0) in [t.n for t in found.trials]
    # the best of all is one that was tried, or next to the fastest of those
    tried = [t.n for t in found.trials]
    at = tried.index(found.fastest)
    best = max(each, key=lambda n: n / each[n].step_seconds)
    assert tried[max(0, at - 1)] <= best <= tried[at + 1]
    assert "does not fit" in str(found)
    assert f"Largest n {found.largest}, fastest n {found.fastest}" in str(found)


@pytest.mark.parametrize("kind", ["perceptron", *more("gpt2", "convolutions")])
def test_the_largest_fits_as_measured(kind, tmp_path):
    if kind == "perceptron":
        case = Case(deep(), {}, torch.sum)
        make, budget = (lambda n: {"input": rows(n)}), BUDGET
    elif kind == "gpt2":
        case, make, budget = gpt2(layers=1), lambda n: tokens(500, n, 64), 0.004
    else:
        model = nn.Sequential(*map(convolution, [3, 8, 8, 8]), nn.Flatten(), nn.Linear(8 * 256, 1))
        case, make, budget = Case(model, {}, torch.sum), lambda n: {"input": torch.ones(n, 3, 16, 16)}, 3e-4
    found = max_batch(case.model, make, budget_gb=budget, solver="chen", loss_fn=case.loss_fn, progress=False)
    assert found.plan.overhead > 0
    found.plan.apply()
    case.batch = make(found.largest)
    measured = held_before(case) + step_peak(case, tmp_path)
    found.plan.remove()
    assert measured <= budget * GB
    assert measured == pytest.approx(found.plan.peak_bytes, rel=0.02)
    assert next(t for t in found.trials if not t.feasible).n == found.largest + 1


@pytest.mark.thorough
def test_n_may_be_a_sequence_length_with_a_limit():
    model = gpt2(layers=1).model
    asked = []

    def make(n):
        asked.append(n)
        return tokens(500, 2, 32 * n)

    found = max_batch(model, make, budget_gb=1, most=4, progress=False)  # 128 positions are all that it has
    assert found.largest == max(asked) == 4
    assert all(t.overhead <= 0.01 for t in found.trials)  # where that brings the peak down to eager mode's
    assert found.plan.request.kwargs["input_ids"].shape == (2, 128)


@pytest.mark.thorough
def test_a_model_on_meta():
    here = deep()
    with torch.device("meta"):
        there = deep()
    account = {"CUDA context": 600 / 1024, "fragmentation margin": 0}
    options = {"device": "h100", "budget_gb": 0.6875, "solver": "chen", "account_gb": account}
    big = 4096  # rows, so that n is of the order of ten
    real = search(here, lambda n: torch.ones(big * n, 32), **options)
    meta = search(there, lambda n: torch.ones(big * n, 32, device="meta"), **options)
    assert (real.largest, real.fastest, real.trials) == (meta.largest, meta.fastest, meta.trials)
    assert meta.largest > 1
    assert meta.plan.device == "h100"


def test_where_not_even_one_fits():
    model = deep()
    with pytest.raises(InfeasibleBudgetError) as e:
        search(model, budget_gb=1e-5)
    found = search(model, budget_gb=e.value.minimum_gb)
    assert found.largest == found.fastest == 1


@pytest.mark.parametrize("most", [0, -1, 2.5, "10", True, math.inf])
def test_a_limit_that_is_none_is_refused(most):
    with pytest.raises(OptionError, match="must be the largest n to look at"):
        search(deep(), most=most)


def test_bad_input_is_refused_in_words():
    model = nn.Sequential(nn.Linear(32, 32), nn.Tanh())
    before = {name: t.clone() for name, t in model.state_dict().items()}
    with pytest.raises(OptionError, match="make_batch of type Tensor must be callable"):
        search(model, torch.ones(2, 32))
    with pytest.raises(ModelError, match=r"needs a torch\.nn\.Module"):
        search(3)
    with pytest.raises(BudgetError, match="budget_gb=-1"):
        search(model, budget_gb=-1)
    with pytest.raises(OptionError, match="solver='none'"):
        search(model, solver="none")
    with pytest.raises(OptionError, match=r"solver=\['auto'\] is not known"):
        search(model, solver=["auto"])
    with pytest.raises(OptionError, match="on_failure='warn' is for one plan"):
        search(model, on_failure="warn")
    with pytest.raises(BatchError, match=r"make_batch\(1\) raised TypeError"):
        search(model, lambda: rows(1))
    with pytest.raises(BatchError, match=r"make_batch\(1\) returned None"):
        search(model, lambda n: None)
    with pytest.raises(BatchError, match=r"make_batch\(1\): batch of type int"):
        search(model, lambda n: n)
    with pytest.raises(BatchError, match=r"make_batch\([2-9]\): .*does not accept the batch"):
        search(model, lambda n: rows(n) if n == 1 else torch.ones(n, 31))
    with pytest.raises(BatchError, match="make larger batches of larger n"):
        search(model, lambda n: rows(1))
    with pytest.raises(KeyboardInterrupt):
        search(model, interrupted)
    assert model._compiled_call_impl is None
    assert all(p.grad is None for p in model.parameters())
    for name, t in model.state_dict().items():
        assert torch.equal(t, before[name])


def interrupted(n):
    if n > 1:
        raise KeyboardInterrupt
    return rows(n)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    fixed=st.integers(0, 10**6),
    share=st.floats(0, 1),
    each=st.integers(100, 10**5),
    power=st.sampled_from([1, 1, 1.5, 2]),
    saved=st.floats(0, 0.9),
    largest=st.integers(1, 500),
    most=st.one_of(st.none(), st.integers(1, 600)),
)
def test_secants_find_the_largest_n_of_any_rising_peak(fixed, share, each, power, saved, largest, most):
    floor = share * (1 - saved) * each * largest**power  # what does not grow, as the optimizer's step

    def baseline(n):
        return fixed + int(max(floor, each * n**power))

    def leanest(n):
        return fixed + int(max(floor, (1 - saved) * each * n**power))

    budget = leanest(largest)
    answer = max(n for n in range(1, min(most or 600, 600) + 1) if leanest(n) <= budget)
    trials = {1: _trial(1, baseline, leanest, budget)}
    while (n := _larger(trials.values(), budget, fixed, most)) is not None:
        assert n not in trials
        trials[n] = _trial(n, baseline, leanest, budget)
    assert max(n for n, t in trials.items() if t.feasible) == answer
    assert len(trials) <= 20


def _trial(n, baseline, leanest, budget):
    if leanest(n) > budget:
        return Trial(n, leanest(n))
    return Trial(n, min(baseline(n), budget), baseline(n), 0.0, 1.0)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.integers(1, 300), st.integers(1, 300), st.sets(st.integers(1, 300)))
def test_probes_close_in_on_the_fastest(peak, largest, tried):
    def seconds(n):
        return n / (1000 - abs(n - peak))

    trials = {n: Trial(n, n, n, 0.0, seconds(n)) for n in {1, largest, *(n for n in tried if n < largest)}}
    for _ in range(40):
        if (n := _faster(trials.values())) is None:
            break
        assert n not in trials
        trials[n] = Trial(n, n, n, 0.0, seconds(n))
    fastest = _fastest(trials.values())
    assert abs(fastest - min(peak, largest)) <= max(1, 0.1 * fastest)


def test_equal_throughput_is_the_smaller_n():
    assert _fastest([Trial(4, 1, 1, 0.0, 4.0), Trial(2, 1, 1, 0.0, 2.0), Trial(8, 1)]) == 2


def test_the_options_of_plan_count():
    options = {"optimizer": "adamw", "accumulate": True, "shard": 2, "account_gb": {"other": 1e-5}}
    found = search(deep(), budget_gb=3e-4, solver="chen", **options)
    lines = found.plan.account
    assert lines["optimizer state"] > 0
    assert lines["gradients of earlier microbatches"] > 0
    assert lines["other"] == round(1e-5 * GB)
    assert sum(lines.values()) == found.plan.peak_bytes
