"""A plan as HTML with inline SVG: no script, readable on light and dark pages."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from ..errors import gb
from ..plan import Moment, Plan
from .table import by_module, by_reason

_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 640, 200, 64, 24
_MOST_POINTS = 600


def to_html(plan: Plan) -> str:
    """The answer in one line, the predicted timeline with the budget, and a table per module."""
    rows = "".join(
        f"<tr><td style='text-align:left'>{escape(r.label)}</td><td>{gb(r.kept)}</td>"
        f"<td>{gb(r.recomputed)}</td><td>{r.seconds:.2g} s</td></tr>"
        for r in by_module(plan.decisions)[:12]
    )
    account = "".join(
        f"<tr><td style='text-align:left'>{escape(name)}</td><td>{gb(size)}</td></tr>"
        for name, size in plan.account.items()
        if size
    )
    unsafe = "".join(f"<li>{escape(line)}</li>" for line in by_reason(plan.decisions))
    if unsafe:
        unsafe = f"<details><summary>Unsafe to run again as they are</summary><ul>{unsafe}</ul></details>"
    note = f"<p>{escape(plan.note)}</p>" if plan.note else ""
    return (
        "<div style='max-width:720px'>"
        f"<p><b>Fits {gb(plan.budget_bytes)}</b>: predicted peak {gb(plan.peak_bytes)}, "
        f"{gb(plan.baseline_peak_bytes)} with everything kept; {plan.overhead:.1%} more time, "
        f"at most {plan.gap:.1%} above the best possible ({escape(plan.solver)}, {plan.solve_seconds:.1f} s).</p>{note}"
        f"{timeline_svg(plan.timeline, plan.budget_bytes, plan.resident_bytes)}"
        "<table><thead><tr><th style='text-align:left'>module</th><th>kept</th><th>recomputed</th>"
        f"<th>time paid</th></tr></thead><tbody>{rows}</tbody></table>"
        f"<details><summary>What makes up the peak</summary><table><tbody>{account}</tbody></table></details>"
        f"{unsafe}</div>"
    )


def timeline_svg(timeline: Sequence[Moment], budget: int, resident: int) -> str:
    """Bytes held over the step: what is resident, the step's own, the budget as a line. At most 600 points."""
    top = max([budget, *(m.held_bytes for m in timeline)], default=1) * 1.05
    inner = _WIDTH - _LEFT - 8

    def x(i: float) -> float:
        return round(_LEFT + inner * i / max(1, len(timeline)), 1)

    def y(size: float) -> float:
        return round((_HEIGHT - _BOTTOM) * (1 - size / top) + 4, 1)

    stride = max(1, -(-len(timeline) // _MOST_POINTS))
    peaks = [(i, max(m.held_bytes for m in timeline[i : i + stride])) for i in range(0, len(timeline), stride)]
    area = " ".join(f"L{x(i)},{y(size)} L{x(min(i + stride, len(timeline)))},{y(size)}" for i, size in peaks)
    floor = y(0)
    loss = next((i for i, m in enumerate(timeline) if m.phase == "loss"), 0)
    text = "font-size='11' fill='currentColor' font-family='sans-serif'"
    line = "stroke='currentColor' stroke-opacity='0.4'"
    return (
        "<svg xmlns='http://www.w3.org/2000/svg' "
        f"viewBox='0 0 {_WIDTH} {_HEIGHT}' width='100%' role='img' aria-label='memory over the step'>"
        f"<path d='M{x(0)},{floor} {area} L{x(len(timeline))},{floor} Z' fill='#4c8bf5' fill-opacity='0.75'/>"
        f"<rect x='{x(0)}' y='{y(resident)}' width='{inner}' height='{round(floor - y(resident), 1)}' fill='#8a8f98'/>"
        f"<line x1='{x(0)}' x2='{x(len(timeline))}' y1='{y(budget)}' y2='{y(budget)}' stroke='#d93025' "
        "stroke-dasharray='5 3'/>"
        f"<line x1='{x(loss)}' x2='{x(loss)}' y1='4' y2='{floor}' {line}/>"
        f"<line x1='{x(0)}' x2='{x(len(timeline))}' y1='{floor}' y2='{floor}' {line}/>"
        f"<text x='{_LEFT - 4}' y='{y(budget) + 4}' text-anchor='end' {text}>{gb(budget)}</text>"
        f"<text x='{_LEFT - 4}' y='{floor}' text-anchor='end' {text}>0</text>"
        f"<text x='{(x(0) + x(loss)) / 2}' y='{_HEIGHT - 6}' text-anchor='middle' {text}>forward</text>"
        f"<text x='{(x(loss) + x(len(timeline))) / 2}' y='{_HEIGHT - 6}' text-anchor='middle' {text}>backward</text>"
        "</svg>"
    )
