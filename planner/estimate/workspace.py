"""What an op allocates beside its results, found by running each distinct op once on the real device."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree
from tqdm import tqdm

from ..capture.call import Call, TensorSpec, storages
from .meter import marked, record_allocations


@dataclass(frozen=True, slots=True)
class Allocated:
    """What one run of an op showed, in bytes.

    Attributes:
        workspace: held only while it runs, beside its results.
        excess: what its results hold beyond the size that fake tensors give them (on the CPU, `mse_loss` returns a
            scalar in a storage of its input's size).
    """

    workspace: int
    excess: int


def measure(calls: Iterable[Call], device: torch.device, *, progress: bool | None = None) -> dict[str, Allocated]:
    """Run each distinct op (target, shapes, strides, dtypes, other arguments) once, on zeros.

    An op that fails on zeros counts as nothing. The random generators are left as they were.

    Args:
        calls: what to run.
        device: where.
        progress: show a progress bar; None for only where a terminal is watching.

    Returns:
        What each allocated, by `Call.key`.
    """
    distinct = {call.key: call for call in calls}
    disable = None if progress is None else not progress
    bar = tqdm(distinct.values(), desc="measuring ops", unit=" ops", leave=False, disable=disable)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.no_grad():
        runs = _on_cuda(bar, device) if device.type == "cuda" else _on_cpu(bar, device)
    return {
        call.key: Allocated(max(0, peak - made), max(0, made - call.made_bytes))
        for call, (peak, made) in zip(distinct.values(), runs, strict=True)
    }


def _on_cuda(calls: Iterable[Call], device: torch.device) -> list[tuple[int, int]]:
    """For each call, the peak above its inputs and the bytes of its results."""
    runs = []
    for call in calls:
        args, kwargs = _arguments(call, device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        made = _run(call, args, kwargs)
        runs.append((torch.cuda.max_memory_allocated(device) - before, made))
    return runs


def _on_cpu(calls: Iterable[Call], device: torch.device) -> list[tuple[int, int]]:
    made: list[int] = []

    def run_all() -> None:
        for call in calls:
            args, kwargs = _arguments(call, device)
            with marked(str(len(made))):
                size = _run(call, args, kwargs)
            made.append(size)

    recorded = record_allocations(run_all)
    peaks = {int(name): recorded.peak(events) for name, events in recorded.marks}
    return [(peaks[n], size) for n, size in enumerate(made)]


def _run(call: Call, args: Any, kwargs: Any) -> int:
    """Run a call; returns the bytes of the storages that it made."""
    try:
        made = storages(call.target(*args, **kwargs))
    except Exception:  # what an op says of zeros is of no interest: only what it allocates is
        return call.made_bytes
    return sum(size for storage, size in made.items() if storage not in storages((args, kwargs)))


def _arguments(call: Call, device: torch.device) -> tuple[Any, Any]:
    def real(spec: TensorSpec) -> torch.Tensor:
        return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=device).zero_()

    args, kwargs = pytree.tree_map_only(TensorSpec, real, (call.args, call.kwargs))
    return args, kwargs
