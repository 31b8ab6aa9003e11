"""Decisions added up per module, repeated layers folded."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from planner.core.plan import Action, Decision, InPieces
from planner.errors import gb
from planner.report.names import NUMBER, folded
from planner.report.words import duration

WORTH_SAYING_ONCE = 12  # characters


@dataclass(frozen=True, slots=True)
class ModuleRow:
    """Modules whose paths differ only in numbers: how many, and their bytes and seconds together.

    Attributes:
        name: their path, "*" for the numbers in which they differ.
        count: how many there are.
        kept, recomputed: bytes.
        seconds: time paid for recomputing.
        layers: the numbers, as "0–79"; empty for a single module.
        patterns: how many different sets of decisions these modules have.
        offloaded: bytes that leave the device for a while.
    """

    name: str
    count: int
    kept: int
    recomputed: int
    seconds: float
    layers: str = ""
    patterns: int = 1
    offloaded: int = 0

    @property
    def label(self) -> str:
        """The name, with how many there are."""
        return f"{self.name or '(the model)'}{f' x{self.count}' if self.count > 1 else ''}"

    @property
    def repeats(self) -> str:
        """The modules that the row stands for: "layers 0–79, 3 patterns"; empty for a single module."""
        if self.count == 1:
            return ""
        where = f"layers {self.layers}" if self.layers else f"{self.count} modules"
        ways = "all alike" if self.patterns == 1 else f"{self.patterns} patterns"
        return f"{where}{';' if ',' in where else ','} {ways}"


def by_reason(decisions: Iterable[Decision]) -> list[str]:
    """Activations that must not simply run again: a line for each reason, the largest first.

    Examples:
        >>> by_reason([Decision("topk", "keep", 2048, 0.0, "router", "", reason="it chooses among equals")])
        ['kept, as it chooses among equals: 1 activation, 2.00 kB']
    """
    groups: dict[str, list[int]] = defaultdict(list)
    for d in decisions:
        if d.reason:
            groups[f"kept, as {d.reason}" if d.action == "keep" else d.reason].append(d.nbytes)
    rows = sorted(groups.items(), key=lambda row: (-sum(row[1]), row[0]))
    return [f"{text}: {len(sizes)} activation{'s' * (len(sizes) > 1)}, {gb(sum(sizes))}" for text, sizes in rows]


def in_pieces(rows: Iterable[InPieces]) -> list[str]:
    """Sets of ops that run in pieces, a sentence for each kind of them, repeated layers folded."""
    groups: dict[tuple[object, ...], list[InPieces]] = defaultdict(list)
    for row in rows:
        groups[folded(row.module), row.phase, row.pieces, row.parts, row.workspace].append(row)
    return [_piece_row(folded(each[0].module), each) for each in groups.values()]


def _piece_row(path: str, rows: Sequence[InPieces]) -> str:
    first, many = rows[0], f" x{len(rows)}" if len(rows) > 1 else ""
    return (
        f"{path or '(the model)'}{many}, {first.phase}: {first.parts} rows in {first.pieces} pieces, at most "
        f"{gb(first.workspace)} inside one, {duration(sum(row.seconds for row in rows))} a step"
    )


def by_module(decisions: Iterable[Decision]) -> list[ModuleRow]:
    """One row per kind of module, the largest first.

    Examples:
        >>> d = [Decision("mm", "keep", 8, 0.0, f"layers.{i}.mlp", "") for i in range(3)]
        >>> [(r.name, r.count, r.kept, r.repeats) for r in by_module(d)]
        [('layers.*.mlp', 3, 24, 'layers 0–2, all alike')]
    """
    groups: dict[str, dict[str, list[Decision]]] = defaultdict(dict)
    for d in decisions:
        groups[folded(d.module)].setdefault(d.module, []).append(d)
    rows = [_row(name, modules) for name, modules in groups.items()]
    return sorted(rows, key=lambda r: (-(r.kept + r.recomputed + r.offloaded), r.name))


def _row(name: str, modules: Mapping[str, Sequence[Decision]]) -> ModuleRow:
    decisions = [d for each in modules.values() for d in each]

    def total(action: Action) -> int:
        return sum(d.nbytes for d in decisions if d.action == action)

    numbers = [tuple(map(int, NUMBER.findall(path))) for path in modules]
    differing = [at for at in range(len(numbers[0])) if len({n[at] for n in numbers}) > 1]
    ways = {tuple((d.op, d.action, d.nbytes) for d in each) for each in modules.values()}
    return ModuleRow(
        name=_spelled(name, numbers[0], differing),
        count=len(modules),
        kept=total("keep"),
        recomputed=total("recompute"),
        seconds=sum(d.recompute_seconds for d in decisions),
        layers=spans(sorted(n[differing[0]] for n in numbers)) if len(differing) == 1 else "",
        patterns=len(ways),
        offloaded=total("offload"),
    )


def _spelled(name: str, numbers: Sequence[int], differing: Sequence[int]) -> str:
    """A path with its numbers put back where all modules have the same."""
    places = iter(range(len(numbers)))
    filled = (str(numbers[at]) if (at := next(places)) not in differing else "*" for _ in numbers)
    return re.sub(r"(?:(?<=\.)|^)\*(?=\.|$)", lambda _: next(filled), name)


def spans(numbers: Sequence[int]) -> str:
    """Ascending numbers in words.

    Examples:
        >>> spans([0, 1, 2, 5, 7, 8])
        '0–2, 5, 7–8'
    """
    ends = [at for at, (a, b) in enumerate(pairwise(numbers)) if b > a + 1]
    starts = [0, *(at + 1 for at in ends)]
    runs = [(numbers[a], numbers[b]) for a, b in zip(starts, [*ends, len(numbers) - 1], strict=True)]
    return ", ".join(f"{a}" if a == b else f"{a}–{b}" for a, b in runs)


def largest(rows: Sequence[ModuleRow], most: int) -> tuple[Sequence[ModuleRow], ModuleRow | None]:
    """The first rows, and the small ones after them added up; None where there are none."""
    if len(rows) <= most:
        return rows, None
    rest = rows[most - 1 :]
    return rows[: most - 1], ModuleRow(
        f"{len(rest)} smaller rows",
        sum(r.count for r in rest),
        sum(r.kept for r in rest),
        sum(r.recomputed for r in rest),
        sum(r.seconds for r in rest),
        offloaded=sum(r.offloaded for r in rest),
    )


def shared_path(paths: Sequence[str]) -> str:
    """The modules that all paths begin with, where that is worth saying once: "" else.

    Examples:
        >>> shared_path(["base_model.model.norm", "base_model.model.layers.*", "base_model.model", ""])
        'base_model.model'
        >>> shared_path(["model.norm", "model.layers.*"])
        ''
    """
    split = [path.split(".") for path in paths if path]
    deepest = max(split, key=len, default=[])
    for n in range(len(deepest) - 1, 0, -1):
        common = deepest[:n]
        if all(parts[:n] == common[: len(parts)] for parts in split):
            return path if len(path := ".".join(common)) >= WORTH_SAYING_ONCE else ""
    return ""
