"""A plan as text, within 80 columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from planner.core.plan import PlanRecord
from planner.errors import gb
from planner.report.answer import answer, fits, without_a_plan
from planner.report.moves import away, in_words
from planner.report.table import ModuleRow, by_module, by_reason, in_pieces, largest
from planner.report.terminal import BARS, Colour, Style
from planner.report.words import clip, duration, pad, wrapped

NAME, LABEL, LINE = 44, 12, 55  # columns of a table's first column; of a timeline's label, and of its bars
OFFLOADED = 11  # of the table's column that is there where something leaves the device
MOST_ROWS = 12
_KINDS: dict[str, Colour] = {
    "kept": "blue",
    "recomputed": "yellow",
    "passing": "dim",
    "gradients": "green",
    "backward": "cyan",
    "workspace": "red",
}
_LABELS = {"passing": "temporary"}
_MEANT = {
    "passing": "temporary: freed within the forward pass",
    "backward": "backward: gradients of activations",
    "offloaded": "offloaded: not on the device",
}


def sparkline(values: Sequence[int], width: int = LINE, top: int | None = None, bars: str = BARS) -> str:
    """A row of bars, each the largest of its share of the values; `top` is a full bar, and nothing is none.

    Examples:
        >>> sparkline([0, 1, 4, 8], width=4)
        ' ▂▅█'
    """
    if not values:
        return ""
    top = top or max(values) or 1
    width = min(width, len(values))
    shares = [values[i * len(values) // width : (i + 1) * len(values) // width] for i in range(width)]
    most = [max(share) for share in shares]
    return "".join(bars[min(len(bars) - 1, round(x / top * (len(bars) - 1)))] if x else " " for x in most)


def summary(plan: PlanRecord, style: Style) -> str:
    """The answer, a timeline, the lines of the account, and the decisions in each kind of module."""
    lines = [*lead(plan, style), "", *_timeline(plan, style), ""]
    lines.append(style.paint("At the peak:", "bold"))
    lines += [f"  {pad(style.name(name), 60)} {gb(size):>12}" for name, size in plan.account.items() if size]
    rows, rest = largest(by_module(plan.decisions), MOST_ROWS)
    leaves = any(row.offloaded for row in rows)
    name = NAME - OFFLOADED * leaves
    more = f"{'offloaded':>{OFFLOADED}}" if leaves else ""
    head = f"{'module':<{name}} {'kept':>10} {'recomputed':>12}{more} {'time':>9}"
    lines += ["", style.paint(head, "bold")]
    lines += [_row(row, style, leaves) for row in rows]
    if rest is not None:
        lines.append(_row(replace(rest, count=1), style, leaves))
    if plan.pieces:
        lines += ["", style.paint("In pieces:", "bold")]
        lines += [line for row in in_pieces(plan.pieces) for line in wrapped(style.name(row), "    ", "  ")]
    if reasons := by_reason(plan.decisions):
        lines += ["", style.paint("Unsafe to run again as they are:", "bold")]
        lines += [line for reason in reasons for line in wrapped(style.name(reason), indent="    ", first="  ")]
    return "\n".join(lines)


def lead(plan: PlanRecord, style: Style) -> list[str]:
    """The answer, and the figures behind it."""
    recomputed = [d for d in plan.decisions if d.action == "recompute"]
    seen = plan.verification
    sure = "Sizes are counted" if seen is None else f"A real step took {seen.measured}; sizes are counted"
    moves = in_words(plan)
    more = [
        f"{without_a_plan(plan)}. {len(recomputed)} of {len(plan.decisions)} saved activations are recomputed "
        f"({gb(sum(d.nbytes for d in recomputed))}). {moves}{' ' * bool(moves)}{sure}, times are estimates for "
        f"{style.name(plan.device)}: a step takes {duration(plan.step_seconds)}. "
        f"Solver {style.name(plan.solver)}, {plan.solve_seconds:.1f} s.",
        style.name(plan.note),
    ]
    head = [style.paint(line, "green" if fits(plan) else "red") for line in wrapped(answer(plan))]
    return [*head, *(line for text in more if text for line in wrapped(text))]


def _timeline(plan: PlanRecord, style: Style) -> list[str]:
    """A row for the bytes of all kinds, and one for each kind of memory whose bars are high enough to be seen."""
    rows: list[tuple[str, Colour, list[int]]] = [("total", "bold", [m.held_bytes for m in plan.timeline])]
    rows += [(kind, colour, [getattr(m.held, kind) for m in plan.timeline]) for kind, colour in _KINDS.items()]
    rows.append(("offloaded", "green", away(plan)))
    least = plan.budget_bytes / (2 * len(BARS))
    shown = [row for row in rows if row[0] == "total" or max(row[2], default=0) > least]
    meant = [_MEANT[name] for name, _, _ in shown if name in _MEANT]
    highest = [f"{phase} {gb(size)}" for phase, size in plan.phase_peaks.items()]
    lines = [style.paint("Memory over the step (a full bar is the budget), and the peak of each kind:", "bold")]
    for name, colour, held in shown:
        bars = sparkline(held, LINE, plan.budget_bytes, style.bars)
        label = _LABELS.get(name, name)
        lines.append(f"{label:<{LABEL}}{style.paint(f'{bars:<{LINE}}', colour)} {gb(max(held, default=0)):>12}")
    for facts in ("; ".join(meant), f"Peaks: {', '.join(highest)}"):
        lines += wrapped(facts) if facts else []
    return lines


def _row(row: ModuleRow, style: Style, leaves: bool) -> str:
    ways = f", {row.patterns} patterns" if row.patterns > 1 else ""
    many = f" x{row.count}{ways}" if row.count > 1 else ""
    width = NAME - OFFLOADED * leaves
    name = clip(style.name(row.name or "(the model)"), width - len(many)) + many
    more = f"{gb(row.offloaded):>{OFFLOADED}}" if leaves else ""
    return f"{pad(name, width)} {gb(row.kept):>10} {gb(row.recomputed):>12}{more} {duration(row.seconds):>9}"
