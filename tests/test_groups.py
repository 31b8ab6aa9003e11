"""Problems whose ops run again in groups only: the memory model against its definition, and the search."""

from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from solvers import Problem, ProblemError, every_op_once, simulate
from solvers.groups.exchanges import levels
from solvers.groups.grouped import Group, GroupedProblem
from solvers.groups.memory_model import memory_model
from solvers.groups.search import search

from .problems import random_training_graph, small_problems


def freed(problem: Problem, v: int) -> int:
    """The op before which a value is freed where every op runs once."""
    last = max((problem.producer[v], *problem.readers[v]))
    return len(problem.ops) if v in problem.pinned else last + 1


def group_of(problem: Problem, begin: int, stop: int, inner: frozenset[str] = frozenset()) -> Group | None:
    """Some consecutive ops as a group, which may keep any op's results; None where they save nothing."""
    made = {v for op in problem.ops[begin:stop] for v in op.writes}
    saved = {v: freed(problem, v) for v in made if max(problem.readers[v], default=-1) >= problem.boundary}
    if not saved:
        return None
    starts = min(i for v in saved for i in problem.readers[v] if i >= problem.boundary)
    inputs = {v for op in problem.ops[begin:stop] for v in op.reads} - made
    forced = frozenset(i for i in range(begin, stop) if not problem.ops[i].recomputable)
    optional = tuple((i,) for i in range(begin, stop) if i not in forced)
    ends = max(saved.values())
    return Group(f"{begin}:{stop}", begin, stop, starts, ends, frozenset(inputs), saved, forced, optional, inner)


def grouped_of(problem: Problem, cuts: list[int], elsewhere: frozenset[int] = frozenset()) -> GroupedProblem:
    """Groups between cuts, in each one of its first ops; values that are saved `elsewhere`, too, stay."""
    groups = []
    for begin, stop in pairwise(cuts):
        half = group_of(problem, begin, (begin + stop) // 2)
        whole = group_of(problem, begin, stop, frozenset({half.name} if half else ()))
        groups += [group for group in (whole, half) if group is not None]
    savers = {
        v: frozenset({frozenset(g.name for g in groups if v in g.saved), *([frozenset()] if v in elsewhere else [])})
        for group in groups
        for v in group.saved
    }
    return GroupedProblem(problem, tuple(groups), savers, max(problem.boundary - 1, 0))


@st.composite
def grouped_problems(draw: st.DrawFn) -> GroupedProblem:
    problem = draw(small_problems(12, 14))
    cuts = draw(st.sets(st.integers(1, max(problem.boundary, 1)), max_size=3))
    cuts = sorted({0, problem.boundary, *(cut for cut in cuts if cut < problem.boundary)})
    elsewhere = draw(st.frozensets(st.sampled_from(range(len(problem.sizes))))) if problem.sizes else frozenset()
    return grouped_of(problem, cuts, elsewhere)


def held_by_definition(grouped: GroupedProblem, state: dict[str, frozenset[int]]) -> list[int]:
    """Bytes while each op runs, by what `MemoryModel` says of each value, counted value by value."""
    problem = grouped.problem
    held = list(simulate(problem, every_op_once(problem)).held)
    chosen = [grouped.by_name[name] for name in state]
    for v, size in enumerate(problem.sizes):
        made, plain = problem.producer[v], freed(problem, v)
        if plain >= len(problem.ops):
            continue
        given = [g.ends for g in chosen if v in g.inputs]
        kept = [g.starts for g in chosen if made in state[g.name]]
        savers = [g for g in chosen if v in g.saved]
        early = savers and all(any(name in state for name in around) for around in grouped.savers[v])
        read = max([made, *(i for i in problem.readers[v] if i < problem.boundary)]) + 1
        first = range(made, max([read if early else plain, *given, *kept]))
        there = [first, *(range(g.starts, g.saved[v]) for g in savers if g.starts >= first.stop)]
        for i in range(len(held)):
            held[i] += size * (sum(i in each for each in there) - (i in range(made, plain)))
    for g in chosen:
        written = [(i, v) for i in range(g.begin, g.stop) for v in problem.ops[i].writes]
        taken = [
            problem.ops[at].workspace
            + sum(
                problem.sizes[v]
                for i, v in written
                if i <= at and (v in g.saved or at < freed(problem, v) or freed(problem, v) >= g.stop)
            )
            for at in range(g.begin, g.stop)
        ]
        held[g.starts] += max(0, max(taken) - sum(problem.sizes[v] for v in g.saved))
    return held


@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=tuple(HealthCheck))
@given(grouped_problems(), st.data())
def test_the_memory_model_is_as_defined(grouped, data):
    model, problem = memory_model(grouped), grouped.problem
    held, dropped = model.timeline({})
    assert (tuple(held), dropped) == (simulate(problem, every_op_once(problem)).held, {})
    assert (model.cost({}), model.runs_again({})) == (0, set())

    state: dict[str, frozenset[int]] = {}
    for group in grouped.groups:
        if not any(group.name in grouped.by_name[name].inner for name in state) and data.draw(st.booleans()):
            kept = data.draw(st.sets(st.integers(group.begin, group.stop - 1)))
            state[group.name] = group.forced | kept
    again = model.runs_again(state)
    groups = [set(range(g.begin, g.stop)) - state[g.name] for g in grouped.groups if g.name in state]
    assert again == set().union(*groups)
    assert sum(map(len, groups)) == len(again)
    assert model.cost(state) == sum(model.cost_of(*item) for item in state.items())
    assert model.cost(state) == pytest.approx(sum(problem.ops[i].cost for i in again))
    assert list(model.timeline(state)[0]) == held_by_definition(grouped, state)


@dataclass(frozen=True)
class Judged:
    peak: int
    cost: float
    state: dict[str, frozenset[int]]


def test_the_search_keeps_to_what_the_judge_says():
    problem = random_training_graph(1, 24, skips=False)
    grouped = grouped_of(problem, [*range(0, 24, 6), 24])
    model = memory_model(grouped)
    judged: list[Judged] = []

    def judge(state, more=0):
        peak = int(model.timeline(state)[0].max()) + more * bool(state)
        judged.append(Judged(peak, problem.total_cost + model.cost(state), state))
        return judged[-1]

    baseline = judge({})
    assert search(model, judge, baseline, baseline.peak) == (baseline, baseline)
    leanest = judge({g.name: g.forced for g in grouped.groups if g.inner})
    assert leanest.peak < baseline.peak
    budget = (baseline.peak + 4 * leanest.peak) // 5
    best, _ = search(model, judge, baseline, budget)
    assert best is not None
    assert best.peak <= budget
    assert problem.total_cost < best.cost < leanest.cost

    assert any(kept > grouped.by_name[name].forced for name, kept in best.state.items())  # some results are kept

    judged.clear()
    corrected, _ = search(model, lambda state: judge(state, 5000), baseline, budget)  # more is held than in the model
    assert corrected is not None
    assert corrected.peak <= budget
    assert best.cost < corrected.cost
    # what a judge always adds is known from the first choice of a set on
    assert 0 < sum(each.peak > budget for each in judged) <= len(levels(model))

    judged.clear()
    nothing, least = search(model, judge, baseline, leanest.peak // 2)
    assert nothing is None
    assert least.peak == min(each.peak for each in judged) <= leanest.peak


def test_groups_that_are_none_are_refused():
    problem = random_training_graph(1, 6)
    whole = group_of(problem, 0, 6)
    assert whole is not None
    savers = {v: frozenset[frozenset[str]]() for v in whole.saved}
    with pytest.raises(ProblemError, match="same name"):
        GroupedProblem(problem, (whole, whole), savers, 0)
    with pytest.raises(ProblemError, match="'0:6' has values that do not exist, or that nothing saves"):
        GroupedProblem(problem, (whole,), {}, 0)
