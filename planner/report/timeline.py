"""The memory timeline: bytes held over the step, stacked by kind, the unplanned step behind, the budget across."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, groupby

from planner.core.plan import BaselineMoment, Held, Moment, PlanRecord
from planner.errors import gb
from planner.report.names import title
from planner.report.svg import (
    BUDGET,
    KINDS,
    MICRO,
    byte_ticks,
    legend,
    line,
    number,
    svg,
    swatch,
    text,
    time_ticks,
    width_of,
)
from planner.report.words import clip, duration

LEFT, RIGHT, TOP, FLOOR = 64, 752, 14, 236
COLUMN = 2.0  # the timeline's resolution
OPTIMIZER = 44.0  # width of the optimizer's step, which has no time
OUT_OF_SIGHT = 2.5  # a budget above this many times all else is named, not drawn

Column = tuple[float, int]  # where it begins, and which moment holds most in it


def timeline_svg(plan: PlanRecord) -> str:
    """The drawing; `data-` attributes and titles have exact numbers."""
    moments, unplanned = plan.timeline, plan.baseline_timeline
    most = max(plan.peak_bytes, plan.baseline_peak_bytes, 1)
    drawn = plan.budget_bytes <= OUT_OF_SIGHT * most
    top = (max(most, plan.budget_bytes) if drawn else most) * 1.02
    differs = [m.held_bytes for m in moments] != [m.held_bytes for m in unplanned]
    seconds = max(sum(m.seconds for m in moments), sum(m.seconds for m in unplanned), 1e-12)
    stepped = any(m.phase == "optimizer" for m in moments)
    right = RIGHT - (OPTIMIZER + 8 if stepped else 0)

    def y(size: float) -> float:
        return FLOOR - (FLOOR - TOP) * size / top

    columns = _columns(moments, seconds, right)
    parts = []
    for size, words in byte_ticks(top):
        parts.append(line(LEFT, y(size), RIGHT, y(size), "stroke-opacity='0.13'"))
        parts.append(text(LEFT - 6, y(size) + 4, words, anchor="end", more=f" data-tick-bytes='{round(size)}'"))
    if differs:
        parts.append(_unplanned(plan, _columns(unplanned, seconds, right), y))
    parts += _stack(plan, columns, y)
    parts.append(_peak_mark(plan, columns, y))
    if drawn:
        parts.append(
            f"<line x1='{LEFT}' x2='{RIGHT}' y1='{number(y(plan.budget_bytes))}' y2='{number(y(plan.budget_bytes))}' "
            f"stroke='{BUDGET}' stroke-width='1.5' stroke-dasharray='6 4' data-budget-bytes='{plan.budget_bytes}'>"
            f"<title>budget: {plan.budget_bytes} bytes</title></line>"
        )
    parts += _time_axis(moments, seconds, right, stepped)
    entries = [(_dashes(BUDGET), f"budget {gb(plan.budget_bytes)}{'' if drawn else ', far above'}")]
    if differs:
        entries.append((_outline(), f"everything kept: {gb(plan.baseline_peak_bytes)}"))
    used = [kind for at, kind in enumerate(Held._fields) if any(m.held[at] for m in moments)]
    entries += [(swatch(KINDS[kind][0]), KINDS[kind][1]) for kind in reversed(used)]
    drawing, bottom = legend(entries, LEFT - 8, FLOOR + 64)
    label = f"memory over the step: at most {gb(plan.peak_bytes)}, budget {gb(plan.budget_bytes)}"
    more = (
        f" data-peak-bytes='{plan.peak_bytes}' data-baseline-peak-bytes='{plan.baseline_peak_bytes}'"
        f" data-seconds='{plan.step_seconds!r}'"
    )
    return svg(bottom - 12, label, [*parts, *drawing], more=more)


def peak_words(plan: PlanRecord) -> str:
    """The op at the highest moment of the timeline, in a sentence."""
    peak = max(plan.timeline, key=lambda m: m.held_bytes, default=None)
    if peak is None:
        return ""
    before = sum(m.seconds for m in plan.timeline[: plan.timeline.index(peak)])
    what = title(clip(peak.module, 60), peak.op, peak.source)
    return f"Highest after {duration(before, MICRO)}, {peak.phase}: {gb(peak.held_bytes)}, at {what}."


def _unplanned(plan: PlanRecord, columns: Sequence[Column], y: Callable[[float], float]) -> str:
    heights = [y(plan.baseline_timeline[i].held_bytes) for _, i in columns]
    return (
        f"<path d='{_area(columns, heights)}' fill='currentColor' fill-opacity='0.1' stroke='currentColor' "
        f"stroke-opacity='0.55' stroke-width='1' stroke-linejoin='round' data-kind='unplanned'>"
        f"<title>everything kept: peak of {plan.baseline_peak_bytes} bytes</title></path>"
    )


def _stack(plan: PlanRecord, columns: Sequence[Column], y: Callable[[float], float]) -> list[str]:
    """One area for each kind, from the floor to the sum of the kinds up to it; lower ones cover higher ones."""
    moments = plan.timeline
    totals = [tuple(accumulate(moments[i].held)) for _, i in columns]
    peak = max(moments, key=lambda m: m.held_bytes).held if moments else Held()
    parts = []
    for at, kind in reversed(list(enumerate(Held._fields))):
        most = max((m.held[at] for m in moments), default=0)
        if not most:
            continue
        colour, words = KINDS[kind]
        parts.append(
            f"<path d='{_area(columns, [y(total[at]) for total in totals])}' fill='{colour}' data-kind='{kind}' "
            f"data-bytes-at-peak='{peak[at]}'><title>{words}: {gb(peak[at])} at the peak, {gb(most)} at most</title>"
            "</path>"
        )
    return parts


def _peak_mark(plan: PlanRecord, columns: Sequence[Column], y: Callable[[float], float]) -> str:
    column = next(((x, i) for x, i in columns if plan.timeline[i].held_bytes == plan.peak_bytes), None)
    if column is None:
        return ""
    x, top = column[0] + COLUMN / 2, y(plan.peak_bytes) - 3
    return (
        f"<path d='M{number(x)} {number(top)}l-4 -8h8z' fill='currentColor' data-peak-bytes='{plan.peak_bytes}'>"
        f"<title>peak: {plan.peak_bytes} bytes</title></path>"
    )


def _time_axis(moments: Sequence[Moment], seconds: float, right: float, stepped: bool) -> list[str]:
    scale = (right - LEFT) / seconds
    total = sum(m.seconds for m in moments)
    until = next((i for i, m in enumerate(moments) if m.phase in ("loss", "backward")), len(moments))
    loss = LEFT + scale * sum(m.seconds for m in moments[:until])
    end = LEFT + scale * total
    parts = [line(LEFT, FLOOR, RIGHT, FLOOR, "stroke-opacity='0.5'")]
    for at, words in time_ticks(total):
        x = LEFT + at * scale
        if x + width_of(words) / 2 <= end + 4:
            parts.append(line(x, FLOOR, x, FLOOR + 4, "stroke-opacity='0.5'"))
            parts.append(text(x, FLOOR + 17, words, anchor="middle", more=" fill-opacity='0.75'"))
    spans = [("forward", LEFT, loss), ("backward", loss, end)]
    spans += [("optimizer", RIGHT - OPTIMIZER, RIGHT)] if stepped else []
    for words, left, to in spans:
        wide = width_of(words)
        if to - left < min(wide, OPTIMIZER):
            continue
        parts.append(line(left + 2, FLOOR + 26, to - 2, FLOOR + 26, "stroke-opacity='0.4'"))
        middle = min((left + to) / 2, RIGHT - wide / 2)
        parts.append(text(middle, FLOOR + 40, words, anchor="middle"))
    if LEFT < loss < right:
        parts.append(line(loss, TOP, loss, FLOOR, "stroke-opacity='0.45' stroke-dasharray='2 3'"))
    return parts


def _dashes(colour: str) -> str:
    return f"<line x1='-8' x2='8' y1='0' y2='0' stroke='{colour}' stroke-width='2' stroke-dasharray='6 4'/>"


def _outline() -> str:
    return (
        "<rect x='-6' y='-6' width='12' height='12' rx='2' fill='currentColor' fill-opacity='0.1' "
        "stroke='currentColor' stroke-opacity='0.55'/>"
    )


def _columns(moments: Sequence[Moment | BaselineMoment], seconds: float, right: float) -> list[Column]:
    """The highest moment of each column, from left to right; the optimizer's step has a column of its own."""
    scale = (right - LEFT) / seconds
    held = [m.held_bytes for m in moments]
    best: dict[float, int] = {}
    ends = list(accumulate((m.seconds for m in moments), initial=0.0))
    most = int((right - LEFT) / COLUMN) - 1
    for i, m in enumerate(moments):
        if m.phase == "optimizer":
            best[RIGHT - OPTIMIZER] = i
            continue
        first, last = (int((t * scale) / COLUMN) for t in (ends[i], ends[i + 1]))
        first = min(first, most)
        for c in range(first, max(first + 1, min(last, most + 1))):
            x = LEFT + c * COLUMN
            if x not in best or held[best[x]] < held[i]:
                best[x] = i
    return sorted(best.items())


def _area(columns: Sequence[Column], heights: Sequence[float]) -> str:
    """A path around columns of some heights; columns that do not touch are apart."""
    parts = []
    runs: list[list[tuple[float, float]]] = [[]]
    for (x, _), y in zip(columns, heights, strict=True):
        if runs[-1] and x > runs[-1][-1][0] + COLUMN + 0.01:
            runs.append([])
        runs[-1].append((x, y))
    for run in filter(None, runs):
        end = RIGHT if run[0][0] == RIGHT - OPTIMIZER else run[-1][0] + COLUMN
        parts.append(f"M{number(run[0][0])} {FLOOR}")
        now, level = run[0][0], float(FLOOR)
        for height, same in groupby([*((x, round(y, 1)) for x, y in run), (end, float(FLOOR))], key=lambda at: at[1]):
            x = next(same)[0]
            parts.append((f"h{number(x - now)}" if x > now else "") + f"v{number(height - level)}")
            now, level = x, height
        parts.append("Z")
    return "".join(parts)
