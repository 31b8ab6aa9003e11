"""Datasheets of devices: rates for a roofline (Williams et al., 2009), memory, and the parts that CUDA takes of it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from planner.errors import OptionError


@dataclass(frozen=True, slots=True)
class Device:
    """A device's datasheet.

    Attributes:
        name: as in `DEVICES`, or the name that the driver gives the card.
        type: "cpu" or "cuda".
        capability: CUDA's compute capability; (0, 0) on the CPU.
        bandwidth: bytes per second of its memory.
        flops: peak FLOPs per second of dense matrix work, by dtype.
        tf32: the same for fp32 where PyTorch may round to TF32.
        draws: random numbers per second.
        launch: seconds that every op takes at least.
        memory: bytes of its memory, as the driver reports them.
        link: bytes per second between host and device, each way.
        context: bytes that the CUDA context and the loaded kernels take; 0 on the CPU.
        blas: bytes of cuBLAS workspace that PyTorch holds from the first training step on; 0 on the CPU.
    """

    name: str
    type: str
    capability: tuple[int, int]
    bandwidth: float
    flops: Mapping[torch.dtype, float]
    tf32: float
    draws: float
    launch: float
    memory: int
    link: float
    context: int
    blas: int


def blas_workspace(capability: tuple[int, int], config: str = "") -> int:
    """Bytes of cuBLAS workspace held while training; `config` is the value of CUBLAS_WORKSPACE_CONFIG.

    `parseChosenWorkspaceSize` in ATen/cuda/CublasHandlePool.cpp: 32 MiB on Hopper and Blackwell, else 8 MiB and
    128 KiB, unless that says otherwise; cuBLASLt shares it. One for each thread that multiplies:
    the user's, and autograd's.
    """
    pairs = re.findall(r":(\d+):(\d+)", config)
    chosen = sum(int(kib) * int(count) for kib, count in pairs) if pairs else 32768 if capability >= (9, 0) else 8320
    return 2 * 1024 * chosen


def _cuda(
    name: str,
    capability: tuple[int, int],
    gib: float,
    bandwidth: float,
    half: float,
    tf32: float,
    single: float,
    double: float,
    link: float,
    bfloat: float | None = None,
) -> Device:
    """A card; rates in TFLOPs per second, bandwidth and link in GB (10**9 bytes) per second."""
    rates = {torch.float16: half, torch.bfloat16: bfloat or half, torch.float32: single, torch.float64: double}
    return Device(
        name=name,
        type="cuda",
        capability=capability,
        bandwidth=bandwidth * 1e9,
        flops={dtype: rate * 1e12 for dtype, rate in rates.items()},
        tf32=tf32 * 1e12,
        draws=1e12,
        launch=4e-6,
        memory=int(gib * 2**30),
        link=link * 1e9,
        # on no datasheet: about what nvidia-smi shows for a process that has trained a step
        context=(600 if capability >= (9, 0) else 450 if capability >= (8, 0) else 300) * 2**20,
        blas=blas_workspace(capability),
    )


def _cpu() -> Device:
    """A core or two of a server, and the machine's own memory; tensors on the host need no link."""
    rates = {torch.float16: 20e9, torch.bfloat16: 20e9, torch.float32: 40e9, torch.float64: 20e9}
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Device("cpu", "cpu", (0, 0), 10e9, rates, 40e9, 1e8, 2e-6, memory, 10e9, 0, 0)


# Vendors' datasheets: dense, with fp32 accumulation, SXM where there is one. Links are PCIe's x16 rates. Memory is what
# drivers report, which is less than the datasheet's. T4 has no tensor cores for bf16, and no TF32.
DEVICES: dict[str, Device] = {
    d.name: d
    for d in (
        _cpu(),
        _cuda("h200", (9, 0), 139.7, 4800, 989, 494, 67, 67, 64),
        _cuda("h100", (9, 0), 79.1, 3350, 989, 494, 67, 67, 64),
        _cuda("a100", (8, 0), 79.1, 2039, 312, 156, 19.5, 19.5, 32),
        _cuda("a100-80gb", (8, 0), 79.1, 2039, 312, 156, 19.5, 19.5, 32),
        _cuda("a100-40gb", (8, 0), 39.4, 1555, 312, 156, 19.5, 19.5, 32),
        _cuda("l40s", (8, 9), 44.4, 864, 362, 183, 91.6, 1.43, 32),
        _cuda("a10", (8, 6), 22.0, 600, 125, 62.5, 31.2, 0.98, 32),
        _cuda("t4", (7, 5), 14.7, 320, 65, 8.1, 8.1, 0.25, 16, bfloat=8.1),
        _cuda("rtx3090", (8, 6), 23.6, 936, 71, 35.6, 35.6, 0.56, 32),
        _cuda("rtx4090", (8, 9), 23.6, 1008, 165, 82.6, 82.6, 1.29, 32),
        _cuda("rtx5090", (12, 0), 31.3, 1792, 209, 104.8, 104.8, 1.64, 64),
    )
}


def find_device(device: str | torch.device | None, model_device: torch.device) -> Device:
    """The device to plan for: a known name, a torch device, or where the model is.

    Names are matched without case, maker and punctuation ("NVIDIA RTX 4090", "A100 40GB"). A CUDA card that is here is
    looked up by the name that the driver gives it, else by the nearest compute capability; its memory is its own. Where
    there is none, "cuda" is planned as an A100.

    Raises:
        OptionError: a name that is neither, or a card that is not there.
    """
    if isinstance(device, str) and (name := _profile(device)) is not None:
        return DEVICES[name]
    try:
        place = model_device if device is None else torch.device(device)
    except (RuntimeError, TypeError) as e:
        known = ", ".join(DEVICES)
        raise OptionError(f"device={device!r} is not known; give one of {known}, or a torch device") from e
    if place.type == "cuda":
        return _card(place)
    for profile in DEVICES.values():
        if profile.type == place.type:
            return profile
    raise OptionError(f"device={str(place)!r} is not supported; give one of {', '.join(DEVICES)}, or a torch device")


def _card(place: torch.device) -> Device:
    count = torch.cuda.device_count()
    if not count:
        return DEVICES["a100"]
    if place.index is not None and place.index >= count:
        raise OptionError(f"device={str(place)!r} is not there; PyTorch sees {count} CUDA devices, numbered from 0")
    properties = torch.cuda.get_device_properties(place)
    capability = (properties.major, properties.minor)
    cards = {name: d.capability for name, d in DEVICES.items() if d.type == "cuda"}
    name = _profile(properties.name) or min(cards, key=lambda n: _apart(cards[n], capability))
    return replace(
        DEVICES[name],
        name=properties.name,
        capability=capability,
        memory=properties.total_memory,
        blas=blas_workspace(capability, os.environ.get("CUBLAS_WORKSPACE_CONFIG", "")),
    )


def _apart(one: tuple[int, int], other: tuple[int, int]) -> int:
    return abs(10 * (one[0] - other[0]) + one[1] - other[1])


def _words(name: str) -> list[str]:
    makers = {"nvidia", "geforce", "tesla", "rtx"}
    return [word for word in re.findall(r"[a-z]+|\d+", name.lower()) if word not in makers]


def _profile(name: str) -> str | None:
    """The most exact of the `DEVICES` whose words stand in the name, in order, from its beginning."""
    given = _words(name)

    def fits(known: str) -> bool:
        rest = iter(given)
        return given[:1] == _words(known)[:1] and all(word in rest for word in _words(known))

    return max(filter(fits, DEVICES), key=lambda known: len(_words(known)), default=None)
