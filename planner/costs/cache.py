"""What was measured on this machine, kept on disk between processes; safe to delete, and never in the way of a plan."""

from __future__ import annotations

import hashlib
import os
import sqlite3
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

import torch

from planner.costs.measure_op import Allocated
from planner.devices.accelerator import accelerator_of
from planner.errors import warn

_FORMAT = 3  # of the table, and of what is measured; a new one is a new file
_TABLES = (
    "CREATE TABLE IF NOT EXISTS ops (key TEXT PRIMARY KEY, workspace INTEGER NOT NULL, excess INTEGER NOT NULL, "
    "seconds REAL) WITHOUT ROWID",
    "CREATE TABLE IF NOT EXISTS agreed (key TEXT PRIMARY KEY) WITHOUT ROWID",
)
_DAMAGED = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}
T = TypeVar("T")


def cache_file() -> Path:
    """$CHECKPOINT_PLANNER_CACHE, or checkpoint-planner in $XDG_CACHE_HOME or ~/.cache, is the folder; RuntimeError
    without a home.
    """
    folder = os.environ.get("CHECKPOINT_PLANNER_CACHE")
    caches = os.environ.get("XDG_CACHE_HOME")
    default = Path(caches) if caches else Path("~/.cache").expanduser()
    return (Path(folder) if folder else default / "checkpoint-planner") / f"ops-{_FORMAT}.sqlite3"


def surroundings(device: torch.device) -> str:
    """The surroundings that an op's costs depend on: the device, the versions, the settings that choose kernels."""
    backends: Any = torch.backends
    parts: list[Any] = [torch.__version__, device.type, torch.are_deterministic_algorithms_enabled()]
    if device.type == "cuda":
        parts += [
            torch.cuda.get_device_name(device),
            torch.version.cuda,
            backends.cudnn.version(),
            backends.cudnn.enabled,
            backends.cudnn.benchmark,
            backends.cudnn.deterministic,
            backends.cudnn.conv.fp32_precision,
            backends.cuda.matmul.fp32_precision,
            backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
            backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
            os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
        ]
    elif (accelerator := accelerator_of(device)) is not None and device.type != "cpu":
        parts += [accelerator.properties(device)[0], os.environ.get("PYTORCH_ENABLE_MPS_FALLBACK")]
    else:
        parts += [
            backends.cpu.get_cpu_capability(),
            torch.get_num_threads(),
            backends.mkldnn.enabled,
            backends.mkldnn.conv.fp32_precision,
            backends.mkldnn.matmul.fp32_precision,
        ]
    return repr(parts)


def digest(around: str, key: str) -> str:
    """The key of a call's row, of `surroundings` and `Call.key`."""
    return hashlib.sha256(f"{around}\n{key}".encode()).hexdigest()


def read(keys: Iterable[str]) -> dict[str, Allocated]:
    """The costs of those calls that have been measured before, by their digests."""

    def select(connection: sqlite3.Connection) -> dict[str, Allocated]:
        query = "SELECT workspace, excess, seconds FROM ops WHERE key = ?"
        rows = ((key, connection.execute(query, (key,)).fetchone()) for key in keys)
        return {key: Allocated(*row) for key, row in rows if row is not None}

    return _with_file(select) or {}


def write(costs: Mapping[str, Allocated]) -> None:
    """Keep measured costs, by digest."""
    rows = [(key, a.workspace, a.excess, a.seconds) for key, a in costs.items()]
    _with_file(lambda connection: connection.executemany("INSERT OR REPLACE INTO ops VALUES (?, ?, ?, ?)", rows))


def gradients_agreed(key: str) -> bool:
    """Whether the gradients of compiled graphs were compared before, and were right.

    Args:
        key: the digest of the graphs and of what compiles them.
    """
    query = "SELECT 1 FROM agreed WHERE key = ?"
    return _with_file(lambda connection: connection.execute(query, (key,)).fetchone()) is not None


def keep_agreement(key: str) -> None:
    """Keep that gradients were compared, and agreed, for `gradients_agreed()`."""
    _with_file(lambda connection: connection.execute("INSERT OR REPLACE INTO agreed VALUES (?)", (key,)))


def _with_file(use: Callable[[sqlite3.Connection], T]) -> T | None:
    """One transaction; None where the file cannot be used. A damaged file is begun anew, with a warning."""
    try:
        path = cache_file()
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            return _transaction(path, use)
        except sqlite3.DatabaseError as e:
            if getattr(e, "sqlite_errorcode", 0) & 0xFF not in _DAMAGED:  # the rest of the code is detail
                return None
            for part in (path, path.with_name(f"{path.name}-journal")):
                part.unlink(missing_ok=True)
            warn(f"{path} was damaged ({e}); it is begun anew, and ops are measured again")
            return _transaction(path, use)
    except (OSError, RuntimeError, sqlite3.Error):  # no home, no room, read-only: then ops are measured every time
        return None


def _transaction(path: Path, use: Callable[[sqlite3.Connection], T]) -> T:
    with closing(sqlite3.connect(path, timeout=5)) as connection, connection:
        connection.execute("PRAGMA synchronous = OFF")  # a file that a power cut damages is begun anew
        for table in _TABLES:
            connection.execute(table)
        return use(connection)
