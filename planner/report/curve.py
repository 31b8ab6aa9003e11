"""The trade-off curve: more time against peak memory, with the plan, the budget, a proven bound, and simpler plans."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from planner.core.plan import Curve, PlanRecord, Point
from planner.errors import gb
from planner.report.svg import (
    BUDGET,
    KINDS,
    WIDTH,
    byte_ticks,
    escape,
    legend,
    line,
    number,
    steps,
    svg,
    text,
    width_of,
)

LEFT, RIGHT, TOP, FLOOR = 64, 752, 10, 190
HIGHEST = 1.25  # times the overhead of the plan or its costliest peer; points above are left out
LEAST = 0.05  # overhead; a lower curve is not stretched to the whole height
MARKS = ("M0 -7L7 0L0 7L-7 0Z", "M0 -7L7 5H-7Z", "M-5.5 -5.5H5.5V5.5H-5.5Z")
PEER, OWN, OTHERS = "#8d7b68", KINDS["recomputed"][0], KINDS["kept"][0]


def curve_svg(plan: PlanRecord, curve: Curve) -> str:
    """The drawing; `data-` attributes and titles have exact numbers."""
    own = Point(plan.peak_bytes, plan.overhead, "this plan")
    most = max(HIGHEST * max(p.overhead for p in (own, *curve.peers)), LEAST)
    points = [p for p in curve.points if p.overhead <= most]
    shown = [own, *curve.peers, *points]
    low, high = min(p.peak_bytes for p in shown), max(p.peak_bytes for p in shown)
    budget = plan.budget_bytes if low <= plan.budget_bytes <= high * 1.2 else None
    high = max(high, budget or 0)
    spread = (high - low) or high or 1
    left, right = max(0.0, low - 0.06 * spread), high + 0.06 * spread
    most = max(max(p.overhead for p in shown) * 1.12, LEAST)

    def x(size: float) -> float:
        return LEFT + (RIGHT - LEFT) * (size - left) / (right - left)

    def y(overhead: float) -> float:
        return FLOOR - (FLOOR - TOP) * min(overhead, most) / most

    parts = []
    for share in steps(most, 4):
        parts.append(line(LEFT, y(share), RIGHT, y(share), f"stroke-opacity='{0.13 if share else 0.5}'"))
        more = f" data-tick-overhead='{share!r}'"
        parts.append(text(LEFT - 6, y(share) + 4, f"+{share * 100:g}%" if share else "0%", anchor="end", more=more))
    for size, words in byte_ticks(right, 7, left):
        parts.append(line(x(size), FLOOR, x(size), FLOOR + 4, "stroke-opacity='0.5'"))
        if x(size) + width_of(words) / 2 <= WIDTH:
            more = f" fill-opacity='0.75' data-tick-bytes='{round(size)}'"
            parts.append(text(x(size), FLOOR + 17, words, anchor="middle", more=more))
    if curve.bound:
        parts.append(_bound(curve, x, y, left, right))
    if budget is not None:
        parts.append(
            f"<line x1='{number(x(budget))}' x2='{number(x(budget))}' y1='{TOP}' y2='{FLOOR}' stroke='{BUDGET}' "
            f"stroke-width='1.5' stroke-dasharray='6 4'><title>budget: {budget} bytes</title></line>"
        )
    # a staircase: overhead falls where the next plan fits
    corners = "".join(f"H{number(x(p.peak_bytes))}V{number(y(p.overhead))}" for p in points[1:])
    path = f"M{number(x(points[0].peak_bytes))} {number(y(points[0].overhead))}{corners}H{RIGHT}" if points else ""
    parts.append(f"<path d='{path}' fill='none' stroke='{OTHERS}' stroke-width='2' stroke-linejoin='round'/>")
    dot = f"<circle r='2.5' fill='{OTHERS}'/>"
    parts += [_placed(dot, p, x, y, "point") for p in points]
    entries = []
    for mark, p in zip(MARKS, curve.peers, strict=False):
        shape = f"<path d='{mark}' fill='{PEER}'/>"
        parts.append(_placed(shape, p, x, y, "peer"))
        entries.append((shape, f"{words_of(p)}{_beside(p, [own, *curve.points])}"))
    parts.append(_placed(_own(7), own, x, y, "chosen"))
    drawn = f"<path d='M-8 0H8' stroke='{OTHERS}' stroke-width='2'/>{dot}" if points else ""
    entries = [(_own(6), words_of(own)), *entries, (drawn, curve.about)]
    if curve.bound:
        entries.append((_shade(-7, -6, 14, 12), "impossible (proven lower bound)"))
    drawing, bottom = legend(entries, LEFT - 8, FLOOR + 46)
    return svg(bottom - 12, "more time against peak memory", [*parts, *drawing])


def words_of(p: Point) -> str:
    """A point in words: "each block checkpointed: 62.7 MB, +30%"."""
    return f"{p.name or 'a plan'}: {gb(p.peak_bytes)}, {f'{p.overhead:+.1%}' if p.overhead else '+0%'}"


def _beside(peer: Point, plans: Sequence[Point]) -> str:
    """What the cheapest plan takes that needs no more memory than a peer; empty where none does as well."""
    least = min((p.overhead for p in plans if p.peak_bytes <= peer.peak_bytes), default=None)
    if least is None or not peer.overhead or least > peer.overhead:
        return ""
    return " (as a plan does)" if f"{least:.1%}" == f"{peer.overhead:.1%}" else f" (a plan: +{least:.1%})"


def _own(r: float) -> str:
    return f"<circle r='{number(r)}' fill='{OWN}' stroke='currentColor' stroke-width='1.5'/>"


def _shade(x: float, y: float, width: float, height: float) -> str:
    frame = f"x='{number(x)}' y='{number(y)}' width='{number(width)}' height='{number(height)}'"
    return f"<rect {frame} rx='2' fill='currentColor' fill-opacity='0.16'/>"


def _placed(mark: str, p: Point, x: Callable[[float], float], y: Callable[[float], float], role: str) -> str:
    return (
        f"<g transform='translate({number(x(p.peak_bytes))},{number(y(p.overhead))})' data-role='{role}' "
        f"data-bytes='{p.peak_bytes}' data-overhead='{p.overhead!r}'>{mark}<title>{escape(words_of(p))}</title></g>"
    )


def _bound(curve: Curve, x: Callable[[float], float], y: Callable[[float], float], left: float, right: float) -> str:
    """The area that no schedule reaches: up to each budget, the overhead below the proven bound."""
    path, at = f"M{number(x(left))} {FLOOR}", left
    for p in curve.bound:
        if p.peak_bytes > left:
            path += f"V{number(y(p.overhead))}H{number(x(min(p.peak_bytes, right)))}"
            at = min(p.peak_bytes, right)
    return (
        f"<path d='{path}V{FLOOR}Z' fill='currentColor' fill-opacity='0.16' data-role='bound'>"
        f"<title>impossible: no plan of a peak up to {gb(at)} takes less time</title></path>"
    )
