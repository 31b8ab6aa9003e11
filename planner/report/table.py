"""Decisions added up per module, repeated layers folded."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from ..errors import gb
from ..plan import Decision


@dataclass(frozen=True, slots=True)
class ModuleRow:
    """Modules whose paths differ only in numbers: how many, and their bytes and seconds together."""

    name: str
    count: int
    kept: int
    recomputed: int
    seconds: float

    @property
    def label(self) -> str:
        """The name, with how many there are."""
        return f"{self.name or '(the model)'}{f' x{self.count}' if self.count > 1 else ''}"


def by_reason(decisions: Iterable[Decision]) -> list[str]:
    """What must not simply run again, a line for each reason, the largest first.

    Examples:
        >>> by_reason([Decision("topk", "keep", 2048, 0.0, "router", "", reason="it chooses among equals")])
        ['kept, as it chooses among equals: 1 value, 2.00 kB']
    """
    groups: dict[str, list[int]] = defaultdict(list)
    for d in decisions:
        if d.reason:
            groups[f"kept, as {d.reason}" if d.action == "keep" else d.reason].append(d.nbytes)
    rows = sorted(groups.items(), key=lambda row: (-sum(row[1]), row[0]))
    return [f"{text}: {len(sizes)} value{'s' * (len(sizes) > 1)}, {gb(sum(sizes))}" for text, sizes in rows]


def by_module(decisions: Iterable[Decision]) -> list[ModuleRow]:
    """One row per kind of module, the largest first.

    Examples:
        >>> d = [Decision("mm", "keep", 8, 0.0, f"layers.{i}.mlp", "") for i in range(3)]
        >>> by_module(d)
        [ModuleRow(name='layers.*.mlp', count=3, kept=24, recomputed=0, seconds=0.0)]
    """
    groups: dict[str, list[Decision]] = defaultdict(list)
    for d in decisions:
        groups[re.sub(r"(?:(?<=\.)|^)\d+(?=\.|$)", "*", d.module)].append(d)
    rows = [
        ModuleRow(
            name=name if len({d.module for d in group}) > 1 else group[0].module,
            count=len({d.module for d in group}),
            kept=sum(d.nbytes for d in group if d.action == "keep"),
            recomputed=sum(d.nbytes for d in group if d.action == "recompute"),
            seconds=sum(d.recompute_seconds for d in group),
        )
        for name, group in groups.items()
    ]
    return sorted(rows, key=lambda r: (-(r.kept + r.recomputed), r.name))
