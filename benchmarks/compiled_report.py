"""What `benchmarks.compiled` shows: a page in Markdown, and a plot in plain SVG for light and dark pages."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

Report = Mapping[str, Any]
WRONG = 1e-3  # gradients that are further off than this are wrong, relative to the largest entry of a parameter's
MIB = 2**20
COLUMNS, WIDTH, HEIGHT = 4, 232, 190
LEFT, RIGHT, TOP, BOTTOM = 44, 18, 26, 34  # of a panel, around its axes
LEGEND = 30
KINDS = {"inductor": 'mode="inductor"', "aten": 'mode="aten"', "budget": "torch's budget", "blocks": "every block"}
STYLE = (
    "svg{font:11px sans-serif;color:#1f2328;--inductor:#0969da;--aten:#6e7781;--budget:#bc4c00;--blocks:#1a7f37}"
    "@media(prefers-color-scheme:dark){svg{color:#d1d7e0;--inductor:#58a6ff;--aten:#9198a1;--budget:#f0883e;"
    "--blocks:#3fb950}}text{fill:currentColor}.axis{stroke:currentColor;stroke-opacity:.35;fill:none}"
    ".grid{stroke:currentColor;stroke-opacity:.1}"
)
INTRODUCTION = """# Compiled by Inductor

Plans with `mode="inductor"` beside torch.compile, its `activation_memory_budget` (*budget 0.7* to *0.1*) and blocks
that are checkpointed under torch.compile, as `python -m benchmarks.compiled` measured them: {device}, torch {torch},
{platform}. The models are small; a step is forward pass, loss and backward pass.

- *peak*: the most MiB that a step holds beyond parameters, buffers and batch, by the profiler's allocator events.
- *time*: processor time over that of another model that took turns with it, the median of {pairs} rounds. Noise is
  about 2 %.
- *gradients*: the largest difference from those of torch.compile, which keeps everything, from the same seed, over the
  largest entry of that parameter's gradient. Where torch's are wrong, no plan is made for the peak.

![Time over torch.compile's against measured peak, for each model and way](compiled.svg)

"""


def page(report: Report) -> str:
    """All of it."""
    models = report["models"]
    pairs = "/".join(str(n) for n in sorted({m["pairs"] for m in models.values()}))
    shown = {name: report.get(name, "") for name in ("device", "torch", "platform")}
    parts = [INTRODUCTION.format(**shown, pairs=pairs), "## In short\n\n", *(f"- {s}\n" for s in summary(models))]
    parts += [
        f"\n## {name}\n\n{_torchs(model)}\n{_shares(model)}\n{_compiling(model)}" for name, model in models.items()
    ]
    return "".join(parts)


def summary(models: Mapping[str, Report]) -> Iterator[str]:
    """What all models show together."""
    for what, blocks in (("torch's memory budget", False), ("checkpointed blocks", True)):
        pairs = [(m["plans"][way], way) for m in models.values() for way in _rivals(m) if (way == "blocks") == blocks]
        ours = [(rows["inductor"], way) for rows, way in pairs]
        times = [row["time"][way] for row, way in ours if "peak" in row]
        higher = sum(row["peak"] > rows[way]["peak"] for rows, way in pairs if "peak" in (row := rows["inductor"]))
        refused = sum("peak" not in row for row, _ in ours)
        yield (
            f"At the {len(ours)} peaks of {what}: time over its {spread(times)}; a higher peak {higher}, "
            f"refused {refused}"
        )
    every = [rows for m in models.values() for rows in m["plans"].values()]
    yield f'Over mode="aten" at the same budget: {spread([r["inductor"]["time"]["aten"] for r in every if both(r)])}'
    rows = [r["inductor"] for r in every if "peak" in r["inductor"]]
    apart = max((abs(r["peak"] / r["predicted"] - 1) for r in rows), default=0.0)
    above = sum(r["peak"] > r["budget"] for r in rows)
    yield f"Predicted and measured peaks differ by at most {apart:.2%}; {above} of {len(rows)} are above the budget"
    wrong = sum(r["gradients"] > WRONG for r in rows)
    yield f"Gradients are off by at most {max((r['gradients'] for r in rows), default=0.0):.0e}; {wrong} are wrong"
    for way, what in (("inductor", "planned, compared and compiled"), ("known", "the same from a plan file")):
        times = [t[way] / t["compile"] for m in models.values() if numbers(t := m["compiling"])]
        yield f"Until the first step has ended, {what}, over torch.compile alone: {spread(times)}"


def numbers(times: Report) -> bool:
    """Whether all ways were timed."""
    return len(times) > 0 and all(isinstance(t, float) for t in times.values())


def both(rows: Report) -> bool:
    """Whether both modes ran."""
    return all("peak" in rows[mode] for mode in ("inductor", "aten"))


def spread(values: Sequence[float]) -> str:
    """The mean of some ratios, and their range."""
    if not values:
        return "none"
    return f"{statistics.mean(values):.2f} in the mean ({min(values):.2f} to {max(values):.2f})"


def _rivals(model: Report) -> list[str]:
    return [way for way in model["plans"] if way in model["torch's"]]


def _torchs(model: Report) -> str:
    names = ["", "peak", "time, of eager", "of torch.compile", "gradients"]
    lines = head([*names, "ours: peak", "time, of its", "of aten's", "gradients"])
    for way, row in model["torch's"].items():
        if "error" in row:
            lines.append(f"| {way} | {said(row)} | | | | | | | |")
            continue
        wrong = " (wrong)" if row["gradients"] > WRONG else ""
        times = f"{row['time']['eager']:.2f} | {row['time']['compile']:.2f}"
        theirs = f"| {way} | {row['peak'] / MIB:.2f} | {times} | {row['gradients']:.0e}{wrong} "
        lines.append(theirs + _ours(model["plans"].get(way), way))
    return "\n".join(lines) + "\n"


def _ours(rows: Report | None, way: str) -> str:
    if rows is None:
        return "| | | | |"
    row = rows["inductor"]
    if "error" in row:
        return f"| {said(row)} | | | |"
    aten = row["time"].get("aten")
    beside = "" if aten is None else f"{aten:.2f}"
    return f"| {row['peak'] / MIB:.2f} | {row['time'][way]:.2f} | {beside} | {row['gradients']:.0e} |"


def _shares(model: Report) -> str:
    names = ["of torch.compile's peak", "budget", "predicted", "measured"]
    lines = head([*names, "time, of eager", "of torch.compile", "of aten's", "gradients"])
    for share, rows in model["plans"].items():
        row = rows["inductor"]
        if share in model["torch's"]:
            continue
        if "error" in row:
            lines.append(f"| {share} | {said(row)} | | | | | | |")
            continue
        held = (f"{row[name] / MIB:.3f}" for name in ("budget", "predicted", "peak"))
        times = (f"{row['time'][other]:.2f}" if other in row["time"] else "" for other in ("eager", "compile", "aten"))
        lines.append(f"| {share} | {' | '.join(held)} | {' | '.join(times)} | {row['gradients']:.0e} |")
    return "\n".join(lines) + "\n"


def _compiling(model: Report) -> str:
    times = model["compiling"]
    if not numbers(times):
        return ""
    own, ours, known = (times[way] for way in ("compile", "inductor", "known"))
    return (
        f"Seconds until the first step has ended: torch.compile {own:.1f}, a plan {ours:.1f} ({ours / own:.1f} times), "
        f"a known plan {known:.1f} ({known / own:.1f} times).\n"
    )


def head(names: Sequence[str]) -> list[str]:
    """The first lines of a table."""
    return [f"| {' | '.join(names)} |", f"|---|{'---:|' * (len(names) - 1)}"]


def said(row: Report) -> str:
    """An error as a cell."""
    return " ".join(row["error"].split())[:120].replace("|", " ")


def draw(report: Report) -> str:
    """Measured peak as a share of torch.compile's, against time over torch.compile's, for each model's ways."""
    models = report["models"]
    legend, x = [], 14.0
    for kind, name in KINDS.items():
        legend.append(f"{_mark(kind, x, 14)}<text x='{x + 9:.0f}' y='18'>{escape(name)}</text>")
        x += 32 + 6.1 * len(name)
    width = max(round(x), min(COLUMNS, len(models)) * WIDTH)
    height = -(-len(models) // COLUMNS) * HEIGHT + LEGEND
    label = "Time over torch.compile's against measured peak, for each model and way"
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' width='{width}' height='{height}' "
        f"role='img' aria-label='{label}'>\n<style>{STYLE}</style>",
        *legend,
    ]
    for at, (name, model) in enumerate(models.items()):
        left, top = at % COLUMNS * WIDTH, at // COLUMNS * HEIGHT + LEGEND
        parts.append(f"<g transform='translate({left},{top})'>{_panel(name, model)}</g>")
    return "\n".join([*parts, "</svg>"]) + "\n"


def points(model: Report) -> list[tuple[str, float, float]]:
    """The kind of each way that ran with the right gradients, its peak and its time, over torch.compile's."""
    rows = [(way.split()[0], row) for way, row in model["torch's"].items() if way not in ("eager", "compile")]
    rows += [(way, rows[way]) for rows in model["plans"].values() for way in ("inductor", "aten")]
    base = model["torch's"]["compile"].get("peak", 0)
    ran = [(kind, row) for kind, row in rows if base and "peak" in row]
    # the mode aten has eager mode's dropout masks
    right = [(kind, row) for kind, row in ran if kind == "aten" or row["gradients"] <= WRONG]
    return [(kind, row["peak"] / base, row["time"]["compile"]) for kind, row in right if "compile" in row["time"]]


def _panel(name: str, model: Report) -> str:
    found = points(model)
    low, high = min([0.9, *(y for _, _, y in found)]), max([1.2, *(y for _, _, y in found)])
    low, high = int(low * 10) / 10, (int(high * 10) + 1) / 10
    wide = max([1.0, *(x for _, x, _ in found)])

    def place(x: float, y: float) -> tuple[float, float]:
        across = LEFT + x / wide * (WIDTH - LEFT - RIGHT)
        return across, HEIGHT - BOTTOM - (y - low) / (high - low) * (HEIGHT - TOP - BOTTOM)

    parts = [f"<text x='{LEFT}' y='16' font-weight='bold'>{escape(name)}</text>"]
    each = 0.1 if high - low <= 0.6 else 0.2
    for step in range(round((high - low) / each) + 1):
        (x0, at), (x1, _) = place(0, low + step * each), place(wide, low + step * each)
        parts.append(f"<path class='grid' d='M{x0:.1f},{at:.1f} H{x1:.1f}'/>")
        parts.append(f"<text x='{x0 - 4:.1f}' y='{at + 4:.1f}' text-anchor='end'>{low + step * each:.1f}</text>")
    for x in range(0, int(100 * wide) + 1, 25):
        across, bottom = place(x / 100, low)
        parts.append(f"<text x='{across:.1f}' y='{bottom + 14:.1f}' text-anchor='middle'>{x}%</text>")
    (x0, y0), (x1, y1) = place(0, low), place(wide, high)
    parts.append(f"<path class='axis' d='M{x0:.1f},{y1:.1f} V{y0:.1f} H{x1:.1f}'/>")
    where = f"x='{(x0 + x1) / 2:.0f}' y='{HEIGHT - 6}' text-anchor='middle' font-size='10'"
    parts.append(f"<text {where}>peak, of torch.compile's</text>")
    turned = f"translate(10,{(y0 + y1) / 2:.0f}) rotate(-90)"
    parts.append(f"<text transform='{turned}' text-anchor='middle' font-size='10'>time</text>")
    parts += [_mark(kind, *place(x, y)) for kind, x, y in found]
    return "".join(parts)


def _mark(kind: str, x: float, y: float) -> str:
    if kind == "blocks":
        shape = "<path d='M-4,-4 H4 V4 H-4 Z' fill='var(--blocks)'/>"
    elif kind == "budget":
        shape = "<circle r='3' stroke='var(--budget)' stroke-width='1.5' fill='none'/>"
    else:
        shape = f"<circle r='3' fill='var(--{kind})'/>"
    return f"<g transform='translate({x:.1f},{y:.1f})'>{shape}</g>"
