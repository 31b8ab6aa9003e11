"""`compare()`: the changes from one plan to another."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from math import isclose, prod

from planner.core.options import labelled
from planner.core.plan import Action, Decision, PlanRecord
from planner.report.comparison import Comparison, Fact, ModuleChange
from planner.report.names import folded

_PLAIN = {ord(c): None for c in "[]'"}


def compare_records(a: PlanRecord, b: PlanRecord) -> Comparison:
    """The changes from one plan to another; see `planner.compare`."""
    lines = {n: (a.account.get(n, 0), b.account.get(n, 0)) for n in dict.fromkeys([*a.account, *b.account])}
    facts = (
        Fact("budget", a.budget_bytes, b.budget_bytes),
        Fact("peak", a.peak_bytes, b.peak_bytes),
        Fact("everything kept", a.baseline_peak_bytes, b.baseline_peak_bytes),
        *_eager(a, b),
        Fact("step", a.step_seconds, b.step_seconds),
        Fact("lower bound of the time", a.bound, b.bound),
        Fact("more time", a.overhead, b.overhead),
        Fact("gap to the lower bound", a.gap, b.gap),
    )
    modules, unchanged = _changes(a.decisions, b.decisions)
    account = {name: pair for name, pair in lines.items() if pair[0] != pair[1]}
    return Comparison(differences(_circumstances(a), _circumstances(b)), facts, account, modules, unchanged)


def _eager(a: PlanRecord, b: PlanRecord) -> Iterator[Fact]:
    """The peaks without a plan, where both are known."""
    if a.eager_peak_bytes is not None and b.eager_peak_bytes is not None:
        yield Fact("eager, without a plan", a.eager_peak_bytes, b.eager_peak_bytes)


def differences(a: Mapping[str, str], b: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """The options with different values; an empty text stands for a value that is not known.

    Examples:
        >>> differences({"device": "cpu", "batch": ""}, {"device": "h100", "batch": "2x8"})
        {'device': ('cpu', 'h100')}
    """
    return {name: (a[name], b[name]) for name in a if a[name] and b.get(name) and a[name] != b[name]}


def _circumstances(plan: PlanRecord) -> dict[str, str]:
    """The model, the batch and the options of a plan, in words; empty where they are not known."""
    model = plan.identity
    size = sum(prod(p.shape) for p in model.parameters)
    mode = "" if model.modules[0].training else ", in evaluation mode"
    kinds = plan.step.batch or ()
    return {
        "model": f"{model.name} of {size:,} parameters{mode}",
        "batch": ", ".join(f"{k.name.removeprefix('batch').translate(_PLAIN)} {_by(k.shape)} {k.dtype}" for k in kinds),
        "device": plan.device,
        **labelled(plan.options),
        "solver": plan.solver,
    }


def _by(shape: Iterable[int]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def _changes(a: Iterable[Decision], b: Iterable[Decision]) -> tuple[tuple[ModuleChange, ...], int]:
    ours, theirs = _numbered(a), _numbered(b)
    moved: dict[str, list[tuple[str, Decision | None, Decision | None]]] = defaultdict(list)
    unchanged = 0
    for key in dict.fromkeys([*ours, *theirs]):
        one, other = ours.get(key), theirs.get(key)
        if one is not None and other is not None and one.action == other.action and isclose(_time(one), _time(other)):
            unchanged += 1
        else:
            moved[folded(key[0])].append((key[0], one, other))
    rows = []
    for name, changes in moved.items():
        modules = {module for module, _, _ in changes}
        rows.append(
            ModuleChange(
                name=name if len(modules) > 1 else changes[0][0],
                count=len(modules),
                now_kept=_moved_to(changes, "keep"),
                now_recomputed=_moved_to(changes, "recompute"),
                only_a=sum(one.nbytes for _, one, other in changes if one is not None and other is None),
                only_b=sum(other.nbytes for _, one, other in changes if one is None and other is not None),
                seconds=sum(_time(other) - _time(one) for _, one, other in changes),
            )
        )
    return tuple(
        sorted(rows, key=lambda r: (-(r.now_kept + r.now_recomputed + r.only_a + r.only_b), r.name))
    ), unchanged


def _moved_to(changes: Iterable[tuple[str, Decision | None, Decision | None]], action: Action) -> int:
    return sum(b.nbytes for _, a, b in changes if a is not None and b is not None and a.action != b.action == action)


def _time(d: Decision | None) -> float:
    return 0.0 if d is None else d.recompute_seconds


def _numbered(decisions: Iterable[Decision]) -> dict[tuple[str, str, int], Decision]:
    """Decisions by module, kind of op, and how many ops of that kind came before in the module."""
    counted: dict[tuple[str, str], int] = defaultdict(int)
    numbered = {}
    for d in decisions:
        place = d.module, d.op
        numbered[*place, counted[place]] = d
        counted[place] += 1
    return numbered
