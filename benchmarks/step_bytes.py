"""Bytes that a step holds at its peak, and bytes that its ops move, both by torch's profiler."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

_SIZES = {"float": 4, "double": 8, "long int": 8, "int": 4, "bool": 1, "unsigned char": 1, "short int": 2,
          "signed char": 1, "c10::BFloat16": 2, "c10::Half": 2, "c10::complex<float>": 8}  # fmt: skip
_MAKE = ("aten::empty", "aten::resize_", "aten::new_empty")  # these neither read nor write
_SAME = ("aten::_unsafe_view", "aten::_reshape_alias")  # views that torch does not call so


def step_bytes(step: Callable[[], object]) -> tuple[int, int]:
    """The most bytes that a step holds above what was held before it, and the bytes that its ops read and write.

    An op reads its tensors, and writes what it allocates or what it is told to write into. Of ops that call others,
    the inner ones count; views move nothing.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, record_shapes=True) as profiler:
        step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    memory = sorted((e for e in events if e["name"] == "[memory]"), key=lambda e: (e["ts"], e["args"]["Ev Idx"]))
    peak = max(accumulate(e["args"]["Bytes"] for e in memory))
    return peak, _moved([e for e in events if e.get("cat") == "cpu_op"], memory)


def _moved(ops: list[Any], memory: list[Any]) -> int:
    """Bytes read by the innermost ops that are no views, and all that is allocated."""
    ops = [e for e in ops if e["name"].startswith("aten::") and not e["name"].startswith(_MAKE)]
    ops.sort(key=lambda e: (e["tid"], e["ts"], -e["dur"]))
    inner = [e for e, after in zip(ops, [*ops[1:], None], strict=True) if not _contains(e, after)]
    read = sum(_read(e) for e in inner if not _is_view(e["name"]))
    return read + sum(max(0, e["args"]["Bytes"]) for e in memory)


def _contains(outer: Any, event: Any) -> bool:
    return event is not None and outer["tid"] == event["tid"] and event["ts"] < outer["ts"] + outer["dur"]


def _read(event: Any) -> int:
    given = event["args"]
    sizes, kinds = given.get("Input Dims", ()), given.get("Input type", ())
    return sum(_SIZES.get(kind, 0) * math.prod(size) for size, kind in zip(sizes, kinds, strict=False) if _flat(size))


def _flat(size: Any) -> bool:
    return all(isinstance(n, int) for n in size)


def _is_view(name: str) -> bool:
    packet = getattr(torch.ops.aten, name.removeprefix("aten::"), None)
    if packet is None or name in _SAME:
        return True
    return all(getattr(packet, overload).is_view for overload in packet.overloads())
