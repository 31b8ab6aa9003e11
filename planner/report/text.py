"""A plan as text, within 80 columns."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import wrap

from ..errors import gb
from ..plan import Plan
from .table import ModuleRow, by_module, by_reason

_BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[int], width: int = 64, top: int | None = None) -> str:
    """A row of bars, each the largest of its share of the values; `top` is a full bar.

    Examples:
        >>> sparkline([0, 4, 8], width=3)
        '▁▅█'
    """
    if not values:
        return ""
    top = top or max(values) or 1
    width = min(width, len(values))
    shares = [values[i * len(values) // width : (i + 1) * len(values) // width] for i in range(width)]
    return "".join(_BARS[min(len(_BARS) - 1, round(max(s) / top * (len(_BARS) - 1)))] for s in shares)


def summary(plan: Plan) -> str:
    """The plan in words, a timeline, what takes the room, and what happens in each kind of module."""
    recomputed = [d for d in plan.decisions if d.action == "recompute"]
    held = [m.held_bytes for m in plan.timeline]
    lines = [
        f"Peak {gb(plan.peak_bytes)} of {gb(plan.budget_bytes)}; {gb(plan.baseline_peak_bytes)} with everything kept.",
        f"{len(recomputed)} of {len(plan.decisions)} values are recomputed "
        f"({gb(sum(d.nbytes for d in recomputed))}): {plan.overhead:.1%} more time, estimated",
        f"(at most {plan.gap:.1%} above the best possible; solver {plan.solver}, {plan.solve_seconds:.1f} s, "
        f"times of {plan.device}).",
    ]
    if plan.note:
        lines.append(plan.note)
    lines += ["", "Memory over the step (a full bar is the budget):", sparkline(held, top=plan.budget_bytes)]
    lines += ["Highest: " + ", ".join(f"{phase} {gb(size)}" for phase, size in plan.phase_peaks.items()), ""]
    lines.append("At the peak:")
    lines += [f"  {name:<60.60} {gb(size):>12}" for name, size in plan.account.items() if size]
    lines += ["", f"{'module':<44} {'kept':>10} {'recomputed':>12} {'seconds':>9}"]
    lines += [_row(row) for row in by_module(plan.decisions)[:12]]
    if reasons := by_reason(plan.decisions):
        lines += ["", "Unsafe to run again as they are:"]
        lines += [
            line for reason in reasons for line in wrap(reason, 78, initial_indent="  ", subsequent_indent="    ")
        ]
    return "\n".join(lines)


def _row(row: ModuleRow) -> str:
    name = row.label if len(row.label) <= 44 else "..." + row.label[-41:]
    return f"{name:<44} {gb(row.kept):>10} {gb(row.recomputed):>12} {row.seconds:>9.2g}"
