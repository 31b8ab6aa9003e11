"""The page of `benchmarks.tax`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

INTRODUCTION = """# A plan with room to spare

What a plan that recomputes nothing costs beside eager mode, as `python -m benchmarks.tax` measured it:
{device}, torch {torch}, {platform}. A step is forward pass, loss, backward pass, AdamW and `zero_grad()`.

A model whose step takes no more in eager mode than by its captured graphs runs as it is once the loop is known, and
what is left is the time in which the plan's call looks at the model, the batch and the loop. Others run captured
graphs: those that take less so, that ask for values of tensors, or that checkpoint themselves.

- *time*: processor time, planned over eager, the median of {pairs} alternating pairs. Steps of a few milliseconds have
  noise of several points.
- *captured*: the same of `torch.compile(backend="aot_eager")`, which plans nothing and runs eager's ops: what
  it takes to evaluate guards and to run a graph from Python, which a captured call of a plan takes as well.
- *peak*: the most bytes held, with parameters, by the profiler's allocator events, planned over eager.
- *moved*: bytes that the profiler's ops read and allocate, planned over eager.
"""
HOST = """## Host time

A `TransformerEncoder` on tensors of 16 rows: what is left is the time of Python and of the dispatcher. Milliseconds;
*per call* is what no layer adds to, *per layer* what each does; *nodes*: what the backward graph calls, per kernel.

| layers | dropout | eager, forward + backward | planned | ratio | nodes per kernel |
|---:|---:|---:|---:|---:|---:|
"""

GRAPHS = """
## Views

Steps with the views of the captured graph, and with those that are emitted, in turns with eager's, by
`python -m benchmarks.tax --graphs`; processor time of forward and backward pass over eager's. GPT-2 and Llama have 12
layers on tensors of 16 rows. The last columns are what the backward graph calls, per kernel: all nodes, and those that
call torch, without items of tuples.

| | eager | as captured | emitted | nodes as captured | nodes emitted | per kernel | calls per kernel |
|---|---:|---:|---:|---:|---:|---:|---:|
"""


def page(report: Mapping[str, Any]) -> str:
    """All of it."""
    shown = {k: v for k, v in report.items() if k not in ("models", "host")}
    lines = [
        INTRODUCTION.format(**shown),
        "| model | eager's step | time | captured | peak | moved |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for r in report["models"]:
        if r["why"]:
            lines.append(f"| {r['name']} | | {' '.join(r['why'].split())[:120].replace('|', ' ')} | | | |")
            continue
        captured = "" if r.get("captured") is None else f"{r['captured']:.2f}"
        lines.append(
            f"| {r['name']} | {r['seconds'] * 1e3:.1f} ms | {r['time']:.2f} | {captured} | {r['peak']:.3f} "
            f"| {r['moved']:.3f} |"
        )
    return "\n".join(lines) + "\n\n" + _host(report["host"]) + _graphs(report.get("graphs", []))


def _graphs(rows: list[Mapping[str, Any]]) -> str:
    if not rows:
        return ""
    lines = [
        f"| {r['name']} | {r['eager'] * 1e3:.1f} ms | {r['as_traced']:.2f} | {r['emitted']:.2f} "
        f"| {r['nodes_as_traced']} | {r['nodes']} | {r['nodes'] / r['kernels']:.2f} "
        f"| {(r['nodes'] - r['items']) / r['kernels']:.2f} |"
        for r in rows
    ]
    return GRAPHS + "\n".join(lines) + "\n"


def _host(rows: list[Mapping[str, Any]]) -> str:
    if not rows:
        return ""
    lines = []
    for r in rows:
        lines.append(
            f"| {r['layers']} | {r['dropout']} | {r['eager_forward'] * 1e3:.2f} + {r['eager_backward'] * 1e3:.2f} "
            f"| {r['forward'] * 1e3:.2f} + {r['backward'] * 1e3:.2f} | {r['ratio']:.2f} "
            f"| {r['nodes'] / r['kernels']:.2f} |"
        )
    parts = []
    for dropout in dict.fromkeys(r["dropout"] for r in rows):
        few, many = sorted((r for r in rows if r["dropout"] == dropout), key=lambda r: r["layers"])
        for kind in ("eager_", ""):
            sums = [r[f"{kind}forward"] + r[f"{kind}backward"] for r in (few, many)]
            layer = (sums[1] - sums[0]) / (many["layers"] - few["layers"])
            fixed = sums[0] - layer * few["layers"]
            parts.append(
                f"- dropout {dropout}, {'eager' if kind else 'planned'}: {fixed * 1e3:.2f} ms per call, "
                f"{layer * 1e3:.2f} ms per layer"
            )
    return HOST + "\n".join(lines) + "\n\n" + "\n".join(parts) + "\n"
