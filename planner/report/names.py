"""Names for the values of a plan: the modules and source lines of the user's own model."""

from __future__ import annotations

import re
from collections.abc import Iterable

from planner.core.plan import PlanRecord

NUMBER = re.compile(r"(?:(?<=\.)|^)\d+(?=\.|$)")  # in a path


def folded(module: str) -> str:
    """A path with its numbers as asterisks.

    Examples:
        >>> folded("layers.3.mlp")
        'layers.*.mlp'
    """
    return NUMBER.sub("*", module)


def title(module: str, op: str, source: str) -> str:
    """One line for an op: its module, its kind, and the user's line of code.

    Args:
        module: path as in `named_modules()`; "" for the model itself.
        op: kind of op, as in `Moment.op` or `Decision.op`.
        source: "file:line: code"; "" where none is known.

    Examples:
        >>> title("layers.3.act", "gelu", "/home/me/model.py:31: return F.gelu(x)")
        'layers.3.act: gelu (model.py:31)'
        >>> title("", "_softmax", "model.py:8: return x.softmax(-1)"), title("", "loss", "")
        ('(the model): softmax (model.py:8)', 'loss')
    """
    if not (module or source):
        return op.strip("_")
    place = line_of(source)
    return f"{module or '(the model)'}: {op.strip('_')}{f' ({place})' if place else ''}"


def modules_of(plan: PlanRecord) -> list[str]:
    """Paths of the model's modules."""
    return [m.name for m in plan.identity.modules]


def line_of(source: str) -> str:
    """The file's name and line of a source line: "model.py:31"."""
    place = re.match(r"(.*?):(\d+): ", source)
    return f"{re.sub(r'.*/', '', place[1])}:{place[2]}" if place else ""


def lines_of(sources: Iterable[str]) -> str:
    """The files of source lines, each with its first line and its last: "model.py:31-47, layers.py:8"."""
    files: dict[str, list[int]] = {}
    for place in filter(None, map(line_of, sources)):
        file, _, line = place.rpartition(":")
        files.setdefault(file, []).append(int(line))
    spans = ((file, min(lines), max(lines)) for file, lines in files.items())
    return ", ".join(f"{file}:{first}" + (f"-{last}" if last > first else "") for file, first, last in spans)
