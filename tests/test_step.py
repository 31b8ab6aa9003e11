"""A training step as a problem with a provenance table: the table says what each op is, and all that read it agree."""

from collections import Counter
from dataclasses import replace as changed
from functools import partial

import pytest
import torch
from torch import nn

from planner.capture.trace.step import capture
from planner.codegen.emit import keep_everything
from planner.core.plan import Action
from planner.core.step import OpOrigin, Step, replay, run_passes, runs_of, with_line
from planner.lowering.between import add_between
from planner.planning.decisions import decisions, peak_account
from planner.planning.pipeline import lower
from planner.planning.timelines import baseline_timeline, planned_timeline
from planner.requests.check import check
from solvers import every_op_once, solve

from .naive import replay as by_definition
from .problems import random_training_graph
from .test_regions import TwoRegions


def lowered(model, batch, **options):
    request = check(model, batch, None, budget_gb=1, loss_fn=torch.Tensor.sum, **options)
    graph = capture(request.model, request.args, request.kwargs, keep_everything, request.loss_fn)
    return graph, lower(request, graph)


def dropouts():
    return nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Dropout(0.1)) for _ in range(3)]).train()


CASES = {
    "dropouts": (dropouts, {"optimizer": "adamw"}),
    "two regions": (lambda: TwoRegions().train(), {"accumulate": True}),
    "in flight": (dropouts, {"in_flight": 3, "optimizer": "sgd"}),
    "shares": (dropouts, {"shard": 4, "device": "h100"}),
}


@pytest.mark.parametrize("case", CASES)
def test_every_op_and_every_value_has_its_row(case):
    make, options = CASES[case]
    model = make()
    graph, step = lowered(model, torch.randn(8, 64 if case == "two regions" else 32), **options)
    problem = step.problem
    assert len(step.origins) == len(problem.ops)
    assert len(step.names) == len(problem.sizes)
    assert sum(step.account.values()) == problem.resident
    places = Counter((o.region, o.index) for o in step.origins if o.region is not None)
    assert places == Counter((r, i) for r, region in enumerate(graph.regions) for i in range(len(region.ops)))
    modules = {name for name, _ in model.named_modules()}
    for i, (op, origin) in enumerate(zip(problem.ops, step.origins, strict=True)):
        assert origin.module in modules
        assert (origin.phase == "forward") == (i < problem.boundary)
        assert (origin.phase == "loss") == (i == problem.boundary)
        if origin.region is not None:
            graph_op = graph.regions[origin.region].ops[origin.index]
            assert op.name.startswith(graph_op.node.name)
            assert op.recomputable == (not origin.keep_because) == (not graph_op.keep_because)
    emitted = {n.name for region in graph.regions for n in region.joint.graph.nodes}
    assert set(step.names) - {""} <= emitted
    assert step.final <= step.gradients
    assert any(o.random for o in step.origins) == ("dropout" in str(model).lower())
    assert [o.phase for o in step.origins].count("optimizer") == ("optimizer" in options)


def by_hand(seed: int) -> Step:
    """A step that no graph was captured for, whose loss is an op of the forward pass, as in an eager trace."""
    problem = random_training_graph(seed, 20)
    loss = problem.boundary - 1
    phases = ["forward"] * loss + ["loss"] + ["backward"] * (len(problem.ops) - problem.boundary)
    origins = tuple(OpOrigin(op.name, phase) for op, phase in zip(problem.ops, phases, strict=True))
    names = tuple(f"v{v}" if problem.producer[v] < loss else "" for v in range(len(problem.sizes)))
    return Step(problem, {"parameters": problem.resident}, origins, names, problem.pinned, problem.pinned)


@pytest.mark.parametrize("seed", range(6))
def test_all_that_is_read_from_a_step_agrees_with_the_definition(seed):
    """Timelines, decisions and the account, of a step made by hand, against a quadratic replay."""
    step = by_hand(seed)
    problem = step.problem
    everything = replay(problem, every_op_once(problem))
    schedule = solve(problem.with_budget(round(0.7 * everything.timeline.peak)), "chen").schedule
    planned = replay(problem, schedule)
    held, freed, cost = by_definition(problem, schedule.steps)

    timeline = planned_timeline(step, planned)
    assert [m.held_bytes for m in timeline] == held
    assert sum(m.seconds for m in timeline) == pytest.approx(cost)
    seen = set()
    for i, moment in zip(schedule.steps, timeline, strict=True):
        assert (moment.op, moment.recomputed) == (step.origins[i].kind, i in seen)
        seen.add(i)
    baseline = baseline_timeline(step, runs_of(planned), everything)
    assert [m.held_bytes for m in baseline] == by_definition(problem, every_op_once(problem).steps)[0]
    assert [m.runs for m in baseline] == [Counter(schedule.steps)[i] for i in range(len(problem.ops))]

    account = {**step.account, **peak_account(step, planned)}
    assert sum(account.values()) == max(held)

    start = schedule.steps.index(problem.boundary)
    saved = set()
    for i, gone in zip(schedule.steps[:start], freed, strict=False):
        saved = (saved | set(problem.ops[i].writes)) - gone
    assert planned.saved_for_backward == saved
    needed = [v for v in range(len(step.names)) if step.names[v] and max(problem.readers[v]) >= problem.boundary]
    made = decisions(step, runs_of(planned))
    assert [d.name for d in made] == [step.names[v] for v in needed]
    again: dict[str, Action] = {step.names[v]: "keep" if v in saved else "recompute" for v in needed}
    assert {d.name: d.action for d in made} == again
    assert {"keep", "recompute"} == set(again.values())
    assert sum(d.recompute_seconds for d in made) <= cost - problem.total_cost + 1e-9


def test_a_pass_is_a_function_from_step_to_step():
    """As one that a new capability adds to the list: here room for something else, and slower ops."""
    step = by_hand(0)

    def slower(step: Step, factor: float) -> Step:
        ops = tuple(changed(op, cost=factor * op.cost) for op in step.problem.ops)
        return changed(step, problem=changed(step.problem, ops=ops))

    passes = [partial(with_line, name="an average of the weights", nbytes=512), partial(slower, factor=2.0)]
    after = run_passes(step, passes)
    assert after.problem.resident == step.problem.resident + 512 == sum(after.account.values())
    assert after.problem.total_cost == pytest.approx(2 * step.problem.total_cost)
    assert after.origins == step.origins
    assert run_passes(step, []) is step


@pytest.mark.parametrize("seed", range(3))
def test_what_the_loop_holds_between_its_steps_bounds_the_peak_beside_what_no_tensor_takes(seed):
    step = with_line(by_hand(seed), "CUDA context", 1000)
    alone = replay(step.problem, every_op_once(step.problem)).timeline.peak
    for tensors in (0, alone - 1001, alone - 999, 2 * alone):
        after = add_between(step, tensors)
        assert len(after.origins) == len(after.problem.ops)
        assert replay(after.problem, every_op_once(after.problem)).timeline.peak == max(alone, tensors + 1000)
