"""The longest sequence that trains on one card: `python -m benchmarks.context`.

Models are on `meta`, cards are profiles. The step is captured whole at three lengths. The bytes of every value are
linear in the length (the third capture checks that), so that what people arrange by hand is simulated at any length:
each block checkpointed, block inputs on the host, the loss in chunks of 256 tokens. What is planned is planned at its
own length. Rows are written as they come, and those that are there already are not computed again.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import queue
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.context_models import MODELS, make
from benchmarks.context_steps import Captured, Way, capture, ways_of
from planner import InfeasibleBudgetError, plan
from planner.errors import OffloadError, gb
from solvers import Problem, simulate

CARDS = ("h100", "rtx4090")
KINDS = ("LoRA", "full")
HOST_GB = 256.0  # a card's share of a node's memory
GRAIN = 1024  # tokens: lengths are multiples of it
LENGTHS = (8192, 32768, 131072)
LONGEST = 2**23
OPTIONS: dict[str, Any] = {"pieces": "auto", "offload": "cpu", "host_gb": HOST_GB, "time_limit": 20.0}
PLANNED = "planned"
FACTORS = (1.25, 1.6, 2.0)  # of the longest by hand: what is planned
SHORTER = 1.0  # where the first has no plan
TRIED = ("tokens", "peak_bytes", "least_bytes", "refused", "planning_seconds")


def between(problems: Sequence[Problem], lengths: Sequence[int], length: int) -> Problem:
    """The problem at another length: bytes are linear in it, costs quadratic."""
    first, second, third = problems
    a, b, c = lengths

    def line(x: int, y: int) -> int:
        return x + (y - x) * (length - a) // (b - a)

    def curve(x: float, y: float, z: float) -> float:
        p = (length - b) * (length - c) / ((a - b) * (a - c))
        q = (length - a) * (length - c) / ((b - a) * (b - c))
        return max(0.0, p * x + q * y + (1 - p - q) * z)

    rows = zip(first.ops, second.ops, third.ops, strict=True)
    ops = tuple(
        replace(x, workspace=line(x.workspace, y.workspace), cost=curve(x.cost, y.cost, z.cost)) for x, y, z in rows
    )
    sizes = tuple(line(x, y) for x, y in zip(first.sizes, second.sizes, strict=True))
    return replace(first, ops=ops, sizes=sizes, resident=line(first.resident, second.resident))


def unlike(problems: Sequence[Problem], lengths: Sequence[int]) -> int:
    """Bytes by which the peaks' parts at the third length differ from what the first two say, at most."""
    third, told = problems[2], between(problems, lengths, lengths[2])
    pairs = zip(
        (*third.sizes, *(op.workspace for op in third.ops)),
        (*told.sizes, *(op.workspace for op in told.ops)),
        strict=True,
    )
    return max(abs(x - y) for x, y in pairs)


def longest(peak: Callable[[int], int], room: int) -> int:
    """The longest length, a multiple of the grain, whose peak is within the room; 0 for none."""
    low, high = 0, LONGEST // GRAIN
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if peak(middle * GRAIN) <= room else (low, middle - 1)
    return low * GRAIN


def by_hand(captures: Sequence[Captured], card: str) -> Iterator[dict[str, Any]]:
    """Rows of what people arrange by hand, on a card."""
    found = [ways_of(each, card) for each in captures]
    for at, name in enumerate(way.name for way in found[0]):
        ways: list[Way] = [each[at] for each in found]
        problems, lengths = [way.problem for way in ways], [each.length for each in captures]
        step = ways[0]

        def timeline(length: int, problems: Any = problems, lengths: Any = lengths, step: Way = step) -> Any:
            return simulate(between(problems, lengths, length), step.schedule)

        def peak(length: int, timeline: Any = timeline, step: Way = step) -> int:
            return int(timeline(length).peak * (1 + step.margin))

        length = longest(peak, step.room)
        row = {"way": name, "tokens": length, "differs_bytes": unlike(problems, lengths)}
        row |= {"resident_bytes": problems[0].resident, "room_bytes": step.room}
        if length:
            at_it = timeline(length)
            row |= {"peak_bytes": peak(length), "seconds": at_it.cost, "host_bytes": at_it.host_peak}
        else:
            row |= {"least_bytes": peak(GRAIN)}
        yield row


def planned(model: str, kind: str, card: str, length: int, results: Any) -> None:
    """Plan a length, into a queue: a row, or why there is none."""
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    torch.set_num_threads(1)
    start = time.perf_counter()
    module, batch = make(model, kind, length)
    row: dict[str, Any] = {"tokens": length}
    try:
        p = plan(module, batch, device=card, optimizer="adamw-fused", progress=False, **OPTIONS)
        row |= {
            "peak_bytes": p.peak_bytes, "seconds": p.step_seconds, "host_bytes": p.host_peak_bytes,
            "more_time": p.overhead, "note": p.note, "account": dict(p.account),
        }  # fmt: skip
    except InfeasibleBudgetError as e:
        row |= {"least_bytes": e.minimum_bytes}
    except OffloadError as e:
        row |= {"refused": str(e)}
    results.put(row | {"planning_seconds": time.perf_counter() - start})


def longest_planned(
    model: str, kind: str, card: str, length: int, seconds: float, shares: Sequence[float]
) -> dict[str, Any]:
    """The longest of a few lengths that has a plan within so many seconds: longer ones as long as they have."""
    best: dict[str, Any] = {"way": PLANNED, "tokens": 0, "tried": []}
    context = multiprocessing.get_context("spawn")
    factors = list(shares)
    while factors:
        tokens = max(1, round(factors.pop(0) * length / GRAIN)) * GRAIN
        results = context.Queue()
        process = context.Process(target=planned, args=(model, kind, card, tokens, results))
        process.start()
        try:
            row = results.get(timeout=seconds)
        except queue.Empty:
            row = {"tokens": tokens, "refused": f"no plan within {seconds:.0f} s"}
        process.kill()
        process.join()
        best["tried"].append({name: row[name] for name in TRIED if name in row})
        if "peak_bytes" in row:
            best |= row
        elif best["tokens"] or len(best["tried"]) > 1:
            break
        else:
            factors = [SHORTER]
    return best


def line(row: dict[str, Any]) -> str:
    """A row of the table."""
    head = f"| {row['model']} | {row['kind']} | {row['card']} | {row['way']} |"
    if not row["tokens"]:
        found = row["tried"][-1] if row.get("tried") else row
        why = f"{gb(found['least_bytes'])} at least" if "least_bytes" in found else found["refused"]
        return f"{head} none: {why} | | | |"
    each = row["seconds"] / row["tokens"] * 1e6
    host = gb(row["host_bytes"]) if row["host_bytes"] else ""
    return f"{head} {row['tokens']:,} | {gb(row['peak_bytes'])} | {host} | {each:.0f} us |"


def rows_by_hand(model: str, kind: str) -> list[dict[str, Any]]:
    """The rows by hand of a model that is trained in a way, on all cards."""
    captures = [capture(*make(model, kind, length), length) for length in LENGTHS]
    return [{"card": card, **row} for card in CARDS for row in by_hand(captures, card)]


def row_planned(own: Sequence[Mapping[str, Any]], seconds: float, factors: Sequence[float]) -> dict[str, Any]:
    """The row of what is planned, beside rows by hand of the same model and card."""
    model, kind, card = (str(own[0][name]) for name in ("model", "kind", "card"))
    resident, room = (min(row[name] for row in own) for name in ("resident_bytes", "room_bytes"))
    if resident > room:
        return {"card": card, "way": PLANNED, "tokens": 0, "least_bytes": resident, "tried": []}
    most = max(row["tokens"] for row in own) or GRAIN
    return {"card": card, **longest_planned(model, kind, card, most, seconds, factors)}


def main() -> None:
    """Look for every longest sequence; print a Markdown table, and write JSON where asked."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.context", description=__doc__)
    parser.add_argument("--output", type=Path, help="write the rows as JSON, and go on where a run was stopped")
    parser.add_argument(
        "--plan-within", type=float, default=3600, help="seconds for each plan; 0 for rows by hand alone"
    )
    parser.add_argument("--factors", type=float, nargs="+", default=FACTORS, help="of the longest by hand: plan these")
    parser.add_argument("--only", default="", help="compute rows whose model and kind contain this, as 'Qwen3-8B LoRA'")
    options = parser.parse_args()
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    torch.set_num_threads(1)
    report: dict[str, Any] = {"torch": torch.__version__, "host_gb": HOST_GB, "rows": []}
    if options.output and options.output.exists():
        report |= json.loads(options.output.read_text())
    heads = ("model", "trained", "card", "", "tokens", "peak", "on the host", "time a token")
    print(f"| {' | '.join(heads)} |\n|---|---|---|---|---:|---:|---:|---:|")
    rows = report["rows"]

    def add(model: str, kind: str, more: Sequence[dict[str, Any]]) -> None:
        rows.extend({"model": model, "kind": kind, **row} for row in more)
        print("\n".join(map(line, rows[-len(more) :])), flush=True)
        if options.output:
            options.output.write_text(json.dumps(report, indent=1) + "\n")

    print("\n".join(map(line, rows)))
    asked = [(model, kind) for model in MODELS for kind in KINDS if options.only in f"{model} {kind}"]
    for pair in asked:
        if not any((row["model"], row["kind"]) == pair for row in rows):
            add(*pair, rows_by_hand(*pair))
    for card in CARDS:
        for pair in asked:
            own = [row for row in rows if (row["model"], row["kind"], row["card"]) == (*pair, card)]
            if options.plan_within and not any(row["way"] == PLANNED for row in own):
                add(*pair, [row_planned(own, options.plan_within, options.factors)])


if __name__ == "__main__":
    main()
