"""Links to where values may go, with their rates, and the stores at their ends."""

from __future__ import annotations

import os
import tempfile
import time
from functools import cache

import torch

from planner.core.options import GB, Options
from planner.devices.specs import Device, free_memory
from planner.errors import OffloadError, gb
from planner.offload.disk import Disk
from planner.offload.layout import ALIGNMENT
from planner.offload.pinned import HostMemory, measured_rates
from planner.offload.store import Store
from solvers import Link

SAMPLE = 2**24  # bytes that are written and read to know a disk's rates
LEAST_TO_DISK, LEAST_TO_HOST = 2**16, 2**20  # bytes of the smallest values that are worth a transfer
TOGETHER = 0.5  # share of each rate while a disk both writes and reads


def folder_of(options: Options) -> str:
    """The folder of offload="disk"."""
    return os.path.abspath(options.offload_dir or tempfile.gettempdir())


def link_of(options: Options, device: Device, here: torch.device | None) -> Link:
    """The link over which values leave, in seconds and bytes.

    Args:
        options: `offload` is not None.
        device: that is planned for.
        here: the same as a torch device, where it is here; else None.

    Raises:
        OffloadError: there is no room where they are to go, or nothing can be written there.
    """
    free: int | None
    host = None if options.host_gb is None else round(options.host_gb * GB)
    if options.offload == "disk":
        folder = folder_of(options)
        out, back, latency = measured_disk(folder)
        least, both = LEAST_TO_DISK, TOGETHER
        free = _free_on_disk(folder)
    else:
        folder = "host memory"
        out, back, both = (device.link, device.link, 1.0) if here is None else measured_rates(here)
        latency, least = device.launch, LEAST_TO_HOST
        free = None if here is None else free_memory()
    if free is not None and host is not None and host > free:
        raise OffloadError(f"host_gb={options.host_gb!r}: {folder} has {gb(free)} free; give at most {free / GB:.4g}")
    most = free if host is None else host
    # what lies there is rounded up to pages
    most = None if most is None else int(most / (1 + ALIGNMENT / least))
    return Link(out, back, both, latency, most, least)


def store_of(options: Options, where: torch.device) -> Store | None:
    """The place where a model's values go; None where they stay. Nothing is taken before the first step."""
    if options.offload is None:
        return None
    most = None if options.host_gb is None else round(options.host_gb * GB)
    return Disk(folder_of(options), most) if options.offload == "disk" else HostMemory(where, most)


@cache
def measured_disk(folder: str) -> tuple[float, float, float]:
    """Bytes per second to a folder's disk and back, and seconds that each transfer takes beside; the best of two."""
    frame = Disk(folder).open(SAMPLE + ALIGNMENT)
    large, small = (torch.zeros(n, dtype=torch.uint8, device="cpu") for n in (SAMPLE, ALIGNMENT))
    best: dict[tuple[int, str], float] = {}
    for number, x in ((0, large), (1, small)) * 2:
        start = time.perf_counter()
        frame.send(number, x, number * SAMPLE, x.nbytes)
        frame.settle(number)
        written = time.perf_counter()
        coming = frame.fetch(number)  # held until nothing writes into it, and freed by this thread
        frame.arrive(number)
        del coming
        for kind, seconds in (("out", written - start), ("back", time.perf_counter() - written)):
            best[number, kind] = min(seconds, best.get((number, kind), seconds))
    frame.close()
    latency = (best[1, "out"] + best[1, "back"]) / 2
    out, back = (SAMPLE / max(best[0, kind] - best[1, kind], 1e-6) for kind in ("out", "back"))
    return out, back, latency


def _free_on_disk(folder: str) -> int:
    seen = os.statvfs(folder)
    return seen.f_bavail * seen.f_frsize
