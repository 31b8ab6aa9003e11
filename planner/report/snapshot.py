"""The predicted timeline as a memory snapshot of PyTorch's, for the viewer at https://pytorch.org/memory_viz.

The format is that of `torch.cuda.memory._snapshot()`, described there; torch/cuda/_memory_viz.py and
torch/utils/viz/MemoryViz.js read it.
"""

from __future__ import annotations

import os
import pickle
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from planner.core.account import resident
from planner.core.files import path_of, write_atomically
from planner.core.options import PLANNED_LINES
from planner.core.plan import Held, Moment, PlanRecord
from planner.core.step import replay
from planner.devices.caching_allocator import FREE, Event, Placed, place
from planner.report.names import title
from solvers import Problem, Schedule
from solvers.moves import events

BASE = 0x7F0000000000  # where addresses begin, as on a GPU
PROTOCOL = 4  # the viewer's own reader of pickles knows no later one
SEGMENT = "unknown"  # the viewer fails where there are categories and none has this name

Frames = list[dict[str, Any]]
Change = tuple[list[tuple[Any, int, str]], list[Any]]  # each allocation's tag, bytes and category; tags to free


@dataclass(frozen=True, slots=True)
class _Block:
    """An allocation: its bytes, the kind of memory, and the lines of code behind it."""

    nbytes: int
    category: str
    frames: Frames


def snapshot(plan: PlanRecord) -> dict[str, Any]:
    """One step of a plan in the format of `torch.cuda.memory._snapshot()`.

    It has a block for each line of the account that is there all the time, for each tensor of the step and each op's
    workspace, placed as PyTorch's caching allocator does. In eager mode, where tensors are not known one by one, a
    block is what a moment adds to a kind of memory. While an op runs, the blocks add up to the plan's timeline.
    """
    lines = dict(takewhile(lambda line: line[0] not in PLANNED_LINES, plan.account.items()))
    if plan.problem is not None and plan.schedule is not None:
        changes = _tensors(plan.problem, plan.schedule)
    else:
        changes = _kinds([m.held for m in plan.timeline], resident(lines))
    blocks = [_Block(nbytes, "all the time", [_frame("(all the time)", 0, name)]) for name, nbytes in lines.items()]
    events: list[Event] = [(block.nbytes, key) for key, block in enumerate(blocks)]
    times = [0] * len(events)  # of the events, in microseconds
    keys: dict[Any, int] = {}
    seconds = 0.0
    for moment, (made, freed) in zip(plan.timeline, changes, strict=True):
        frames = _frames(moment)
        for tag, nbytes, category in made:
            keys[tag] = len(blocks)
            events.append((nbytes, len(blocks)))
            blocks.append(_Block(nbytes, category, frames))
        times += [round(1e6 * seconds)] * len(made)
        seconds += moment.seconds
        events += [(FREE, keys.pop(tag)) for tag in freed]
        times += [round(1e6 * seconds)] * len(freed)
    return _written(events, times, blocks)


def save(plan: PlanRecord, path: str | os.PathLike[str]) -> None:
    """Write the snapshot as a pickle of plain dictionaries; see `Plan.memory_snapshot`."""
    write_atomically(path_of(path), pickle.dumps(snapshot(plan), PROTOCOL))


def _tensors(problem: Problem, schedule: Schedule) -> Iterator[Change]:
    """The allocations and frees of each step of a schedule; a tag is a value and the step that wrote the copy."""
    copies: dict[int, int] = {}  # live values -> the step that wrote them
    seen: set[int] = set()
    replayed = replay(problem, schedule)
    fetched: list[tuple[Any, int, str]] = []
    before: Change | None = None  # a value that leaves before a step is freed at the end of the one before it
    for at, move in events(schedule.steps, schedule.moves):
        if move is not None:
            if move.kind == "free" and before is not None:
                before = before[0], [*before[1], (move.value, copies.pop(move.value))]
            elif move.kind == "fetch":
                copies[move.value] = ~at  # no step wrote it
                fetched.append(((move.value, ~at), problem.sizes[move.value], "activations"))
            continue
        if before is not None:
            yield before
        i, gone = schedule.steps[at], replayed.timeline.frees[at]
        op = problem.ops[i]
        category = "recomputed" if i in seen else "activations" if i < problem.boundary else "gradients"
        seen.add(i)
        made: list[tuple[Any, int, str]] = [*fetched, *(((v, at), problem.sizes[v], category) for v in op.writes)]
        fetched = []
        made += [((None, at), op.workspace, "workspace"), (("others", at), replayed.others[at], "other microbatches")]
        freed: list[Any] = [(None, at), ("others", at)]
        freed += [(v, at) for v in op.writes if v in copies]  # the older copy stays
        for v in op.writes:
            copies.setdefault(v, at)
        before = made, [*freed, *((v, copies.pop(v)) for v in gone)]
    if before is not None:
        yield before


def _kinds(held: Sequence[Held], always: Held) -> Iterator[Change]:
    """The same where only the bytes of each kind are known: of a kind, the last allocation is freed first."""
    made: dict[int, list[tuple[Any, int, str]]] = defaultdict(list)
    freed: dict[int, list[Any]] = defaultdict(list)
    for kind, (name, first) in enumerate(zip(Held._fields, always, strict=True)):
        stack: list[tuple[int, int]] = []  # (when it came, bytes)
        level = first
        for at, nbytes in enumerate([*(h[kind] for h in held), first]):
            wanted = 0 if name == "workspace" else nbytes  # which each moment has for itself
            while level > wanted and stack:
                born, size = stack.pop()
                part = min(size, level - wanted)
                if part < size:
                    stack.append((born, size - part))
                level -= part
                made[born].append(((kind, born, at, size), part, name))
                freed[at - 1].append((kind, born, at, size))
            if nbytes > level:
                stack.append((at, nbytes - level))
                level = nbytes
    return ((made[at], freed[at]) for at in range(len(held)))


def _frames(moment: Moment) -> Frames:
    """The frames of a block: the user's line, with the module and the kind of op as the function's name."""
    again = " (again)" if moment.recomputed else ""
    place = re.match(r"(.*?):(\d{1,9}): ", moment.source)
    name = f"{title(moment.module, moment.op, moment.source)}{again}"
    return [_frame(place[1], int(place[2]), name) if place else _frame("(unknown line)", 0, name)]


def _frame(path: str, line: int, name: str) -> dict[str, Any]:
    return {"filename": path, "line": line, "name": name}


def _written(events: Sequence[Event], times: Sequence[int], blocks: Sequence[_Block]) -> dict[str, Any]:
    """The events, and the segments with their blocks after the last of them, in torch's format."""
    placed = place(events)
    trace: list[dict[str, Any]] = []
    segments = dict(placed.segments)
    for at, (nbytes, key) in enumerate(events):
        block = blocks[key]
        entry = {"stream": 0, "time_us": times[at], "compile_context": "N/A"}
        if at in segments:
            start, size = segments[at]
            trace.append(
                entry
                | {"action": "segment_alloc", "addr": BASE + start, "size": size}
                | {"frames": [], "category": SEGMENT}
            )
        if block.nbytes:
            entry |= {"addr": BASE + placed.starts[key], "size": block.nbytes, "frames": block.frames}
            if nbytes == FREE:
                trace += [{**entry, "action": action} for action in ("free_requested", "free_completed")]
            else:
                trace.append({**entry, "action": "alloc", "category": block.category})
    ends = {key for nbytes, key in events if nbytes == FREE}
    left = sorted((placed.starts[key], key) for key, block in enumerate(blocks) if block.nbytes and key not in ends)
    return {
        "segments": [_segment(start, size, left, blocks, placed) for start, size in sorted(segments.values())],
        "device_traces": [trace],
        "allocator_settings": {},
        "external_annotations": [],
    }


def _segment(
    start: int, total: int, left: Sequence[tuple[int, int]], blocks: Sequence[_Block], placed: Placed
) -> dict[str, Any]:
    parts: list[dict[str, Any]] = []
    at = start
    inside = [(address, key) for address, key in left if start <= address < start + total]
    for address, key in [*inside, (start + total, None)]:
        if address > at:
            parts.append(_part(at, address - at, 0, "inactive", []))
        if key is not None:
            block = blocks[key]
            parts.append(_part(address, placed.sizes[key], block.nbytes, "active_allocated", block.frames))
            at = address + placed.sizes[key]
    used = sum(b["size"] for b in parts if b["state"] == "active_allocated")
    return {
        "device": 0,
        "address": BASE + start,
        "total_size": total,
        "allocated_size": used,
        "active_size": used,
        "requested_size": sum(b["requested_size"] for b in parts),
        "stream": 0,
        "segment_type": "small" if total <= 2 * 2**20 else "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": parts,
    }


def _part(start: int, size: int, requested: int, state: str, frames: Frames) -> dict[str, Any]:
    return {
        "address": BASE + start,
        "size": size,
        "requested_size": requested,
        "state": state,
        "frames": frames,
    }
