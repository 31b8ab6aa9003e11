"""A plan as HTML with inline SVG: no script, no style sheet, readable on light and dark pages."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from os import PathLike

from planner.core.files import path_of, write_atomically
from planner.core.plan import Curve, PlanRecord
from planner.errors import OptionError, PlanFileError, gb
from planner.report.answer import answer, subject, without_a_plan
from planner.report.curve import curve_svg
from planner.report.svg import ACTIONS, MICRO, escape, number
from planner.report.table import ModuleRow, by_module, by_reason, largest, shared_path
from planner.report.tables import SMALL, cells, heading, table
from planner.report.timeline import peak_words, timeline_svg
from planner.report.words import clip, duration, shown

ROWS = 14  # of the table of modules
LONGEST = 100  # characters of a name
BREAKABLE = re.compile(r"[^.]{0,20}\.|[^.]{1,20}")  # parts of a name, after which a line may end
BAR = 96  # width of a bar in the table


def body(plan: PlanRecord, curve: Curve) -> str:
    """A plan in Jupyter: the answer, the timeline, the trade-off curve, a table per module, the account."""
    parts = [
        f"<p style='{SMALL};overflow-wrap:anywhere;margin-bottom:0'>{escape(subject(plan))}</p>",
        f"<p style='margin-top:0'><b>{escape(answer(plan))}</b><br>"
        f"<span style='{SMALL}'>{escape(surety(plan))}</span></p>",
        heading("Memory over the step, predicted"),
        _scrolled(timeline_svg(plan)),
        f"<p style='{SMALL};overflow-wrap:anywhere'>{escape(peak_words(plan))}</p>",
        heading("What memory costs in time, estimated"),
        _scrolled(curve_svg(plan, curve)),
        heading("Activations that the backward pass needs, by module"),
        modules(by_module(plan.decisions)),
        heading("What makes up the peak"),
        account(plan),
    ]
    if unsafe := by_reason(plan.decisions):
        items = "".join(f"<li>{escape(line)}</li>" for line in unsafe)
        parts += [heading("Unsafe to run again as they are, and why"), f"<ul style='margin:0'>{items}</ul>"]
    if plan.note:
        parts.append(f"<p style='{SMALL};overflow-wrap:anywhere'>{escape(plan.note)}</p>")
    return f"<div style='max-width:760px'>{''.join(parts)}</div>"


def _scrolled(drawing: str) -> str:
    """A drawing that keeps its words large enough to read on a narrow page, where it scrolls."""
    return f"<div style='overflow-x:auto'><div style='min-width:560px'>{drawing}</div></div>"


def page(content: str, path: str | PathLike[str] | None = None) -> str:
    """HTML as a whole page; also written to a file where one is named. Raises OptionError where it cannot be."""
    target = None if path is None else path_of(path)
    html = (
        "<!DOCTYPE html><html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width,initial-scale=1'>"
        "<meta name='color-scheme' content='light dark'><title>A plan for a training step</title></head>"
        "<body style='margin:24px auto;padding:0 16px;max-width:760px;line-height:1.45;"
        f"font-family:system-ui,-apple-system,sans-serif;font-size:14px'>{content}</body></html>"
    )
    if target is not None:
        try:
            write_atomically(target, html.encode())
        except PlanFileError as e:
            raise OptionError(f"to_html(): {e}; give a path that can be written") from e
    return html


def surety(plan: PlanRecord) -> str:
    """The peak without the plan, and where the figures come from."""
    margin = sum(size for name, size in plan.account.items() if "margin" in name)
    seen = plan.verification
    timed = "measured op by op on" if plan.step.costs == "measured" else "from the roofline of"
    told = [
        without_a_plan(plan),
        f"times {timed} {plan.device}",
        "sizes counted",
        f"{gb(margin)} of margin" if margin else "no margin",
        f"a real step took {seen.measured}" if seen else "not verified on a real step",
        f"solver {plan.solver}, {plan.solve_seconds:.1f} s",
    ]
    return "; ".join(told) + "."


def modules(rows: Sequence[ModuleRow]) -> str:
    """The table per module: the largest first, small ones added up in the last row."""
    first, rest = largest(rows, ROWS)
    most = max((r.kept + r.recomputed + r.offloaded for r in first), default=0) or 1
    leaves = any(r.offloaded for r in rows)
    common = shared_path([r.name for r in first])
    lines = []
    for row in (*first, *([rest] if rest else [])):
        name = escape(row.name or "(the model)")
        label = escape(row.label) if row is rest else _code(row.name or "(the model)", common)
        bar = _bar([(row.kept, "keep"), (row.recomputed, "recompute"), (row.offloaded, "offload")], most)
        if row is not rest and row.repeats:
            label += f"<br><span style='{SMALL}'>{escape(row.repeats)}</span>"
        data = f" data-module='{name}' data-kept='{row.kept}' data-recomputed='{row.recomputed}'"
        data += f" data-offloaded='{row.offloaded}'" if leaves else ""
        lines.append(cells([label, bar, *_sizes(row, leaves)], 2, f"{data} data-seconds='{row.seconds!r}'"))
    summed = {of: sum(getattr(r, of) for r in rows) for of in ("kept", "recomputed", "seconds", "offloaded")}
    total = ModuleRow("", 1, **summed)
    lines.append(cells([f"<b>{x}</b>" for x in ("total", "", *_sizes(total, leaves))], 2))
    heads = [
        f"in {_code(common)}" if common else "module",
        "",
        "kept",
        "recomputed",
        *["offloaded"] * leaves,
        "extra time",
    ]
    return table([cells(heads, 2, tag="th"), *lines])


def _sizes(row: ModuleRow, leaves: bool) -> list[str]:
    sizes = [gb(size) if size else "–" for size in (row.kept, row.recomputed, *[row.offloaded] * leaves)]
    return [*sizes, duration(row.seconds, MICRO) if row.seconds else "–"]


def account(plan: PlanRecord) -> str:
    """The lines that make up the peak, their sum, and the rest of the budget."""
    most = max(plan.account.values(), default=0) or 1
    lines = []
    for name, size in plan.account.items():
        if size:
            data = f" data-line='{escape(name)}' data-bytes='{size}'"
            lines.append(cells([_broken(clip(shown(name), LONGEST)), _bar([(size, "")], most), gb(size)], 2, data))
    lines.append(cells(["<b>peak</b>", "", f"<b>{gb(plan.peak_bytes)}</b>"], 2))
    lines.append(cells(["left of the budget", "", gb(plan.budget_bytes - plan.peak_bytes)], 2))
    return table(lines)


def _broken(words: str) -> str:
    """Text that may break where it must."""
    return f"<span style='overflow-wrap:anywhere'>{escape(words)}</span>"


def _code(name: str, common: str = "") -> str:
    """A path that may break after its dots, and where it must; without the `common` beginning of several."""
    words = f"…{rest}" if common and (rest := name.removeprefix(f"{common}.")) != name else name
    label = "<wbr>".join(escape(part) for part in BREAKABLE.findall(clip(shown(words), LONGEST)))
    return f"<code title='{escape(name)}' style='overflow-wrap:anywhere;background:none;padding:0'>{label}</code>"


def _bar(sizes: Iterable[tuple[int, str]], most: int) -> str:
    x, bars = 0.0, ""
    for size, action in sizes:
        if size:
            wide = max(BAR * size / most, 0.5)
            fill = f"fill='{ACTIONS[action][0]}'"
            bars += f"<rect x='{number(x)}' y='1' width='{number(wide)}' height='9' {fill}/>"
            x += wide
    frame = f"width='{BAR}' height='11' viewBox='0 0 {BAR} 11' style='vertical-align:-1px'"
    return f"<svg xmlns='http://www.w3.org/2000/svg' {frame}>{bars}</svg>"
