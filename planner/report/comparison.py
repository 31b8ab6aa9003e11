"""A comparison of two plans: its records, as text and as HTML."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from planner.errors import gb
from planner.report.svg import MICRO, escape
from planner.report.tables import cells, heading, table
from planner.report.terminal import Style, style_of
from planner.report.words import clip, duration, pad, wrapped

MOST_ROWS = 20
_BYTES = ("budget", "peak", "everything kept", "eager, without a plan")
_SECONDS = ("step", "lower bound of the time")


@dataclass(frozen=True, slots=True)
class Fact:
    """A number of each plan, in bytes, in seconds, or as a share of the time."""

    name: str
    a: float
    b: float


@dataclass(frozen=True, slots=True)
class ModuleChange:
    """Modules whose paths differ only in numbers, where the plans decide otherwise, or pay another time.

    Attributes:
        name: the path; numbers are asterisks where several modules changed.
        count: how many modules changed.
        now_kept: bytes of values that the second plan keeps and the first one recomputes.
        now_recomputed: bytes of values that the second plan recomputes and the first one keeps.
        only_a, only_b: bytes of values that only one of the plans has, kept or recomputed.
        seconds: time that the second plan pays for recomputing there, less that of the first one.
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
    """The changes from plan a to plan b.

    Attributes:
        differences: the circumstances that both plans know, and that differ: name -> as it is in a and in b.
        facts: budget, peak and so on, of both.
        account: the lines that make up the peaks, where they differ: name -> bytes in a and in b.
        modules: the modules where decisions differ, or their times, the most bytes first.
        unchanged: how many saved activations have the same decision in both, at the same time.
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


def amount(name: str, value: float) -> str:
    """A fact's number in its unit."""
    return gb(value) if name in _BYTES else duration(value) if name in _SECONDS else f"{value:.1%}"


def _change(fact: Fact) -> str:
    difference = fact.b - fact.a
    if fact.name in ("more time", "gap to the lower bound"):
        points = f"{100 * difference:+.1f}"
        return "" if float(points) == 0 else f"{points} points"
    text = amount(fact.name, difference)
    return "" if not difference else text if difference < 0 else f"+{text}"


def _lead(c: Comparison) -> list[str]:
    """Sentences: which circumstances differ, and how many bytes are treated otherwise."""
    told = [f"Other {name}: {a}; then {b}." for name, (a, b) in c.differences.items()]
    kept, recomputed = (sum(getattr(m, of) for m in c.modules) for of in ("now_kept", "now_recomputed"))
    if not c.modules:
        return [*told, f"The plans decide the same for all {c.unchanged} saved activations."]
    only = sum(m.only_a + m.only_b for m in c.modules)
    changed = [f"{gb(kept)} are now kept and {gb(recomputed)} now recomputed"] if kept or recomputed else []
    changed += [f"{gb(only)} are in one of the plans only"] if only else []
    changed = changed or ["Some of what both recompute takes another time"]
    return [*told, f"{'; '.join([*changed, _as_before(c.unchanged)])}."]


def _as_before(count: int) -> str:
    return f"{count} saved activation{' is' if count == 1 else 's are'} treated as before"


def _moved(c: Comparison) -> list[ModuleChange]:
    return [m for m in c.modules if m.now_kept or m.now_recomputed or not (m.only_a or m.only_b)]


def to_text(c: Comparison, style: Style) -> str:
    """The comparison as text within 80 columns."""
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
    """The comparison as tables; no script, no style sheet."""
    lead = "".join(f"<p>{escape(text)}</p>" for text in _lead(c))
    rows = [(f.name, amount(f.name, f.a), amount(f.name, f.b), _change(f)) for f in c.facts]
    parts = [lead, heading("The plans"), _table(("", "first", "second", "change"), rows)]
    if c.account:
        lines = [(n, gb(a), gb(b), gb(b - a) if b < a else f"+{gb(b - a)}") for n, (a, b) in c.account.items()]
        parts += [heading("At the peak"), _table(("", "first", "second", "change"), lines)]
    modules = [
        (
            f"{m.name or '(the model)'}{f' x{m.count}' if m.count > 1 else ''}",
            gb(m.now_kept) if m.now_kept else "–",
            gb(m.now_recomputed) if m.now_recomputed else "–",
            duration(m.seconds, MICRO) if m.seconds <= 0 else f"+{duration(m.seconds, MICRO)}",
        )
        for m in _moved(c)[:MOST_ROWS]
    ]
    if modules:
        head = ("module", "now kept", "now recomputed", "extra time")
        parts += [heading("Where the plans decide otherwise"), _table(head, modules)]
    return f"<div style='max-width:760px'>{''.join(parts)}</div>"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return table([cells(head, 1, tag="th"), *(cells([*map(escape, row)], 1) for row in rows)])
