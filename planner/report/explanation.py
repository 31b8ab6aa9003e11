"""An explanation: its records, as text and as HTML."""

from __future__ import annotations

from dataclasses import dataclass, field

from planner.core.plan import Action
from planner.core.what_if import WhatIf
from planner.errors import gb
from planner.report.svg import ACTIONS, escape
from planner.report.terminal import Style, style_of
from planner.report.words import duration, wrapped

MOST_GROUPS = 12  # of a text; the others are added up


@dataclass(frozen=True, slots=True)
class Group:
    """Values of one kind of op and of modules whose paths differ only in numbers, for which the plan decides the same.

    Attributes:
        label: the module, the op and the user's line.
        action: the plan's decision.
        count: how many values.
        nbytes: of all of them.
        seconds: time paid for recomputing them, as often as the plan does.
        again_seconds: estimated time of running their ops once more; None where it is not known (kept in eager mode).
        reason: why the decision has to be so; empty where it is a choice.
        otherwise: the step with the other decision for all of them; None where there is none, or it is not known.
        why: the decision's reasons, in sentences.
    """

    label: str
    action: Action
    count: int
    nbytes: int
    seconds: float
    again_seconds: float | None
    reason: str
    otherwise: WhatIf | None
    why: str


@dataclass(frozen=True)
class Explanation:
    """The decisions for a module, for all modules that match a pattern, or for a value, and why.

    Attributes:
        path: the module, pattern or value, as the user gave it.
        modules: the modules that the path names; empty for a value.
        kept_bytes, recomputed_bytes: of the saved values of these modules and of all modules inside them.
        seconds: time paid for recomputing.
        offloaded_bytes: of these values.
        budget_bytes, peak_bytes, step_seconds: of the plan.
        groups: the values, the largest groups first.
        all_kept, all_recomputed: the step with all of them kept, or recomputed as far as that can be; None where
            nothing would change, or it is not known (eager mode).
        pieces: the sets of ops that run in pieces, in words.
    """

    path: str
    modules: tuple[str, ...] = field(repr=False)
    kept_bytes: int
    recomputed_bytes: int
    seconds: float
    budget_bytes: int
    peak_bytes: int
    step_seconds: float
    groups: tuple[Group, ...] = field(repr=False)
    all_kept: WhatIf | None
    all_recomputed: WhatIf | None
    offloaded_bytes: int = 0
    pieces: tuple[str, ...] = ()

    def __str__(self) -> str:
        return to_text(self, style_of(colour=False))

    def _repr_html_(self) -> str:
        items = "".join(f"<li><b>{escape(_head(g))}</b><br>{escape(g.why)}</li>" for g in self.groups)
        rest = "".join(f"<p>{escape(line)}</p>" for line in _conclusions(self))
        return f"<div style='max-width:720px'><p>{escape(_lead(self))}</p><ul>{items}</ul>{rest}</div>"


def to_text(explanation: Explanation, style: Style) -> str:
    """The explanation as text within 80 columns."""
    lines = [style.paint(line, "bold") for line in wrapped(style.name(_lead(explanation)))]
    for group in explanation.groups[:MOST_GROUPS]:
        head = wrapped(style.name(_head(group)), indent="    ", first="")
        lines += ["", *(style.paint(line, "cyan" if group.action == "keep" else "yellow") for line in head)]
        lines += wrapped(style.name(group.why), indent="    ")
    if rest := explanation.groups[MOST_GROUPS:]:
        lines += ["", f"and {sum(g.count for g in rest)} more activations, {gb(sum(g.nbytes for g in rest))}"]
    if conclusions := _conclusions(explanation):
        lines += ["", *(line for text in conclusions for line in wrapped(text))]
    return "\n".join(lines)


def _head(group: Group) -> str:
    many = f" x{group.count}" if group.count > 1 else ""
    paid = f" for {duration(group.seconds)}" if group.seconds else ""
    return f"{group.label}{many}: {ACTIONS[group.action][1]} {gb(group.nbytes)}{paid}"


def _lead(e: Explanation) -> str:
    many = f" ({len(e.modules)} modules)" if len(e.modules) > 1 else ""
    if not e.groups:
        return f"{e.path or '(the model)'}{many}: makes nothing that the backward pass needs."
    paid = f" for {duration(e.seconds)} a step of {duration(e.step_seconds)}" if e.seconds else ""
    return (
        f"{e.path or '(the model)'}{many}: keeps {gb(e.kept_bytes)}, recomputes {gb(e.recomputed_bytes)}{paid}"
        f"{f', offloads {gb(e.offloaded_bytes)}' if e.offloaded_bytes else ''}. "
        f"The plan peaks at {gb(e.peak_bytes)} of {gb(e.budget_bytes)}."
    )


def _conclusions(e: Explanation) -> list[str]:
    sentences = [f"In pieces: {row}." for row in e.pieces]
    if len(e.groups) < 2:
        return sentences
    for what, changed in (("kept", e.all_kept), ("recomputed, but for what has to be kept", e.all_recomputed)):
        if changed is not None:
            more = changed.peak_bytes - e.budget_bytes
            beyond = f", {gb(more)} more than the budget" if more > 0 else ""
            time = changed.step_seconds - e.step_seconds
            sentences.append(
                f"With all of it {what}, the step would peak at {gb(changed.peak_bytes)}{beyond}, and take "
                f"{duration(abs(time))} {'longer' if time >= 0 else 'less'}."
            )
    return sentences
