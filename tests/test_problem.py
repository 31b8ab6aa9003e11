"""What makes a problem: every malformed one is refused with the place, and every good one survives its file."""

from __future__ import annotations

import contextlib
import copy
import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from solvers.errors import ProblemError
from solvers.instances import from_json, load, to_json
from solvers.problem import MOST_BYTES, Op, Problem

from .problems import random_training_graph, reused_problems, small_problems

A, B = Op("a", (), (0,), 1.0), Op("b", (0,), (1,), 1.0)
DROP = object()
Where = tuple[str | int, ...]


def published() -> dict[str, Any]:
    """A small instance in the published format."""
    ops = [
        {"inputs": [], "bytes": 4, "cost": 1},
        {"inputs": [0], "bytes": 4, "cost": 2},
        {"inputs": [1, 0], "bytes": 2, "cost": 3},
    ]
    return {"name": "small", "budget_bytes": 10, "last_forward_op": 1, "ops": ops}


def own() -> dict[str, Any]:
    """A small problem in the project's own format."""
    ops = (A, Op("two", (0,), (1, 2), 0.5, 3, False, 1), Op("none", (2,), (), 0))
    return to_json(Problem(ops, (4, 5, 6), 1, frozenset({1}), 2, 30, "own"))


def changed(data: dict[str, Any], where: Where, to: object) -> Any:
    """The data with one place in it changed, or dropped."""
    data = copy.deepcopy(data)
    at: Any = data
    for key in where[:-1]:
        at = at[key]
    if to is DROP:
        del at[where[-1]]
    else:
        at[where[-1]] = to
    return data


MALFORMED: list[tuple[Any, Where, object, str]] = [
    (published, ("ops",), DROP, "has no 'ops'"),
    (published, ("ops",), {}, "ops {}, not a list"),
    (published, ("ops",), [], "last_forward_op 1 is not one of the 0 ops"),
    (published, ("ops", 1), 7, "op 1 is 7, not an object"),
    (published, ("ops", 1), None, "op 1 is None, not an object"),
    (published, ("ops", 1, "inputs"), DROP, "op 1 has no 'inputs'"),
    (published, ("ops", 1, "inputs"), "0", "op 1 has inputs '0', not a list"),
    (published, ("ops", 1, "inputs"), None, "op 1 has inputs None, not a list"),
    (published, ("ops", 1, "inputs"), [0.0], "op 1 reads 0.0, but there is no value 0.0"),
    (published, ("ops", 1, "inputs"), [True], "op 1 reads True"),
    (published, ("ops", 1, "inputs"), ["0"], "op 1 reads '0'"),
    (published, ("ops", 1, "inputs"), [[0]], r"op 1 reads \[0\]"),
    (published, ("ops", 1, "inputs"), [-1], "op 1 reads -1, but there is no value -1"),
    (published, ("ops", 1, "inputs"), [3], "op 1 reads 3, but there is no value 3"),
    (published, ("ops", 1, "inputs"), [0, 0], r"op 1 reads \(0, 0\), which names a value twice"),
    (published, ("ops", 1, "inputs"), [1], "op 1 reads value 1, .* cycle, 1 -> 1"),
    (published, ("ops", 1, "inputs"), [2], "op 1 reads value 2, .* cycle, 1 -> 2 -> 1"),
    (published, ("ops", 0, "inputs"), [2], "op 0 reads value 2, .* cycle, 0 -> "),
    (published, ("ops", 1, "bytes"), DROP, "op 1 has no 'bytes'"),
    (published, ("ops", 1, "bytes"), -4, "value 1: size -4"),
    (published, ("ops", 1, "bytes"), 4.5, "value 1: size 4.5"),
    (published, ("ops", 1, "bytes"), math.nan, "value 1: size nan"),
    (published, ("ops", 1, "bytes"), math.inf, "value 1: size inf"),
    (published, ("ops", 1, "bytes"), "4", "value 1: size '4'"),
    (published, ("ops", 1, "bytes"), None, "value 1: size None"),
    (published, ("ops", 1, "bytes"), True, "value 1: size True"),
    (published, ("ops", 1, "bytes"), 1e300, "add up to more than"),
    (published, ("ops", 1, "bytes"), MOST_BYTES, "add up to more than"),
    (published, ("ops", 1, "cost"), DROP, "op 1 has no 'cost'"),
    (published, ("ops", 1, "cost"), -1, "op 1 has cost -1,"),
    (published, ("ops", 1, "cost"), math.nan, "op 1 has cost nan"),
    (published, ("ops", 1, "cost"), math.inf, "op 1 has cost inf"),
    (published, ("ops", 1, "cost"), 10**400, "a cost is too large"),
    (published, ("ops", 1, "cost"), 1e308, "a cost is too large"),
    (published, ("ops", 1, "cost"), "1", "op 1 has cost '1'"),
    (published, ("ops", 1, "cost"), False, "op 1 has cost False"),
    (published, ("ops", 1, "cost"), [1], r"op 1 has cost \[1\]"),
    (published, ("budget_bytes",), DROP, "has no 'budget_bytes'"),
    (published, ("budget_bytes",), -1, "budget -1 "),
    (published, ("budget_bytes",), math.nan, "budget nan"),
    (published, ("budget_bytes",), None, "budget_bytes None, not a number"),
    (published, ("budget_bytes",), "10", "budget_bytes '10', not a number"),
    (published, ("budget_bytes",), True, "budget True"),
    (published, ("budget_bytes",), 10**400, "the budget .* is too large"),
    (published, ("last_forward_op",), DROP, "neither"),
    (published, ("last_forward_op",), 3, "last_forward_op 3 is not one of the 3 ops"),
    (published, ("last_forward_op",), -1, "last_forward_op -1"),
    (published, ("last_forward_op",), 1.0, "last_forward_op 1.0"),
    (published, ("last_forward_op",), None, "last_forward_op None"),
    (published, ("last_forward_op",), True, "last_forward_op True"),
    (published, ("name",), 5, "name must be a str, not 5"),
    (own, ("format",), "rematerialization-problem/9", "neither"),
    (own, ("ops",), [], "ops is empty"),
    (own, ("ops", 1), [], r"op 1 is \[\], not an object"),
    (own, ("ops", 1, "reads"), DROP, "op 1 has no 'reads'"),
    (own, ("ops", 1, "writes"), 1, "op 1 has writes 1, not a list"),
    (own, ("ops", 1, "writes"), [1, 9], r"op 1 \(two\) writes 9, but there is no value 9"),
    (own, ("ops", 1, "writes"), [1, 1], r"op 1 \(two\): value 1 is written twice"),
    (own, ("ops", 1, "writes"), [1], r"op 2 \(none\) reads value 2, .* no op writes it"),
    (own, ("ops", 1, "cost"), None, r"op 1 \(two\) has cost None"),
    (own, ("ops", 1, "workspace"), -3, r"op 1 \(two\) has workspace -3"),
    (own, ("ops", 1, "workspace"), {}, r"op 1 \(two\) has workspace {}"),
    (own, ("ops", 1, "recomputable"), 1, r"op 1 \(two\) has recomputable 1, .* type bool"),
    (own, ("ops", 1, "region"), "1", r"op 1 \(two\) has region '1', .* type int"),
    (own, ("ops", 1, "name"), None, "op 1 .* has name None, .* type str"),
    (own, ("sizes",), 4, "has sizes 4, not a list"),
    (own, ("sizes", 2), math.inf, "value 2: size inf"),
    (own, ("sizes",), [4, 5, 6, 7], "value 3 has no op that writes it"),
    (own, ("boundary",), DROP, "has no 'boundary'"),
    (own, ("boundary",), 4, "boundary 4 is outside 0..3"),
    (own, ("boundary",), 1.5, "boundary 1.5"),
    (own, ("pinned",), None, "has pinned None, not a list"),
    (own, ("pinned",), [[1]], r"pinned \[\[1\]\] is not a list of value numbers"),
    (own, ("pinned",), [3], "pinned value 3 does not exist"),
    (own, ("resident",), -1, "resident -1"),
    (own, ("resident",), None, "resident None"),
    (own, ("budget",), [], r"budget \[\]"),
    (own, ("name",), {}, "name must be a str"),
]


@pytest.mark.parametrize(("make", "where", "to", "words"), MALFORMED)
def test_a_malformed_file_is_refused_by_its_name_and_the_place(make, where, to, words, tmp_path):
    from_json(make())  # so that what is refused is the change
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(changed(make(), where, to)))
    with pytest.raises(ProblemError, match=words) as caught:
        load(path)
    assert str(caught.value).startswith(f"{path}: ")


@pytest.mark.parametrize("data", [None, 3, "problem", [], [published()], {}])
def test_other_json_is_no_problem(data):
    with pytest.raises(ProblemError, match="neither a published instance"):
        from_json(data)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "No such file"),
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"1" * 5000, "not JSON"),  # more digits than Python reads
    ],
    ids=["missing", "empty", "cut", "binary", "deep", "long"],
)
def test_a_file_that_cannot_be_read(content, words, tmp_path):
    path = tmp_path / "bad.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ProblemError, match=words) as caught:
        load(path)
    assert str(caught.value).startswith(f"{path}: ")


def test_a_folder_is_no_file(tmp_path):
    with pytest.raises(ProblemError, match="directory"):
        load(tmp_path)


def test_ops_out_of_order_are_told_from_a_cycle():
    data = published()
    data["ops"] = [{"inputs": [1], "bytes": 4, "cost": 1}, {"inputs": [], "bytes": 4, "cost": 1}]
    with pytest.raises(ProblemError, match=r"op 0 reads value 1, .* out of order") as caught:
        from_json(data)
    assert "cycle" not in str(caught.value)


def test_a_long_cycle_is_shown_in_short():
    ops = tuple(Op("", ((i - 1) % 500,), (i,), 1.0) for i in range(500))
    with pytest.raises(ProblemError, match=r"cycle, 0 -> 1 -> .* -> 9 -> \.\.\. -> 0$"):
        Problem(ops, (1,) * 500, 250)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (([A, B], (1, 1), 1), "ops must be a tuple"),
        (((A, "b"), (1, 1), 1), "op 1 is 'b', not an Op"),
        (((A, B), [1, 1], 1), "sizes must be a tuple"),
        (((A, B), (1, 1), True), "boundary True"),
        (((A, B), (1, 1), 1, {0}), "pinned must be a frozenset"),
        (((A, B), (1, 1), 1, frozenset({"0"})), "pinned value '0' does not exist"),
        (((A, B), (1, 1.0), 1), "value 1: size 1.0"),
        (((A, Op("b", [0], (1,), 1.0)), (1, 1), 1), r"op 1 \(b\) reads \[0\], not a tuple"),
        (((A, Op("b", (0,), None, 1.0)), (1, 1), 1), r"op 1 \(b\) writes None, not a tuple"),
        (((A, B), (1, 1), 1, frozenset(), 0.0), "resident 0.0"),
        (((A, B), (1, 1), 1, frozenset(), 0, 5.0), "budget 5.0"),
        (((A, Op("b", (0,), (1,), 1.0, MOST_BYTES)), (1, 1), 1), "add up to more than"),
    ],
)
def test_a_malformed_problem_is_refused(arguments, words):
    with pytest.raises(ProblemError, match=words):
        Problem(*arguments)


def test_bytes_may_be_written_with_a_point():
    data = changed(changed(published(), ("ops", 0, "bytes"), 4.0), ("budget_bytes",), 10.0)
    problem = from_json(data)
    assert problem == from_json(published())
    assert {type(x) for x in (*problem.sizes, problem.budget)} == {int}


def test_a_published_instance_becomes_one_value_per_op():
    problem = from_json(published())
    assert [(op.reads, op.writes, op.cost) for op in problem.ops] == [((), (0,), 1), ((0,), (1,), 2), ((1, 0), (2,), 3)]
    assert (problem.sizes, problem.boundary, problem.budget, problem.name) == ((4, 4, 2), 2, 10, "small")


def test_what_own_files_may_leave_out():
    ops = [{"reads": [], "writes": [0], "cost": 1}]
    problem = from_json({"format": own()["format"], "ops": ops, "sizes": [4], "boundary": 1})
    assert problem == Problem((Op("", (), (0,), 1),), (4,), 1)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.one_of(small_problems(), reused_problems()), st.booleans())
def test_a_problem_survives_its_file(problem, limited):
    problem = problem if limited else problem.with_budget(None)
    data = to_json(problem)
    assert from_json(json.loads(json.dumps(data))) == problem
    assert json.loads(json.dumps(data)) == data


def test_a_large_problem_survives_its_file(tmp_path):
    problem = random_training_graph(3, 300)
    (tmp_path / "p.json").write_text(json.dumps(to_json(problem)))
    assert load(tmp_path / "p.json") == problem


junk = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-3, 12), st.floats(), st.text(max_size=3), st.just(10**310)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=2)),
    max_leaves=4,
)


@st.composite
def places(draw: st.DrawFn, data: Any) -> Where:
    """A place anywhere in JSON data."""
    at, where = data, ()
    while True:
        key = draw(st.sampled_from(sorted(at))) if isinstance(at, dict) else draw(st.integers(0, len(at) - 1))
        at, where = at[key], (*where, key)
        if not isinstance(at, (dict, list)) or not at or draw(st.booleans()):
            return where


@settings(max_examples=400, deadline=None, derandomize=True)
@given(st.data())
def test_anything_anywhere_is_a_problem_or_refused(data):
    good = data.draw(st.sampled_from((published(), own())))
    for _ in range(data.draw(st.integers(1, 3))):
        good = changed(good, data.draw(places(good)), data.draw(st.one_of(junk, st.just(DROP))))
        if not good:
            return
    problem = None
    with contextlib.suppress(ProblemError):
        problem = from_json(good)
    if problem is not None:
        assert math.isfinite(problem.total_cost)
        assert from_json(json.loads(json.dumps(to_json(problem)))) == problem
