"""What an op allocates beside its results, found by running each distinct op once on the real device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree
from tqdm import tqdm

from ..capture.region import map_nodes, tensors
from ..runtime.meter import marked, record_allocations


def workspaces(nodes: Iterable[fx.Node], device: torch.device, *, progress: bool | None = None) -> dict[fx.Node, int]:
    """For each node, the bytes that it holds only while it runs, beyond its results.

    Each distinct op (target, shapes, strides, dtypes, other arguments) runs once, on zeros; an op that fails on zeros
    counts as 0. The random generators are left as they were.
    """
    by_key: dict[str, list[fx.Node]] = {}
    for node in nodes:
        if isinstance(node.target, torch._ops.OpOverload):
            by_key.setdefault(op_key(node), []).append(node)
    disable = None if progress is None else not progress
    bar = tqdm(by_key.items(), desc="measuring ops", unit=" ops", leave=False, disable=disable)
    devices = [device] if device.type == "cuda" else []
    found: dict[fx.Node, int] = {}
    with torch.random.fork_rng(devices=devices), torch.no_grad():
        for key, peak in _peaks(bar, device):
            for node in by_key[key]:
                results = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors(node)}
                for n in node.all_input_nodes:
                    for t in tensors(n):
                        results.pop(t.untyped_storage()._cdata, None)
                found[node] = max(0, peak - sum(results.values()))
    return found


def op_key(node: fx.Node) -> str:
    """Equal for two calls that allocate alike."""
    args, kwargs = map_nodes((node.args, dict(node.kwargs)), _Text)
    return f"{node.target}{args}{kwargs}"


class _Text:
    """A node's tensors by shape, strides and dtype, as text; fx leaves unknown objects in arguments alone."""

    def __init__(self, node: fx.Node) -> None:
        self.text = repr([(tuple(t.shape), t.stride(), t.dtype) for t in tensors(node)])

    def __repr__(self) -> str:
        return self.text


def _peaks(keyed: Iterable[tuple[str, list[fx.Node]]], device: torch.device) -> list[tuple[str, int]]:
    peaks: list[tuple[str, int]] = []
    if device.type == "cuda":
        for key, (node, *_) in keyed:
            args, kwargs = _real_arguments(node, device)
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
            _call(node, args, kwargs)
            peaks.append((key, torch.cuda.max_memory_allocated(device) - before))
        return peaks

    def run_all() -> None:
        for key, (node, *_) in keyed:
            args, kwargs = _real_arguments(node, device)
            with marked(key):
                result = _call(node, args, kwargs)
            del result, args, kwargs

    recorded = record_allocations(run_all)
    return [(key, recorded.peak(events)) for key, events in recorded.marks]


def _call(node: fx.Node, args: Any, kwargs: Any) -> Any:
    try:
        return node.target(*args, **kwargs)  # type: ignore[operator]
    except Exception:  # what an op says of zeros is of no interest: only what it allocates is
        return None


def _real_arguments(node: fx.Node, device: torch.device) -> tuple[Any, Any]:
    def real(t: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device).zero_()

    def of(n: fx.Node) -> Any:
        return pytree.tree_map_only(torch.Tensor, real, n.meta["val"])

    args, kwargs = map_nodes((node.args, dict(node.kwargs)), of)
    return args, kwargs
