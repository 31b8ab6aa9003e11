"""Ops run one by one on the real device: the bytes that each allocates, and the seconds that it takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from planner.capture.recomputability import OWN
from planner.compat import pytree
from planner.compat.ops import schema_of
from planner.core.call import Call, TensorSpec, ViewSpec, storages
from planner.costs.worst_values import fill_valid, fill_worst
from planner.devices.accelerator import Accelerator, accelerator_of
from planner.devices.find import check_working, first_line
from planner.devices.meter import marked, record_allocations
from planner.errors import DeviceError

_ROUNDS = 5
_ROUND_SECONDS = 1e-3  # short ops are repeated to fill it
_LONG_SECONDS = 0.02  # longer ops are run twice only
_CACHED = 2**27  # bytes that are more than the cache of any device
_DRAWN = {torch.float16, torch.bfloat16, torch.float32, torch.float64}  # dtypes that a generator draws


@dataclass(frozen=True, slots=True)
class Allocated:
    """The measured costs of an op.

    Attributes:
        workspace: bytes live only while it runs, beside its results.
        excess: bytes of its results beyond the size that fake tensors give them (on the CPU, `mse_loss` returns
            a scalar in a storage of its input's size).
        seconds: the median time of a run; None where it was not timed.
    """

    workspace: int
    excess: int
    seconds: float | None = None


def run_on_cpu(calls: Sequence[Call], timed: bool) -> dict[str, Allocated]:
    """Run each call on its worst values, in one recording of the allocator's events; by `Call.key`, without those that
    fail.
    """
    sizes: list[int | None] = []
    gradients = torch.is_grad_enabled()

    def run_all() -> None:
        with torch.set_grad_enabled(gradients):  # a thread of its own begins with them
            for call in calls:
                sizes.append(_marked_run(call, str(len(sizes))))

    recorded = record_allocations(run_all, anywhere=True)
    peaks = {int(name): recorded.peak(events) for name, events in recorded.marks}
    return {
        call.key: _allocated(call, peaks[n], size, _timed_on_cpu(call) if timed else None)
        for n, (call, size) in enumerate(zip(calls, sizes, strict=True))
        if size is not None
    }


def run_on_accelerator(calls: Sequence[Call], device: torch.device, timed: bool) -> dict[str, Allocated]:
    """Run each call on its worst values; by `Call.key`, without those that fail.

    Raises:
        DeviceError: one of them has put the device out of order.
    """
    accelerator = accelerator_of(device)
    assert accelerator is not None
    with accelerator.current(device):
        runs = ((call.key, _run(call, accelerator, device, timed)) for call in calls if safe_on_zeros(call))
        return {key: run for key, run in runs if run is not None}


def safe_on_zeros(call: Call) -> bool:
    """Whether arguments of zeros cannot trip an assertion on the device, after which nothing runs there any more.

    Torch's own ops take zeros as `fill_valid` leaves them. An op of others may take integers for places in what it
    reads, or for lengths that add up to a size.
    """
    name = schema_of(call.target).name
    if "assert" in name:
        return False
    integers = (t for t in pytree.tree_leaves((call.args, call.kwargs)) if isinstance(t, TensorSpec))
    return name.partition("::")[0] in OWN or all(t.dtype.is_floating_point or t.dtype.is_complex for t in integers)


def _marked_run(call: Call, name: str) -> int | None:
    """Bytes of the storages that a call makes; None where it fails."""
    try:
        args, kwargs = _arguments(call, torch.device("cpu"), worst=True)
        with marked(name):
            size = _made(call.target(*args, **kwargs), args, kwargs)
    except Exception:  # it refuses these values, or there is too little memory: then it is not measured
        return None
    return size


def _timed_on_cpu(call: Call) -> float:
    args, kwargs = _arguments(call, torch.device("cpu"))

    def run(times: int) -> float:
        begin = time.perf_counter()
        for _ in range(times):
            call.target(*args, **kwargs)
        return time.perf_counter() - begin

    return _median_seconds(run)


def _run(call: Call, accelerator: Accelerator, device: torch.device, timed: bool) -> Allocated | None:
    try:
        args, kwargs = _arguments(call, device, worst=True)
        # a first run makes cuBLAS take its workspace and cuDNN choose its plan: neither is the op's own
        call.target(*args, **kwargs)
        accelerator.synchronize(device)
        accelerator.reset_peak(device)
        before = accelerator.allocated(device)
        size = _made(call.target(*args, **kwargs), args, kwargs)
        peak = accelerator.peak(device)
        accelerator.synchronize(device)
        seconds = _timed(call, accelerator, device) if timed else None
    except Exception as e:  # as on the CPU; but what fails on the device may leave it out of order
        _check_after(call, device, e)
        return None
    return _allocated(call, size if peak is None else peak - before, size, seconds)


def _check_after(call: Call, device: torch.device, error: Exception) -> None:
    try:
        check_working(device)
    except DeviceError as e:
        name = schema_of(call.target).name
        raise DeviceError(
            f"measuring {name} on zeros failed ({first_line(error)}). {e}. costs='roofline' with the model on meta "
            "plans without running ops"
        ) from error


def _timed(call: Call, accelerator: Accelerator, device: torch.device) -> float | None:
    """The time of a run on values that are not zero (which draw less power), and of which no cache has any.

    A block that is larger than the cache is written before each run: so the device has more to do than the host takes
    to queue it, and does not wait for the host. None where there is no room for all that, or the time cannot be told
    from that of the block alone.
    """
    try:
        args, kwargs = _arguments(call, device, drawn=True)
        block = torch.empty(_CACHED, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError:
        return None

    def seconds(times: int, op: Callable[[], object]) -> float:
        def repeat() -> None:
            for _ in range(times):
                block.zero_()
                op()

        return accelerator.seconds(device, repeat)

    def run(times: int) -> float:
        return max(0.0, seconds(times, lambda: call.target(*args, **kwargs)) - seconds(times, lambda: None))

    return _median_seconds(run) or None


def _median_seconds(run: Callable[[int], float]) -> float:
    """Seconds of one run, from `run(times)`, the seconds of several in a row; the first is not counted."""
    once = max(run(1), 1e-9)
    times = max(1, min(100, round(_ROUND_SECONDS / once)))
    return median(run(times) / times for _ in range(_ROUNDS if once < _LONG_SECONDS else 2))


def _allocated(call: Call, peak: int, size: int, seconds: float | None) -> Allocated:
    return Allocated(max(0, peak - size), max(0, size - call.made_bytes), seconds)


def _made(result: Any, args: Any, kwargs: Any) -> int:
    given = storages((args, kwargs))
    return sum(size for storage, size in storages(result).items() if storage not in given)


def _arguments(call: Call, device: torch.device, worst: bool = False, drawn: bool = False) -> tuple[Any, Any]:
    """Arguments of zeros; or those for which the op takes the most memory; or of numbers from 0 to 1, where it may."""
    generator = torch.Generator(device).manual_seed(0) if drawn else None

    def real(spec: TensorSpec) -> torch.Tensor:
        behind = spec.behind if isinstance(spec, ViewSpec) else spec.span if 0 in spec.stride else None
        shape, stride = (spec.shape, spec.stride) if behind is None else ((behind,), (1,))
        t = torch.empty_strided(shape, stride, dtype=spec.dtype, device=device).zero_()
        if drawn and spec.dtype in _DRAWN:
            t.uniform_(generator=generator)
        return t if behind is None else t.as_strided(spec.shape, spec.stride, getattr(spec, "offset", 0))

    args, kwargs = pytree.tree_map_only(TensorSpec, real, (call.args, call.kwargs))
    fill_valid(call.target, args, kwargs)
    if worst:
        fill_worst(call.target, args, kwargs, call.made_bytes)
    return args, kwargs
