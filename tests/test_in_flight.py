"""`plan(in_flight=k)`: forward passes that wait for their backward pass, counted and weighed."""

import json
from itertools import accumulate

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from planner import InfeasibleBudgetError, OptionError, Plan, PlanFileError, applied_plan, applied_plans, compare, plan
from planner.__main__ import main
from planner.lowering.microbatches import _highest
from planner.report.snapshot import snapshot

from .measure import peak_of
from .plans import for_budget, leanest
from .variants import more

pytestmark = pytest.mark.usefixtures("short_searches")

ROWS, WIDTH = 512, 64


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.wide, self.narrow = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 4 * WIDTH),
            nn.Linear(4 * WIDTH, WIDTH),
        )

    def forward(self, x):
        return x + self.narrow(nn.functional.gelu(self.wide(self.norm(x))))


def blocks(n=4):
    torch.manual_seed(0)
    return nn.Sequential(*[Block() for _ in range(n)])


def loss_fn(output):
    return output.square().mean()


def fill_and_drain(model, batches):
    """All forward passes, then all backward passes."""
    losses = [loss_fn(model(x)) for x in batches]
    for loss in losses:
        loss.backward()


def one_each(model, batches, waiting):
    """So many forward passes, then a backward and a forward pass in turn."""
    losses = []
    for x in batches:
        losses.append(loss_fn(model(x)))
        if len(losses) == waiting:
            losses.pop(0).backward()
    for loss in losses:
        loss.backward()


def held(model, batches):
    return sum(t.nbytes for t in [*model.parameters(), *batches])


@pytest.mark.parametrize(("accumulate", "share"), [(False, 0.4), *more((True, 0.6))])
def test_as_many_microbatches_as_planned_fit_and_the_prediction_is_right(tmp_path, share, accumulate):
    model, number = blocks(3), 3
    batches = [torch.randn(ROWS, WIDTH) for _ in range(5 if accumulate else number)]

    def step():
        one_each(model, batches, number) if accumulate else fill_and_drain(model, batches)

    step()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    unplanned = peak_of(step, tmp_path) + held(model, batches)
    model.zero_grad()

    free = plan(model, batches[0], budget_gb=1, loss_fn=loss_fn, in_flight=number, accumulate=accumulate)
    budget = (free.resident_bytes + share * (free.peak_bytes - free.resident_bytes)) / 2**30
    p = for_budget(free, budget)
    p.apply()
    for _ in range(2):  # the first shows the loop, for which the second may be planned anew
        step()
        for parameter, gradient in zip(model.parameters(), expected, strict=True):
            assert torch.equal(parameter.grad, gradient)
        model.zero_grad()
    # the batches that are not in flight are the loop's own
    measured = peak_of(step, tmp_path) + held(model, batches[:number])
    assert measured <= p.budget_bytes < unplanned
    assert measured == pytest.approx(applied_plan(model).peak_bytes, rel=0.03)
    assert p.baseline_peak_bytes == free.peak_bytes
    assert "3 microbatches in flight" in p.note
    assert p.account["microbatches in flight"] == max(m.held.waiting for m in p.timeline) > 0


def test_what_is_seen_from_the_middle_of_a_step_on_is_not_taken_for_all_of_it(monkeypatch):
    answers = iter([False, False])
    monkeypatch.setattr("planner.runtime.watch.may_record", lambda: next(answers, True))
    model, batches = blocks(1), [torch.randn(ROWS, WIDTH) for _ in range(3)]
    plan(model, budget_gb=1).apply()
    for _ in range(4):
        fill_and_drain(model, batches)
        model.zero_grad()
    seen = applied_plan(model).source.record.step.loop
    assert seen.in_flight == 3
    assert seen.loss.waiting == batches[0].nbytes


def test_more_in_flight_means_less_kept_of_each_and_too_many_are_refused_with_the_smallest_budget():
    model, x = blocks(2), torch.randn(ROWS, WIDTH)
    alone = plan(model, x, budget_gb=1, loss_fn=loss_fn)
    budget = 1.2 * alone.peak_bytes / 2**30
    kept = []
    for number in (1, 2, 3):
        p = for_budget(alone, budget, in_flight=number)
        assert p.peak_bytes <= p.budget_bytes
        kept.append(sum(d.nbytes for d in p.decisions if d.action == "keep"))
    assert kept[0] > kept[1] > kept[2]
    with pytest.raises(InfeasibleBudgetError) as refused:
        for_budget(alone, budget, in_flight=40)
    assert "microbatches in flight" in refused.value.takes
    least = refused.value.minimum_gb
    assert for_budget(alone, least, in_flight=40).peak_bytes <= least * 2**30


def test_a_file_has_what_is_in_flight(tmp_path):
    model, x = blocks(2), torch.randn(ROWS, WIDTH)
    free = plan(model, x, budget_gb=1, loss_fn=loss_fn, in_flight=3)
    budget = 0.7 * free.peak_bytes / 2**30
    p = for_budget(free, budget)
    p.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json", loss_fn=loss_fn)
    assert (loaded.timeline, loaded.problem, loaded.options.in_flight) == (p.timeline, p.problem, 3)
    again = plan(model, x, budget_gb=budget, loss_fn=loss_fn, in_flight=3, known=loaded)
    assert "the same step and budget" in again.note
    assert again.schedule == p.schedule
    other = plan(model, x, budget_gb=budget, loss_fn=loss_fn, in_flight=2, known=loaded)
    assert "Solved anew" in other.note
    assert "microbatches in flight" in str(compare(p, other))

    lying = json.loads((tmp_path / "plan.json").read_text())
    lying["plan"]["problem"]["waiting"] = None
    (tmp_path / "lying.json").write_text(json.dumps(lying))
    with pytest.raises(PlanFileError, match="timeline"):
        Plan.load(tmp_path / "lying.json")


def test_outputs_and_losses_that_are_named_count_after_their_backward_pass():
    model, x = blocks(2), torch.randn(ROWS, WIDTH)
    roomy = plan(model, x, budget_gb=1, loss_fn=loss_fn, in_flight=3)
    seen = leanest(roomy).verify(x)
    assert seen.within_budget
    assert seen.measured_bytes == pytest.approx(seen.predicted_bytes, rel=1e-3)


def test_a_real_step_verifies_it_and_a_picture_shows_it():
    model, x = blocks(2), torch.randn(ROWS, WIDTH)
    p = plan(model, x, budget_gb=1, loss_fn=loss_fn, in_flight=3)
    seen = p.verify()
    assert seen.gradients_agree
    assert abs(seen.prediction_error) < 0.03
    assert "other microbatches" in p.to_html()
    (trace,) = snapshot(p)["device_traces"]
    changes = {"alloc": 1, "free_completed": -1}
    assert max(accumulate(changes.get(e["action"], 0) * e["size"] for e in trace)) == p.peak_bytes
    assert sum(p.account.values()) == p.peak_bytes


@pytest.mark.parametrize("number", [0, -1, 1.5, True, "2"])
def test_what_is_no_number_of_microbatches_is_refused(number):
    with pytest.raises(OptionError, match="in_flight"):
        plan(blocks(1), torch.randn(4, WIDTH), budget_gb=1, in_flight=number)


def test_eager_mode_does_not_count_them():
    with pytest.raises(OptionError, match="in_flight=2 is for compiled plans"):
        plan(blocks(1), torch.randn(4, WIDTH), budget_gb=1, in_flight=2, mode="eager")
    model = blocks(1)
    p = plan(model, torch.randn(4, WIDTH), budget_gb=1, in_flight=2)
    with pytest.raises(OptionError, match="in_flight=2 is for compiled plans"):
        p.apply(mode="eager")
    p.apply()  # the model is as it was


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 9)), min_size=1), st.integers(0, 12))
def test_pairs_that_never_hold_most_are_left_out(pairs, kept):
    assert max(n * kept + b for n, b in _highest(pairs)) == max(n * kept + b for n, b in pairs)


def test_the_command_line_counts_them(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "several.py").write_text(
        "import torch\ndef make(): return torch.nn.Linear(64, 64), torch.zeros(512, 64), torch.Tensor.mean\n"
    )
    assert main(["plan", "several.py:make", "--budget-gb", "1", "--in-flight", "3", "--json", "--quiet"]) == 0
    account = json.loads(capsys.readouterr().out)["account"]
    assert account["batch"] == 3 * 512 * 64 * 4
    assert account["microbatches in flight"] > 0
    with pytest.raises(SystemExit):
        main(["plan", "several.py:make", "--budget-gb", "1", "--in-flight", "0"])


@pytest.mark.parametrize("kept", [True, False])
def test_the_batches_of_calls_that_were_seen_are_counted_at_the_size_of_the_step(kept):
    class Summed(nn.Module):
        def __init__(self):
            super().__init__()
            self.line = nn.Linear(512, 4, bias=False)

        def forward(self, x):
            return self.line(x).square().mean()

    model = Summed()
    plan(model, budget_gb=1, progress=False).apply()
    for rows in (8, 8, 8, 64, 64):
        batches = [torch.randn(rows, 512) for _ in range(3)] if kept else (torch.randn(rows, 512) for _ in range(3))
        sum(map(model, batches)).backward()
        model.zero_grad()
        latest = max(applied_plans(model), key=lambda p: p.account["batch"])
    assert latest.account["batch"] >= 3 * 64 * 512 * 4
