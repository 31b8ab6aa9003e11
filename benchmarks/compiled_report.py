"""What `benchmarks.compiled` shows: a page in Markdown, and a plot in plain SVG for light and dark pages."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .panels import axes, picture, placing

Report = Mapping[str, Any]
WRONG = 1e-3  # gradients that are further off than this are others, relative to the largest entry of a parameter's
STEEP = 0.03  # where the loss's slope along such a gradient is further than this from its length, it is wrong
MIB = 2**20
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
  about 2 %. The C allocator keeps what is freed, as torch's does on a GPU.
- *gradients*: the largest difference from those of torch.compile, which keeps everything, or from eager mode's, the
  lesser of the two, from the same seed, over the largest entry of that parameter's gradient. Other dropout masks make
  others, and so does rounding through the batch norms of a ResNet: how steep the loss is along such a gradient, by
  finite differences, over its length, beside the same of eager mode's, says whether it is right (1.00). Where it is
  wrong, no plan is made.

![Time over torch.compile's against measured peak, for each model and way](compiled.svg)

"""


def page(report: Report) -> str:
    """All of it."""
    models = report["models"]
    pairs = "/".join(str(n) for n in sorted({m["pairs"] for m in models.values()}))
    shown = {name: report.get(name, "") for name in ("device", "torch", "platform")}
    parts = [INTRODUCTION.format(**shown, pairs=pairs), "## In short\n\n", *(f"- {s}.\n" for s in summary(models))]
    for name, model in models.items():
        rows = model["rows"]
        parts.append(f"\n## {name}\n\n{_torchs(rows)}\n{_shares(rows)}{_beside_eager(rows)}{_compiling(model)}")
    return "".join(parts)


def summary(models: Mapping[str, Report]) -> Iterator[str]:
    """What all models show together."""
    every = [m["rows"] for m in models.values()]
    for what, blocks in (("torch's memory budget", False), ("checkpointed blocks", True)):
        pairs = [(rows, way) for rows in every for way in _rivals(rows) if (way == "blocks") == blocks]
        asked = [(rows[f"inductor at {way}"], rows[way], way) for rows, way in pairs if f"inductor at {way}" in rows]
        ran = [(ours, its, way) for ours, its, way in asked if "peak" in ours]
        higher = sum(ours["peak"] > its["peak"] for ours, its, _ in ran)
        yield (
            f"At the {len(asked)} peaks of {what} (of those where its gradients are right): time over its "
            f"{spread([ours['time'][way] for ours, _, way in ran])}; {higher} of our peaks are higher, "
            f"{len(asked) - len(ran)} are refused"
        )
        yield f"Of {what}, {sum(wrong(rows[way]) for rows, way in pairs)} of {len(pairs)} give wrong gradients"
    ours = [(row, label) for rows in every for label, row in rows.items() if label.startswith("inductor")]
    ran = [(row, label) for row, label in ours if "peak" in row]
    over = [row["time"][aten] for row, label in ran if (aten := label.replace("inductor", "aten")) in row["time"]]
    yield f'Over `mode="aten"` at the same budget: {spread(over)}'
    apart = max((abs(row["peak"] / row["predicted"] - 1) for row, _ in ran), default=0.0)
    above = sum(row["peak"] > row["budget"] for row, _ in ran)
    yield f"Predicted and measured peaks differ by at most {apart:.2%}; {above} of {len(ran)} are above the budget"
    furthest = max((off_by(row) for row, _ in ran), default=0.0)
    yield f"Gradients of our plans are off by at most {furthest:.0e}; {sum(wrong(row) for row, _ in ran)} are wrong"
    for way, what in (("inductor", "planned, compared and compiled"), ("known", "the same from a plan file")):
        if times := [t[way] / t["compile"] for m in models.values() if numbers(t := m["compiling"])]:
            yield f"Until the first step has ended, {what}, over torch.compile alone: {spread(times)}"


def wrong(row: Report) -> bool:
    """Whether a way ran, and its gradients are wrong."""
    return off_by(row) > WRONG and abs(row.get("slope", 0.0) - 1) > STEEP


def off_by(row: Report) -> float:
    """How far a way's gradients are from torch.compile's or from eager mode's, whichever is less."""
    return min(row.get("gradients", 0.0), row.get("of eager's", float("inf")))


def numbers(times: Report) -> bool:
    """Whether all ways were timed."""
    return len(times) > 0 and all(isinstance(t, float) for t in times.values())


def spread(values: Sequence[float]) -> str:
    """The mean of some ratios, and their range."""
    if not values:
        return "none"
    return f"{statistics.mean(values):.2f} in the mean ({min(values):.2f} to {max(values):.2f})"


def _rivals(rows: Report) -> list[str]:
    return [way for way in rows if way == "blocks" or way.startswith("budget")]


def _torchs(rows: Report) -> str:
    names = ["", "peak", "time, of eager", "of torch.compile", "gradients"]
    lines = head([*names, "ours: peak", "time, of its", "gradients"])
    for way in ("eager", "compile", *_rivals(rows)):
        row = rows[way]
        if "error" in row:
            lines.append(f"| {way} | {said(row)} | | | | | | |")
            continue
        judged = f" (slope {row['slope']:.2f}{', wrong' if wrong(row) else ''})" if "slope" in row else ""
        times = f"{row['time']['eager']:.2f} | {row['time']['compile']:.2f}"
        theirs = f"| {way} | {row['peak'] / MIB:.2f} | {times} | {off_by(row):.0e}{judged} "
        lines.append(theirs + _ours(rows.get(f"inductor at {way}"), way))
    return "\n".join(lines) + "\n"


def _ours(row: Report | None, way: str) -> str:
    if row is None:
        return "| | | |"
    if "error" in row:
        return f"| {said(row)} | | |"
    return f"| {row['peak'] / MIB:.2f} | {row['time'][way]:.2f} | {off_by(row):.0e} |"


def _beside_eager(rows: Report) -> str:
    """How far gradients are from eager mode's, where torch.compile's are and those of plans are not."""
    own = [row["of eager's"] for label, row in rows.items() if label.startswith("inductor at") and "of eager's" in row]
    theirs = rows["compile"].get("of eager's", 0.0)
    if not own or max(own) > WRONG or theirs <= WRONG:
        return ""
    return (
        f"\nGradients beside eager mode's: torch.compile's are off by {theirs:.0e}, those of plans by {max(own):.0e}.\n"
    )


def _shares(rows: Report) -> str:
    names = ["plan", "budget", "predicted", "measured"]
    lines = head([*names, "time, of eager", "of torch.compile", "of aten's", "gradients"])
    for label, row in rows.items():
        kind, _, share = label.partition(" at ")
        if not share:
            continue
        if "error" in row:
            lines.append(f"| {label} | {said(row)} | | | | | | |")
            continue
        held = " | ".join(f"{row[name] / MIB:.3f}" for name in ("budget", "predicted", "peak"))
        times = " | ".join(
            f"{x:.2f}" if (x := row["time"].get(o)) else "" for o in ("eager", "compile", f"aten at {share}")
        )
        name = label if row["mode"] == kind else f"{label} (runs as {row['mode']})"
        lines.append(f"| {name} | {held} | {times} | {off_by(row):.0e} |")
    return "\n".join(lines) + "\n"


def _compiling(model: Report) -> str:
    times = model["compiling"]
    if not numbers(times):
        return ""
    own, ours, known = (times[way] for way in ("compile", "inductor", "known"))
    return (
        f"\nSeconds until the first step has ended: torch.compile {own:.1f}, a plan {ours:.1f} "
        f"({ours / own:.1f} times), a known plan {known:.1f} ({known / own:.1f} times).\n"
    )


def head(names: Sequence[str]) -> list[str]:
    """The first lines of a table."""
    return [f"| {' | '.join(names)} |", f"|---|{'---:|' * (len(names) - 1)}"]


def said(row: Report) -> str:
    """An error as a cell: what it says first."""
    return " ".join(row["error"].split()).split(": the ")[0][:120].replace("|", " ")


def draw(report: Report) -> str:
    """Measured peak as a share of torch.compile's, against time over torch.compile's, for each model's ways."""
    panels = [_panel(name, model["rows"]) for name, model in report["models"].items()]
    return picture(
        "Time over torch.compile's against measured peak, for each model and way", STYLE, KINDS, _mark, panels
    )


def points(rows: Report) -> list[tuple[str, float, float]]:
    """The kind of each way that ran with the right gradients, its peak and its time, over torch.compile's."""
    base = rows["compile"]
    ran = [(way.split()[0], row) for way, row in rows.items() if "peak" in row and way not in ("eager", "compile")]
    # the mode aten has eager mode's dropout masks
    right = [(kind, row) for kind, row in ran if kind == "aten" or not wrong(row)]
    return [(kind, row["peak"] / base["peak"], row["time"]["compile"]) for kind, row in right]


def _panel(name: str, rows: Report) -> str:
    found = points(rows)
    low, high = min([0.9, *(y for _, _, y in found)]), max([1.2, *(y for _, _, y in found)])
    low, high = int(low * 10) / 10, (int(high * 10) + 1) / 10
    wide = max([1.0, *(x for _, x, _ in found)])
    each = 0.1 if high - low <= 0.6 else 0.2
    across = [(x / 100, f"{x}%") for x in range(0, int(100 * wide) + 1, 25)]
    up = [(y, f"{y:.1f}") for y in (low + step * each for step in range(round((high - low) / each) + 1))]
    ends = wide, low, high
    parts, place = axes(name, ("peak, of torch.compile's", "time"), ends, across, up), placing(*ends)
    return "".join([*parts, *(_mark(kind, *place(x, y)) for kind, x, y in found)])


def _mark(kind: str, x: float, y: float) -> str:
    if kind == "blocks":
        shape = "<path d='M-4,-4 H4 V4 H-4 Z' fill='var(--blocks)'/>"
    elif kind == "budget":
        shape = "<circle r='3' stroke='var(--budget)' stroke-width='1.5' fill='none'/>"
    else:
        shape = f"<circle r='3' fill='var(--{kind})'/>"
    return f"<g transform='translate({x:.1f},{y:.1f})'>{shape}</g>"
