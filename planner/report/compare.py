"""`compare()`: what changed from one plan to another."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from html import escape
from math import isclose, prod

from planner.core.options import labelled
from planner.core.plan import Action, Decision, PlanRecord
from planner.errors import gb
from planner.report.names import folded
from planner.report.terminal import Style, style_of
from planner.report.words import clip, duration, pad, shown, wrapped

MOST_ROWS = 20
_BYTES = ("budget", "peak", "everything kept")
_PLAIN = {ord(c): None for c in "[]'"}
_SECONDS = ("step", "least time proven")


@dataclass(frozen=True, slots=True)
class Fact:
    """One number of both plans: in bytes, in seconds, or a share of the time."""

    name: str
    a: float
    b: float


@dataclass(frozen=True, slots=True)
class ModuleChange:
    """Modules whose paths differ only in numbers, where the plans decide otherwise, or pay another time; bytes.

    Attributes:
        name: the path; numbers are asterisks where several modules changed.
        count: how many modules changed.
        now_kept: what the second plan keeps and the first one recomputes.
        now_recomputed: what the second plan recomputes and the first one keeps.
        only_a, only_b: what only one of the plans has, kept or recomputed.
        seconds: paid for recomputing there by the second plan, less what the first one pays.
    """

    name: str
    count: int
    now_kept: int
    now_recomputed: int
    only_a: int
    only_b: int
    seconds: float


@dataclass(frozen=True)
class Comparison:
    """What changed from plan a to plan b.

    Attributes:
        differences: what the plans were made for, where that is known and differs: name -> as it is in a and in b.
        facts: budget, peak and so on, of both.
        account: the lines that make up the peaks, where they differ: name -> bytes in a and in b.
        modules: where the decisions differ, or what they cost, the most bytes first.
        unchanged: how many values have the same decision in both, at the same time.
    """

    differences: Mapping[str, tuple[str, str]]
    facts: tuple[Fact, ...]
    account: Mapping[str, tuple[int, int]] = field(repr=False)
    modules: tuple[ModuleChange, ...] = field(repr=False)
    unchanged: int

    def __str__(self) -> str:
        return to_text(self, style_of(colour=False))

    def _repr_html_(self) -> str:
        return to_html(self)


def compare_records(a: PlanRecord, b: PlanRecord) -> Comparison:
    """The changes from one plan to another; see `planner.compare`."""
    lines = {n: (a.account.get(n, 0), b.account.get(n, 0)) for n in dict.fromkeys([*a.account, *b.account])}
    facts = (
        Fact("budget", a.budget_bytes, b.budget_bytes),
        Fact("peak", a.peak_bytes, b.peak_bytes),
        Fact("everything kept", a.baseline_peak_bytes, b.baseline_peak_bytes),
        Fact("step", a.step_seconds, b.step_seconds),
        Fact("least time proven", a.bound, b.bound),
        Fact("overhead", a.overhead, b.overhead),
        Fact("gap", a.gap, b.gap),
    )
    modules, unchanged = _changes(a.decisions, b.decisions)
    return Comparison(_differences(a, b), facts, {n: p for n, p in lines.items() if p[0] != p[1]}, modules, unchanged)


def _differences(a: PlanRecord, b: PlanRecord) -> dict[str, tuple[str, str]]:
    ours, theirs = _made_for(a), _made_for(b)
    both = {name: (ours[name], theirs[name]) for name in ours}
    return {name: (one, other) for name, (one, other) in both.items() if one and other and one != other}


def _made_for(plan: PlanRecord) -> dict[str, str]:
    """What a plan was made for; empty for what is not known."""
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
    """By module, kind of op, and how many of it came before in the module."""
    counted: dict[tuple[str, str], int] = defaultdict(int)
    found = {}
    for d in decisions:
        place = d.module, d.op
        found[*place, counted[place]] = d
        counted[place] += 1
    return found


def amount(name: str, value: float) -> str:
    """A fact's number in its unit."""
    return gb(value) if name in _BYTES else duration(value) if name in _SECONDS else f"{value:.1%}"


def _change(fact: Fact) -> str:
    difference = fact.b - fact.a
    if fact.name in ("overhead", "gap"):
        points = f"{100 * difference:+.1f}"
        return "" if float(points) == 0 else f"{points} points"
    text = amount(fact.name, difference)
    return "" if not difference else text if difference < 0 else f"+{text}"


def _lead(c: Comparison) -> list[str]:
    """In words: what is not the same to begin with, and how much changed."""
    found = [f"Other {name}: {shown(a)}; then {shown(b)}." for name, (a, b) in c.differences.items()]
    kept, recomputed = (sum(getattr(m, of) for m in c.modules) for of in ("now_kept", "now_recomputed"))
    if not c.modules:
        return [*found, f"The plans decide the same for all {c.unchanged} values."]
    only = sum(m.only_a + m.only_b for m in c.modules)
    changed = [f"{gb(kept)} are now kept and {gb(recomputed)} now recomputed"] if kept or recomputed else []
    changed += [f"{gb(only)} are in one of the plans only"] if only else []
    changed = changed or ["Some of what both recompute takes another time"]
    return [*found, f"{'; '.join([*changed, f'{c.unchanged} values are treated as before'])}."]


def _moved(c: Comparison) -> list[ModuleChange]:
    return [m for m in c.modules if m.now_kept or m.now_recomputed or not (m.only_a or m.only_b)]


def to_text(c: Comparison, style: Style) -> str:
    """Within 80 columns."""
    lines = [style.paint(line, "bold") for text in _lead(c) for line in wrapped(style.name(text))]
    lines += ["", style.paint(f"{'':<26} {'first':>14} {'second':>14} {'change':>16}", "bold")]
    lines += [
        f"{f.name:<26} {amount(f.name, f.a):>14} {amount(f.name, f.b):>14} {_change(f):>16}".rstrip() for f in c.facts
    ]
    if c.account:
        lines += ["", style.paint("At the peak:", "bold")]
        for name, (a, b) in c.account.items():
            change = gb(b - a) if b < a else f"+{gb(b - a)}"
            lines.append(f"  {pad(style.name(name), 30)} {gb(a):>14} {gb(b):>14} {change:>16}")
    if moved := _moved(c):
        lines += ["", style.paint(f"{'module':<42} {'now kept':>11} {'now recomp.':>12} {'time':>12}", "bold")]
        for m in moved[:MOST_ROWS]:
            many = f" x{m.count}" if m.count > 1 else ""
            name = clip(style.name(m.name or "(the model)"), 42 - len(many)) + many
            time = duration(m.seconds) if m.seconds <= 0 else f"+{duration(m.seconds)}"
            lines.append(f"{pad(name, 42)} {gb(m.now_kept):>11} {gb(m.now_recomputed):>12} {time:>12}")
        if len(moved) > MOST_ROWS:
            lines.append(f"and {len(moved) - MOST_ROWS} more")
    return "\n".join(lines)


def to_html(c: Comparison) -> str:
    """The same as tables; no script, no style sheet."""
    lead = "".join(f"<p>{escape(text)}</p>" for text in _lead(c))
    rows = [(f.name, amount(f.name, f.a), amount(f.name, f.b), _change(f)) for f in c.facts]
    rows += [(f"at the peak: {shown(n)}", gb(a), gb(b), gb(b - a)) for n, (a, b) in c.account.items()]
    modules = [
        (
            f"{shown(m.name) or '(the model)'}{f' x{m.count}' if m.count > 1 else ''}",
            gb(m.now_kept),
            gb(m.now_recomputed),
            duration(m.seconds),
        )
        for m in _moved(c)[:MOST_ROWS]
    ]
    second = _table(("module", "now kept", "now recomputed", "time"), modules) if modules else ""
    return f"<div style='max-width:720px'>{lead}{_table(('', 'first', 'second', 'change'), rows)}{second}</div>"


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    def cells(tag: str, texts: Iterable[str]) -> str:
        return "".join(
            f"<{tag} style='text-align:{'right' if i else 'left'}'>{escape(text)}</{tag}>"
            for i, text in enumerate(texts)
        )

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f"<table><thead><tr>{cells('th', head)}</tr></thead><tbody>{body}</tbody></table>"
