"""Plan files: what is saved is what is loaded and what trains; what is damaged or hostile is told in words."""

import copy
import dataclasses
import errno
import gzip
import json
import os
import pickle
import sys
import textwrap
import warnings
from contextlib import contextmanager
from typing import Literal

import jsonschema
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import planner.eager.pipeline
import planner.planning.solution
import planner.report.html
import planner.report.text  # reading a file must import nothing: what draws it is here already
from planner import ApplyError, OptionError, Plan, PlanFileError, PlanWarning, applied_plan, plan
from planner.core.options import About, Options, option
from planner.core.plan import PlanRecord, Point
from planner.planfile import files
from planner.planfile.files import VERSION, plan_file_schema
from planner.planfile.jsonfile import KEYS
from planner.planfile.schema import LARGEST

from .forked import python
from .measure import held_before, results, step_peak
from .real_models import Case, gpt2
from .variants import keeping, more

pytestmark = pytest.mark.usefixtures("short_searches")

SCHEMA = os.path.join(os.path.dirname(__file__), "..", "docs", f"plan-{VERSION}.schema.json")
EVERYTHING: dict[str, int] = {}
KINDS = {"compiled": {}, "eager": {"mode": "eager"}, "dynamic": {"dynamic": True}}


class Broken(nn.Module):
    """Two graphs, the second with dropout."""

    def __init__(self, rate=0.2):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU())
        self.second = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(rate), nn.Linear(64, 64), nn.GELU())

    def forward(self, x):
        y = self.first(x)
        torch._dynamo.graph_break()
        return self.second(y).square().mean()


def broken():
    return Case(Broken().train(), {"x": torch.randn(512, 64)}, lambda output: output)


def at(case, fraction, **options):
    """A plan at a fraction of what one that is compiled would take to keep everything."""
    options = {"loss_fn": case.loss_fn, "solver": "chen", **options}
    key = str(case.model)
    if key not in EVERYTHING:
        EVERYTHING[key] = plan(case.model, case.batch, budget_gb=4, loss_fn=case.loss_fn).baseline_peak_bytes
    return plan(case.model, case.batch, budget_gb=fraction * EVERYTHING[key] / 2**30, **options)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """For each kind of plan: the case, the plan, and its file."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("plans")
    found = {}
    for name, options in KINDS.items():
        torch.manual_seed(0)
        case = gpt2(dropout=0.1, layers=1)
        made = at(case, 0.85, **options)
        made.save(folder / f"{name}.json")
        found[name] = case, made, folder / f"{name}.json"
    return found


@contextmanager
def unsolved():
    """No solver may run, and nothing be warned of."""

    def solved(*_, **__):
        raise AssertionError("a solver ran")

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        patch.setattr(planner.planning.solution, "solve", solved)
        patch.setattr(planner.eager.pipeline, "search", solved)
        warnings.simplefilter("error", PlanWarning)
        yield


def changed(path, to, change):
    data = json.loads(path.read_text())
    change(data)
    to.write_text(json.dumps(data))
    return to


# What is saved is what is loaded


@pytest.mark.parametrize("kind", KINDS)
def test_a_loaded_plan_shows_what_the_saved_one_showed(kind, saved, tmp_path):
    _, made, path = saved[kind]
    loaded = Plan.load(path)
    for name in PlanRecord.__dataclass_fields__:
        if name not in ("request", "graph_modules"):
            assert getattr(loaded, name) == getattr(made, name), name
    assert str(loaded) == str(made)
    assert loaded._repr_html_() == made._repr_html_()
    loaded.save(tmp_path / "again.json.gz")
    assert gzip.decompress((tmp_path / "again.json.gz").read_bytes()) == path.read_bytes()
    assert str(Plan.load(tmp_path / "again.json.gz")) == str(made)


@pytest.mark.compat
@pytest.mark.parametrize("kind", KINDS)
def test_a_file_is_as_its_schema_says(kind, saved):
    """By two validators that are not ours; the schema in the documentation is the one of the code."""
    with open(SCHEMA, encoding="utf-8") as f:
        schema = json.load(f)
    assert schema == plan_file_schema(), "write json.dumps(planner.planfile.files.plan_file_schema(), indent=1) there"
    data = json.loads(saved[kind][2].read_text())
    jsonschema.validate(data, schema, jsonschema.Draft202012Validator)
    data["plan"]["timeline"]["module"] = 3
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(data, schema, jsonschema.Draft202012Validator)


# Applied in another process


FRESH = """
    import sys, torch, warnings
    sys.path.insert(0, {root!r})
    import planner.eager.pipeline, planner.planning.solution
    from pathlib import Path
    from planner import Plan, PlanWarning, applied_plan
    from tests.measure import held_before, results, step_peak
    from tests.real_models import gpt2

    def solved(*_, **__): raise AssertionError("a solver ran")
    planner.planning.solution.solve = planner.eager.pipeline.search = solved
    warnings.simplefilter("error", PlanWarning)
    for path in map(Path, {paths!r}):
        torch.manual_seed(0)
        case = gpt2(dropout=0.1, layers=1)
        Plan.load(path).apply(case.model)
        found = results(case)
        peak = held_before(case) + step_peak(case, path.parent)
        torch.save((found, peak, applied_plan(case.model).peak_bytes), path.with_suffix(".pt"))
"""


@pytest.mark.thorough
@pytest.mark.compat
def test_a_fresh_process_trains_by_the_file_alone(saved):
    """Gradients are those of the plan applied where it was made; the peak is within the budget; nothing is solved."""
    root = os.path.dirname(os.path.dirname(__file__))
    script = textwrap.dedent(FRESH).format(root=root, paths=[str(path) for _, _, path in saved.values()])
    done = python("-c", script)
    assert done.returncode == 0, done.stderr
    for case, made, path in saved.values():
        found, peak, predicted = torch.load(path.with_suffix(".pt"))
        made.apply()
        try:
            expected = results(case)
        finally:
            made.remove()
        assert found.keys() == expected.keys()
        for name, t in expected.items():
            assert torch.equal(found[name], t), name
        assert made.baseline_peak_bytes > made.budget_bytes >= predicted >= peak > 0.95 * made.peak_bytes


# Applied to a model


@pytest.mark.compat
def test_several_graphs_train_by_a_file(tmp_path):
    case = broken()
    made = at(case, 0.8)
    made.save(tmp_path / "plan.json")
    expected = results(case)
    with unsolved():
        Plan.load(tmp_path / "plan.json", case.loss_fn).apply(case.model)
        found = results(case)
    assert all(torch.equal(found[name], t) for name, t in expected.items())
    assert applied_plan(case.model).recipe == made.recipe
    assert "Taken from" in applied_plan(case.model).note


def test_another_model_is_refused_by_name_and_stays_as_it_is(saved):
    case, _, path = saved["compiled"]
    loaded = Plan.load(path)
    wider = gpt2(dropout=0.1, layers=1).model
    wider.transformer.h[0].mlp.c_fc.weight = nn.Parameter(torch.zeros(128, 640))
    evaluated = copy.deepcopy(case.model)
    evaluated.transformer.h[0].eval()
    frozen = copy.deepcopy(case.model)
    frozen.transformer.wpe.weight.requires_grad_(False)
    other = torch.nn.Linear(8, 8)
    for model, words in (
        (wider, r"GPT2LMHeadModel with 16 parameters; .*mlp.c_fc.weight is \(128, 640\).* here, \(128, 512\) .*there"),
        (evaluated, r"h\.0 is GPT2Block in evaluation mode here, GPT2Block in training mode there"),
        (frozen, r"wpe.weight is frozen here, trained there"),
        (gpt2(layers=2).model, r"with 28 parameters: transformer\.h\.1\.\S+ is \(128,\) float32 here, nothing there"),
        (other, r"this is Linear with 2 parameters: transformer\.\S+ is nothing here"),
        (None, r"no model.*plan\.apply\(model\)"),
        ("gpt2", r"needs a torch.nn.Module; it was given 'gpt2'"),
    ):
        before = dict(vars(model)) if isinstance(model, nn.Module) else {}
        with pytest.raises(ApplyError, match=words):
            loaded.apply(model)
        assert before == (dict(vars(model)) if isinstance(model, nn.Module) else {})
    for use in (loaded.verify, loaded.repair, loaded.remove):
        with pytest.raises(ApplyError, match=r"applied_plan\(model\)"):
            use()


@pytest.mark.usefixtures("unwatched")
def test_another_batch_is_planned_anew_and_said_so(saved, tmp_path):
    case, made, path = saved["compiled"]
    model = copy.deepcopy(case.model)
    Plan.load(path).apply(model)
    short = Case(model, {name: t[:, :96].contiguous() for name, t in case.batch.items()})
    with pytest.warns(PlanWarning, match=r"compiled\.json does not serve.*\(4, 128\).*\(4, 96\).*planned anew"):
        found = results(short)
    expected = results(Case(case.model, short.batch))
    assert all(torch.equal(found[name], t) for name, t in expected.items())
    assert held_before(short) + step_peak(short, tmp_path) <= made.budget_bytes
    with unsolved():  # it still serves what it was made for
        results(Case(model, case.batch))
    assert applied_plan(model).peak_bytes == made.peak_bytes


def changed_dropout(case):
    case.model.transformer.drop.p = 0.0


def changed_code(case):
    block = type(case.model.transformer.h[0])

    class Other(block):
        def forward(self, x, *args, **kwargs):
            return super().forward(x, *args, **kwargs) * 1.5

    Other.__qualname__ = block.__qualname__
    case.model.transformer.h[0].__class__ = Other


@pytest.mark.parametrize(
    ("kind", "change"),
    [("compiled", changed_dropout), *more(("dynamic", changed_code)), ("eager", changed_code)],
)
def test_other_code_is_planned_anew_and_said_so(kind, change, saved, tmp_path):
    case, made, path = saved[kind]
    changed = Case(copy.deepcopy(case.model), case.batch)
    change(changed)
    plain = Case(copy.deepcopy(changed.model), case.batch)
    Plan.load(path).apply(changed.model)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = results(changed)
    expected = results(plain)
    assert all(torch.equal(found[name], t) for name, t in expected.items())
    assert held_before(changed) + step_peak(changed, tmp_path) <= made.budget_bytes
    # whole modules may be checkpointed as before
    assert kind == "eager" or any("are not those" in str(w.message) or "not the one" in str(w.message) for w in told)


def test_what_a_file_cannot_hold_is_said_where_it_is_missed(tmp_path):
    model, x = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)).train(), torch.randn(64, 64)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    options = {"loss_fn": torch.Tensor.mean, "optimizer": optimizer, "time_limit": 5, "account_gb": {"more": 1}}
    made = plan(model, x, budget_gb=2, **options)
    made.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert (loaded.options.time_limit, loaded.options.account_gb) == (5, {"more": 1})
    assert "AdamW(" in loaded.options.optimizer
    assert "foreach=True" in loaded.options.optimizer
    loaded.apply(model)
    with pytest.warns(PlanWarning, match=r"The loss_fn.*not counted: Plan\.load\("):
        model(x[:32]).mean().backward()
    now = applied_plan(model).account
    assert now["optimizer state"] == made.account["optimizer state"] > 0
    assert applied_plan(model).phase_peaks["optimizer"] > applied_plan(model).resident_bytes


def test_an_applied_plan_of_a_file_is_verified_and_made_eager(saved):
    case, made, path = saved["compiled"]
    model = copy.deepcopy(case.model)
    Plan.load(path).apply(model)
    seen = applied_plan(model).verify(case.batch)
    assert seen.gradients_agree
    assert seen.measured_bytes <= made.budget_bytes
    applied_plan(model).remove()
    Plan.load(path).apply(model, mode="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PlanWarning)
        found = results(Case(model, case.batch))
    expected = results(case)
    assert all(torch.equal(found[name], t) for name, t in expected.items())
    assert applied_plan(model).recipe.kept


# Known plans


@pytest.mark.parametrize("kind", keeping("compiled", "eager", of=KINDS))
def test_a_known_plan_of_the_same_step_is_not_solved_again(kind, saved):
    case, made, path = saved[kind]
    with unsolved():
        again = plan(case.model, case.batch, budget_gb=made.request.budget_gb, known=path, solver="chen", **KINDS[kind])
    assert again.recipe == made.recipe
    assert (again.overhead, again.peak_bytes, again.bound) == (made.overhead, made.peak_bytes, made.bound)
    assert f"Taken from {path}" in again.note


def test_a_known_plan_of_another_step_is_said_to_be_one(tmp_path):
    case = broken()
    made = at(case, 0.8)
    made.save(tmp_path / "plan.json")
    known, budget = Plan.load(tmp_path / "plan.json"), made.request.budget_gb
    common = {"budget_gb": budget, "solver": "chen", "loss_fn": case.loss_fn}
    for options, why in (
        ({"budget_gb": 1.02 * budget}, "its budget differs"),
        ({"solver": "ilp", "time_limit": 1}, "it is of solver='chen'"),
        ({"budget_gb": 2 * budget, "optimizer": "sgd", "accumulate": True}, "fixed memory"),
        ({"loss_fn": lambda output: output.exp()}, "its sizes differ"),
    ):
        anew = plan(case.model, case.batch, known=known, **(common | options))
        assert f"not taken from {tmp_path}/plan.json: {why}" in anew.note
    case.model.first[1] = nn.Tanh()
    assert "its graphs differ" in plan(case.model, case.batch, known=known, **common).note
    with pytest.raises(OptionError, match="known=3"):
        plan(case.model, case.batch, known=3, **common)


# Files that are damaged, hostile, or of another time


def reason(path):
    with pytest.raises(PlanFileError) as e:
        Plan.load(path)
    assert str(path) in str(e.value)
    return str(e.value)


def test_what_is_no_plan_file_is_told_in_words(saved, tmp_path):
    good = saved["compiled"][2]
    bad = tmp_path / "bad.json"
    assert "No such file" in reason(tmp_path / "none.json")
    assert "directory" in reason(tmp_path)
    for content, words in (
        (b"", "line 1, column 1"),
        (b"\xff\xfe\x00", "byte 0 is not UTF-8"),
        (b"[1, 2]", "not a plan file"),
        (b'{"format": "another"}', "not a plan file"),
        (good.read_bytes()[:5000], "damaged or cut short"),
        (gzip.compress(good.read_bytes())[:500], "damaged or cut short"),
        (gzip.compress(good.read_bytes())[:-4] + b"1234", "cannot be read"),
        (b"[" * 100_000, "within each other"),
        (b'{"a":' * 100_000, "within each other"),
        (b'{"version": ' + b"9" * 5000 + b"}", "digits"),
        (b'{"a": NaN}', "found NaN"),
        (b'{"a": -Infinity}', "found -Infinity"),
        (b'{"a": 1, "a": 2}', "'a' comes twice"),
        (json.dumps(dict.fromkeys(map(str, range(KEYS + 1)))).encode(), f"at most {KEYS} keys"),
        (gzip.compress(b" " * 2**27, 1), "at most"),
    ):
        bad.write_bytes(content)
        assert words in reason(bad)
    os.mkfifo(tmp_path / "pipe")
    assert "expected a file" in reason(tmp_path / "pipe")
    for path in (0, ""):
        with pytest.raises(OptionError, match=f"path={path!r}"):
            Plan.load(path)
    with pytest.raises(OptionError, match="loss_fn='mse'"):
        Plan.load(good, "mse")
    if os.getuid():
        bad.chmod(0)
        assert "Permission denied" in reason(bad)


def curve(sizes):
    return {"peak_bytes": sizes, "overhead": [0.0 for _ in sizes], "name": ["" for _ in sizes]}


def setter(*keys, value):
    def change(data):
        for key in keys[:-1]:
            data = data[key]
        if value is None:
            del data[keys[-1]]
        else:
            data[keys[-1]] = value

    return change


@pytest.mark.parametrize(
    ("keys", "value", "words"),
    [
        (("version",), VERSION + 1, "newer version.*upgrade"),
        (("version",), 0, "version: expected a whole number from 1"),
        (("version",), 1, "older version.*format 1, here 2.*plan again"),
        (("version",), "1", "version: expected a whole number"),
        (("plan",), None, "'plan' in it"),
        (("plan", "peak_bytes"), None, r"plan\.peak_bytes: expected a value, found none"),
        (("plan", "peak_bytes"), 1.5, r"plan\.peak_bytes: expected a valid integer, found 1\.5"),
        (("plan", "peak_bytes"), True, r"plan\.peak_bytes: expected a valid integer, found True"),
        (
            ("plan", "peak_bytes"),
            10**19,
            rf"plan\.peak_bytes: expected less than or equal to {LARGEST}, found 10{{19}}",
        ),
        (("plan", "peak_bytes"), 1, r"plan\.peak_bytes: expected \d+, its timeline's peak, found 1"),
        (("plan", "baseline_peak_bytes"), 1, r"plan\.baseline_peak_bytes: expected \d+, as the problem"),
        (("plan", "account", "parameters"), 1, r"plan\.account: expected lines of"),
        (("plan", "budget_bytes"), -1, r"plan\.budget_bytes"),
        (("plan", "overhead"), "a", r"plan\.overhead: expected a valid number, found a"),
        (("plan", "timeline", "phase"), ["forward"], r"plan\.timeline\.\w+: expected \d+ rows"),
        (("plan", "timeline", "phase", "rows", 3), 99, r"plan\.timeline\.phase\.rows\[3\]: expected a number below"),
        (("plan", "timeline", "phase", "values", 0), "sideways", r"phase\[0\]: expected 'forward', .*, found sideways"),
        (("plan", "schedule", "steps", 0), 7, r"plan\.schedule: expected one of the problem"),
        (("plan", "schedule"), {"steps": []}, r"plan\.schedule"),
        (("plan", "problem", "sizes", 0), 1, r"plan\.(timeline|baseline)"),
        (("plan", "problem", "ops", "reads", 5), [10**6], r"plan\.problem: .*op 5"),
        (("plan", "recipe"), {"kept": {}, "calls": {}}, r"plan\.recipe"),
        (("plan", "recipe", "os.system"), "id", r"plan\.recipe"),
        (("plan", "baseline_timeline", "reads", 3), [10**6], r"baseline_timeline\.reads\[3\]"),
        (
            ("plan", "baseline_timeline", "reads"),
            {"values": [[0]], "rows": [0]},
            r"reads: expected a list, found",
        ),
        (("plan", "baseline_timeline", "seconds", "values", 0), -1.0, r"line\.seconds\[\d+\]: expected seconds"),
        (("plan", "overhead"), 1e12, r"plan\.overhead: expected a share of the time"),
        (("plan", "gap"), -0.5, r"plan\.gap: expected a share of the time"),
        (("plan", "known_curve"), {"points": curve([-1]), "about": ""}, r"plan\.known_curve: expected bytes"),
        (("plan", "note"), "x" * 10_001, r"plan\.note: expected at most 10000 characters, found x+"),
        (
            ("plan", "decisions", "module", "values", 0),
            "9" * 1001,
            r"decisions\[\d+\]: expected names of at most",
        ),
        (("plan", "step", "where"), "moon", r"step\.where: expected a torch device"),
        (("plan", "options", "mode"), "magic", r"options\.mode: expected 'aten', 'inductor' or 'eager', found magic"),
        (("plan", "identity", "modules", "name"), 3, r"identity\.modules\.name: expected a list"),
        (
            ("plan", "step", "card", "flops", 0, 0),
            "os",
            r"step\.card\.flops\[0\]\[0\]: expected .*'bfloat16'.*, found os",
        ),
    ],
)
def test_what_is_wrong_in_a_file_is_named_with_its_place(keys, value, words, saved, tmp_path):
    path = changed(saved["compiled"][2], tmp_path / "bad.json", setter(*keys, value=value))
    with pytest.raises(PlanFileError, match=words):
        Plan.load(path)


def test_what_a_terminal_or_a_page_would_obey_is_harmless(saved, tmp_path):
    _, made, good = saved["compiled"]
    evil = "<script>alert(1)</script>\x1b[2J\u202e\ud800"

    def change(data):
        data["plan"]["decisions"]["module"] = [evil] * len(made.decisions)
        data["plan"]["note"] = evil

    loaded = Plan.load(changed(good, tmp_path / "evil.json", change))
    page = loaded._repr_html_()
    assert "<script" not in page
    assert not set("\x1b\u202e\ud800") & set(page + str(loaded))


def test_a_recipe_that_would_train_wrongly_is_not_run(tmp_path):
    """Ops left out, run twice, or out of order: planned anew, with a warning, and the gradients are right."""
    layers = [m for _ in range(3) for m in (nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1))]
    model = nn.Sequential(*layers).train()
    case = Case(model, {"input": torch.randn(512, 64)}, torch.Tensor.mean)
    at(case, 0.75).save(tmp_path / "plan.json")
    expected = results(case)
    for edit in (
        lambda r: r["backward"].pop(),
        lambda r: r["forward"].reverse(),
        lambda r: r["backward"].append(10**9),
        lambda r: r["backward"].append(-1),
        lambda r: r["forward"].extend(r["forward"]),
    ):

        def change(data, edit=edit):
            (region,) = (r for order in data["plan"]["recipe"]["calls"].values() for r in order)
            edit(region)

        Plan.load(changed(tmp_path / "plan.json", tmp_path / "tampered.json", change), case.loss_fn).apply(model)
        with pytest.warns(PlanWarning, match="planned anew"):
            found = results(case)
        applied_plan(model).remove()
        assert all(torch.equal(found[name], t) for name, t in expected.items())


HOSTILE = [None, True, -1, 0, 2**63, LARGEST, 1e308, -0.5, "", "\x00", "__import__('os')", [], {}, [[]], {"values": []}]


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    folder = tmp_path_factory.mktemp("small")
    case = broken()
    for kind in ("compiled", "eager"):
        at(case, 0.9, mode=kind).save(folder / f"{kind}.json")
        Plan.load(folder / f"{kind}.json")._repr_html_()  # imports what shows a plan
    return folder


@settings(max_examples=120, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data(), kind=st.sampled_from(["compiled", "eager"]))
def test_any_damage_gives_a_plan_or_a_plan_file_error(data, kind, small, tmp_path):
    """What loads can be looked at; nothing else is ever raised, and nothing imported."""
    text = (small / f"{kind}.json").read_text()
    path = tmp_path / "damaged.json"
    if data.draw(st.booleans()):
        cut = data.draw(st.integers(0, len(text)))
        path.write_bytes(text[:cut].encode() + data.draw(st.binary(max_size=4)))
    else:
        tree = json.loads(text)
        for _ in range(data.draw(st.integers(1, 2))):
            place = tree
            while True:
                keys = list(place) if isinstance(place, dict) else list(range(len(place)))
                key = data.draw(st.sampled_from(keys))
                if not isinstance(place[key], (dict, list)) or not place[key] or data.draw(st.integers(0, 4)) == 0:
                    break
                place = place[key]
            place[key] = copy.deepcopy(data.draw(st.sampled_from(HOSTILE)))
        path.write_text(json.dumps(tree))
    modules = set(sys.modules)
    try:
        loaded = Plan.load(path)
    except PlanFileError:
        return
    assert isinstance(loaded, Plan)
    assert loaded.summary()
    assert loaded._repr_html_()
    assert set(sys.modules) == modules


def test_plans_without_columns_of_later_versions_load(saved, tmp_path):
    """A field that has a default may be missing: so files stay readable when plans get new ones."""
    path = changed(saved["compiled"][2], tmp_path / "old.json", setter("plan", "timeline", "source", value=None))
    assert {m.source for m in Plan.load(path).timeline} == {""}


@dataclasses.dataclass(frozen=True)
class MoreOptions(Options):
    """The options of another package: one that is a record, one that is not."""

    limits: tuple[Point, ...] = option((), About())
    tier: Literal["fused", "plain"] = option("plain", About())


def test_options_of_another_package_are_saved_and_loaded(saved, tmp_path):
    _, made, path = saved["compiled"]
    given = dataclasses.asdict(made.options) | {"limits": (Point(1, 0.5), Point(2, 0.25, "b")), "tier": "fused"}
    files.save(dataclasses.replace(made.record, options=MoreOptions(**given)), tmp_path / "more.json")
    loaded = files.load(tmp_path / "more.json", kind=MoreOptions)
    assert loaded.record.options == MoreOptions(**given)
    files.save(loaded.record, tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == (tmp_path / "more.json").read_bytes()
    assert files.load(path, kind=MoreOptions).record.options.tier == "plain"
    with pytest.raises(PlanFileError, match=r"plan\.options\.(limits|tier): expected no field of this name"):
        Plan.load(tmp_path / "more.json")
    changed(tmp_path / "more.json", tmp_path / "bad.json", setter("plan", "options", "tier", value="os"))
    with pytest.raises(PlanFileError, match=r"plan\.options\.tier: expected 'fused' or 'plain', found os"):
        files.load(tmp_path / "bad.json", kind=MoreOptions)


# Writing


def test_an_interrupted_or_failed_write_leaves_the_old_file(saved, tmp_path, monkeypatch):
    made = saved["compiled"][1]
    target = tmp_path / "plan.json"
    target.write_text("old")
    target.chmod(0o600)

    def raising(error):
        def write(*_):
            raise error

        return write

    for name in ("fsync", "replace"):
        for error in (KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device")):
            monkeypatch.setattr(os, name, raising(error))
            with pytest.raises((KeyboardInterrupt, PlanFileError), match=r"plan\.json: cannot be written: No space|^$"):
                made.save(target)
            monkeypatch.undo()
            assert target.read_text() == "old"
            assert os.listdir(tmp_path) == ["plan.json"]
    (tmp_path / "link.json").symlink_to(target)
    made.save(tmp_path / "link.json")
    assert (tmp_path / "link.json").is_symlink()
    assert Plan.load(target).peak_bytes == made.peak_bytes
    assert target.stat().st_mode & 0o777 == 0o600
    for wrong in (tmp_path, tmp_path / "none" / "plan.json", tmp_path / "a\0b"):
        with pytest.raises(PlanFileError, match="cannot be written"):
            made.save(wrong)
    with pytest.raises(OptionError, match="path=1"):
        made.save(1)


def test_a_plan_is_copied_as_it_is_and_pickled_as_a_file():
    model = nn.Linear(4, 4)
    for p in (plan(model, torch.zeros(2, 4), budget_gb=1, loss_fn=torch.Tensor.mean), plan(model, budget_gb=1)):
        assert copy.copy(p) is copy.deepcopy([p])[0] is p
        with pytest.raises(OptionError, match=r"save\(path\)"):
            pickle.dumps(p)


def test_a_plan_that_is_not_made_yet_cannot_be_saved(tmp_path):
    model, x = nn.Linear(8, 8), torch.randn(4, 8)
    p = plan(model, budget_gb=1)
    with pytest.raises(ApplyError, match="first training step"):
        p.save(tmp_path / "plan.json")
    p.apply()
    model(x).mean().backward()
    p.save(tmp_path / "plan.json")
    with unsolved():
        Plan.load(tmp_path / "plan.json").apply(other := copy.deepcopy(model.__class__(8, 8)))
        other(x).mean().backward()
