"""Why this is kept and that recomputed: every figure by brute force or by torch's profiler, and words that fit."""

import re
from dataclasses import replace
from functools import cache
from itertools import combinations

import pytest
import torch
from torch import nn

from planner import ApplyError, OptionError, Plan, plan
from planner.planning.pipeline import graph_of, lower, write
from planner.planning.what_if import costs_of, keeping, recomputing, what_if
from planner.report.words import cells
from solvers import Solution, minimum_peak, simulate, validate

from .measure import held_before, step_peak
from .naive import replay
from .plans import for_budget
from .problems import in_regions, random_training_graph, shorten, with_side_outputs
from .real_models import Case


@pytest.fixture(autouse=True)
def _short_searches(monkeypatch):
    shorten(monkeypatch)


class Block(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        return x + self.drop(self.down(torch.tanh(self.up(x)).exp()))


class Blocks(nn.Module):
    def __init__(self, count=3, broken=False):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(count))
        self.broken = broken

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
            if self.broken:
                torch._dynamo.graph_break()
        return x.topk(8).values.square().mean()


def blocks(**options) -> Case:
    return Case(Blocks(**options).train(), {"x": torch.randn(512, 64)}, lambda loss: loss)


def planned(case: Case, share: float, **options):
    everything = plan(case.model, case.batch, budget_gb=1, **options)
    return for_budget(everything, share * everything.peak_bytes / 2**30)


@cache
def schedules(seed: int):
    """Problems, for each a schedule that runs some of its ops again, and what is its to decide."""
    found = []
    for wrap in (lambda problem: problem, in_regions, with_side_outputs):
        problem = wrap(random_training_graph(seed, 6))
        values = [v for op in problem.ops[: problem.boundary] for v in op.writes]
        found.append((problem, minimum_peak(problem).schedule, values))
    return found


def sources(problem, steps):
    """For each step, the position of the run that each value it reads was written by."""
    made, found = {}, []
    for at, i in steps:
        found.append({v: made[v] for v in problem.ops[i].reads})
        made.update((v, at) for v in problem.ops[i].writes)
    return found


@pytest.mark.parametrize("seed", range(8))
def test_what_keeping_leaves_out_is_the_most_that_can_be(seed):
    tried = 0
    for problem, schedule, values in schedules(seed):
        steps = list(enumerate(schedule.steps))
        read_from = sources(problem, steps)
        again = [at for at, i in steps if i in schedule.steps[:at]]
        for v in values:
            maker = problem.producer[v]
            if schedule.steps.count(maker) == 1 or len(again) > 9:
                continue
            own = problem.ops[maker].writes
            best = None
            for n in range(len(again) + 1):
                for left_out in combinations(again, n):
                    rest = [(at, i) for at, i in steps if at not in left_out]
                    if [i for _, i in rest].count(maker) > 1:
                        continue
                    same = all(
                        made == read_from[at][u]
                        for (at, _), reads in zip(rest, sources(problem, rest), strict=True)
                        for u, made in reads.items()
                        if u not in own
                    )
                    cost = sum(problem.ops[i].cost for _, i in rest)
                    if same and (best is None or cost < best[0]):
                        best = cost, tuple(i for _, i in rest)
            assert keeping(problem, schedule, [v]).steps == best[1]
            tried += 1
    assert tried


@pytest.mark.parametrize("seed", range(8))
def test_what_recomputing_adds_is_the_least_that_will_do(seed):
    tried = 0
    for problem, schedule, values in schedules(seed):
        start = schedule.steps.index(problem.boundary) + 1
        before = held(problem, schedule.steps)
        for v in values:
            readers = [at for at, i in enumerate(schedule.steps) if at >= start and v in problem.ops[i].reads]
            if v in problem.lasting or not readers:
                continue
            at = readers[0]
            if problem.producer[v] in schedule.steps[start:at] or v not in before[at]:
                continue  # it is not held from the forward pass on
            forward = [i for i in range(problem.boundary) if problem.ops[i].recomputable]
            best = None
            for n in range(1, 5):
                for more in combinations(forward, n):
                    steps = (*schedule.steps[:at], *more, *schedule.steps[at:])
                    try:
                        after = held(problem, steps)
                    except LookupError:
                        continue
                    rest = [*after[:at], *after[at + n :]]
                    own = {v, *problem.ops[problem.producer[v]].writes}
                    longer = any(now - was - problem.lasting - own for now, was in zip(rest, before, strict=True))
                    cost = sum(problem.ops[i].cost for i in more)
                    if not longer and v not in after[at] and (best is None or cost < best[0]):
                        best = cost, steps
            if best is not None:
                assert recomputing(problem, schedule, [v]).steps == best[1]
                tried += 1
    assert tried


def held(problem, steps):
    """The values held before each step, from the definition."""
    _, freed, _ = replay(problem, steps)
    now, found = set(), []
    for i, gone in zip(steps, freed, strict=True):
        found.append(set(now))
        now = (now | set(problem.ops[i].writes)) - gone
    return found


@pytest.mark.parametrize("seed", range(4))
def test_any_choice_gives_a_valid_schedule(seed):
    for problem, schedule, values in schedules(seed):
        for change in (keeping, recomputing):
            for chosen in (values, values[::2], values[1:4], []):
                changed = change(problem, schedule, chosen)
                timeline = validate(problem.with_budget(None), changed)
                assert max(replay(problem, changed.steps)[0]) == timeline.peak
                if not chosen:
                    assert changed == schedule
        assert len(keeping(problem, schedule, values).steps) == len(problem.ops)


def measured(case, p, schedule, folder):
    """Peak of a real step that runs another schedule."""
    graph = graph_of(p.request)
    step = lower(p.request, graph)
    solution = Solution(schedule, simulate(step.problem, schedule), "test", 0.0, 0.0)
    changed = Plan(write(p.request, graph, step, solution))
    changed.apply()
    try:
        return held_before(case) + step_peak(case, folder)
    finally:
        changed.remove()


@pytest.mark.filterwarnings("ignore:.* of gradients are there already")
def test_what_would_be_is_what_a_real_step_then_takes(tmp_path):
    case = blocks()
    p = planned(case, 0.6)
    whole = p.explain("blocks.*")
    values = [c.value for c, d in zip(costs_of(p.record), p.decisions, strict=True) if d.module.startswith("blocks.")]
    for change, claimed in ((keeping, whole.all_kept), (recomputing, whole.all_recomputed)):
        found = measured(case, p, change(p.problem, p.schedule, values), tmp_path)
        assert claimed.peak_bytes == pytest.approx(found, rel=0.01)
        assert re.match(r"(forward|loss|backward)(, blocks\.\d(\.\w+)?: [a-z]\w+)?$", claimed.peak_at)
    assert whole.all_kept.peak_bytes > p.budget_bytes
    assert whole.all_kept.step_seconds < p.step_seconds < whole.all_recomputed.step_seconds


def test_bytes_seconds_and_words_are_those_of_the_decisions():
    case = blocks()
    p = planned(case, 0.6)
    for path, inside in (("", ""), ("blocks.1", "blocks.1"), ("blocks.*.drop", r"blocks\.\d\.drop")):
        e = p.explain(path)
        ours = [d for d in p.decisions if re.match(rf"{inside}(\.|$)" if inside else "", d.module)]
        assert e.kept_bytes == sum(d.nbytes for d in ours if d.action == "keep")
        assert e.recomputed_bytes == sum(d.nbytes for d in ours if d.action == "recompute")
        assert e.seconds == pytest.approx(sum(d.recompute_seconds for d in ours))
        assert sum(g.count for g in e.groups) == len(ours)
        assert sum(g.nbytes for g in e.groups) == e.kept_bytes + e.recomputed_bytes
        for text in (str(e), e._repr_html_()):
            assert not re.search(r"getitem|_\d+\b", text)
    groups = p.explain("").groups
    again = [g for g in groups if g.action == "recompute"]
    assert again
    for g in again:
        assert g.otherwise.step_seconds <= p.step_seconds
        assert f"{g.otherwise.peak_bytes / 2**20:.2f} MB" in g.why
    assert "kept, as topk chooses among equal values" in " ".join(str(p.explain("")).split()).replace("Kept", "kept")
    kept = [g for g in groups if "what is recomputed instead takes at most" in g.why]
    assert kept
    recomputed = [
        c.seconds / d.nbytes for c, d in zip(costs_of(p.record), p.decisions, strict=True) if d.action == "recompute"
    ]
    for g in kept:
        assert (g.otherwise.step_seconds - p.step_seconds) / g.nbytes > max(recomputed)
        assert f"at most {1e3 * 2**20 * max(recomputed):.2g} ms/MB" in g.why


def test_a_value_by_its_label():
    p = planned(blocks(), 0.6)
    tanh = next(d for d in p.decisions if d.module == "blocks.1" and d.op == "tanh")
    e = p.explain("blocks.1: tanh")
    assert e.modules == ()
    assert e.kept_bytes + e.recomputed_bytes == tanh.nbytes
    assert p.explain(e.groups[0].label).groups == e.groups
    for g in p.explain("").groups:
        e = p.explain(g.label)
        assert g.label in {other.label for other in e.groups}
        assert sum(other.nbytes for other in e.groups) >= g.nbytes
    with pytest.raises(OptionError):
        p.explain(tanh.name)


def test_a_plan_from_a_file_knows_the_modules_that_make_nothing(tmp_path):
    model = nn.Sequential(nn.Identity(), Block())
    plan(model, torch.randn(8, 64), budget_gb=1, loss_fn=torch.Tensor.mean).save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert "makes nothing" in str(loaded.explain("0"))
    with pytest.raises(OptionError, match=r"'0' has no op in this plan; .* '1"):
        loaded.graph("0")
    with pytest.raises(OptionError, match="'2' is no module"):
        loaded.graph("2")


def test_where_everything_fits_nothing_has_to_run_again():
    case = blocks()
    e = plan(case.model, case.batch, budget_gb=1).explain("blocks.0")
    assert e.recomputed_bytes == 0
    assert e.all_kept is None
    assert "fits with everything kept" in str(e)


@pytest.mark.parametrize("path", ["blocks.9", "blok.0", "x" * 5000, "\x1b[31m", "blocks.*.*.*", 3])
def test_an_unknown_path_names_the_nearest(path):
    p = planned(blocks(), 0.7)
    with pytest.raises(OptionError) as e:
        p.explain(path)
    assert "blocks." in str(e.value) or path == 3
    assert "\x1b" not in str(e.value)
    assert len(str(e.value)) < 600


def test_several_graphs():
    case = blocks(broken=True)
    p = planned(case, 0.8)
    assert len(p.graph_modules) > 1
    e = p.explain("")
    assert sum(g.count for g in e.groups) == len(p.decisions) == len(costs_of(p.record))
    assert any(c.bound_by for c in costs_of(p.record))
    for c, d in zip(costs_of(p.record), p.decisions, strict=True):
        assert p.problem.sizes[c.value] == d.nbytes
        if c.bound_by:
            assert d.action == "keep"


def test_eager_mode_is_explained_by_unit():
    case = blocks()
    p = planned(case, 0.7, mode="eager")
    assert p.recipe.kept
    assert costs_of(p.record) == ()
    assert what_if(p.record, [0], kept=True) is None
    e = p.explain("blocks.*")
    assert e.recomputed_bytes
    assert e.all_kept is None
    assert "is checkpointed, and runs again as a whole" in " ".join(str(e).split())
    assert sum(g.count for g in e.groups) == sum(d.module.startswith("blocks.") for d in p.decisions)


def test_a_plan_that_is_not_made_yet_says_so():
    model = Blocks()
    pending = plan(model, budget_gb=1)
    with pytest.raises(ApplyError, match="not known yet"):
        pending.explain("blocks.0")


def test_a_plan_outlives_its_model():
    p = planned(blocks(), 0.6)
    assert p.explain("blocks.0").groups
    with pytest.raises(OptionError, match=r"blocks\.0"):
        p.explain("block.0")


@pytest.mark.parametrize("name", ["層" * 60, "a" * 300, "e\u0301" * 100])
def test_names_of_any_width_fit(name):
    model = nn.Sequential()
    model.add_module(name, Block())
    p = plan(model, torch.randn(8, 64), budget_gb=1, loss_fn=torch.Tensor.mean)
    for text in (str(p.explain("")), str(p)):
        assert max(map(cells, text.splitlines())) <= 80


def test_what_does_not_suit_its_problem_is_not_computed_with():
    p = planned(blocks(), 0.7)
    assert costs_of(p.record)
    for other in ({"decisions": p.decisions[1:]}, {"timeline": p.timeline[1:]}):
        assert costs_of(replace(p.record, **other)) == ()
