"""Datasheets of devices: rates for a roofline (Williams et al., 2009), memory, and the parts that CUDA takes of it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from planner.compat.versions import release


@dataclass(frozen=True, slots=True)
class Device:
    """A device's datasheet.

    Attributes:
        name: as in `DEVICES`, or the name that the driver gives the card.
        type: of the torch device: "cpu", "cuda" (ROCm's, too), "xpu" or "mps".
        capability: CUDA's compute capability, on ROCm the gfx number's; (0, 0) elsewhere.
        bandwidth: bytes per second of its memory.
        flops: peak FLOPs per second of dense matrix work, by dtype.
        tf32: the same for fp32 where PyTorch may round to TF32.
        draws: random numbers per second.
        launch: seconds that every op takes at least.
        memory: bytes of its memory, as the driver reports them.
        link: bytes per second between host and device, each way.
        context: bytes that the context and the loaded kernels take outside the allocator; 0 on the CPU.
        blas: bytes of cuBLAS workspace that PyTorch holds from the first training step on; 0 on the CPU, and where
            each product brings its own.
        product: bytes of cuBLAS workspace that each product allocates while it runs; 0 where PyTorch holds them.
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
    product: int = 0

    @property
    def caches(self) -> bool:
        """Whether PyTorch's caching allocator hands out its memory, in multiples of 512 bytes."""
        return self.type in ("cuda", "xpu")


def blas_workspace(capability: tuple[int, int], config: str = "", *, rocm: bool = False) -> int:
    """Bytes of one cuBLAS workspace; `config` is the value of CUBLAS_WORKSPACE_CONFIG.

    `parseChosenWorkspaceSize` in ATen/cuda/CublasHandlePool.cpp: 32 MiB on Hopper and Blackwell, else 8 MiB and
    128 KiB, unless that says otherwise; on ROCm 128 MiB for gfx94 and gfx95, else 32 MiB. For a card that is here,
    torch is asked instead (`planner.devices.find`).
    """
    pairs = re.findall(r":(\d+):(\d+)", config)
    if pairs:
        return 1024 * sum(int(kib) * int(count) for kib, count in pairs)
    if rocm:
        return (128 if capability in ((9, 4), (9, 5)) else 32) * 2**20
    return 1024 * (32768 if capability >= (9, 0) else 8320)


def blas_workspaces_stay(version: str = torch.__version__, cached: str | None = None, *, rocm: bool = False) -> bool:
    """Whether PyTorch holds a cuBLAS workspace for each thread that multiplies: the user's, and autograd's.

    From 2.15 on, each product allocates one and frees it, unless TORCH_CUBLAS_WORKSPACE_CACHE is 1
    (`isCUDABlasWorkspaceCachingEnabled` in ATen/cuda/CublasHandlePool.cpp); on ROCm they stay.
    """
    cached = os.environ.get("TORCH_CUBLAS_WORKSPACE_CACHE") if cached is None else cached
    return rocm or release(version) < (2, 15) or cached == "1"


def lt_workspace(version: str = torch.__version__, unified: str | None = None, *, rocm: bool = False) -> int:
    """Bytes of a cuBLASLt workspace beside cuBLAS's, which products with a bias take: one for each thread, too.

    Before torch 2.13, 1 MiB or CUBLASLT_WORKSPACE_SIZE KiB, unless TORCH_CUBLASLT_UNIFIED_WORKSPACE is 1; later
    cuBLAS's serves for both (`getCUDABlasLtWorkspaceSize` in ATen/cuda/CublasHandlePool.cpp).
    """
    unified = os.environ.get("TORCH_CUBLASLT_UNIFIED_WORKSPACE") if unified is None else unified
    if rocm or release(version) >= (2, 13) or unified == "1":
        return 0
    asked = os.environ.get("CUBLASLT_WORKSPACE_SIZE", "")
    return 1024 * (int(asked) if asked.isdecimal() else 1024)


def held_and_brought(workspace: int, *, rocm: bool = False) -> tuple[int, int]:
    """`Device.blas` and `Device.product` of a device with such a cuBLAS workspace."""
    stays = blas_workspaces_stay(rocm=rocm)
    return (2 * (workspace + lt_workspace(rocm=rocm)), 0) if stays else (0, workspace)


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
    *,
    rocm: bool = False,
) -> Device:
    """A card; rates in TFLOPs per second, bandwidth and link in GB (10**9 bytes) per second."""
    rates = {torch.float16: half, torch.bfloat16: bfloat or half, torch.float32: single, torch.float64: double}
    held, brought = held_and_brought(blas_workspace(capability, rocm=rocm), rocm=rocm)
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
        context=(800 if capability >= (9, 0) else 450 if capability >= (8, 0) else 300) * 2**20,
        blas=held,
        product=brought,
    )


def free_memory() -> int:
    """Bytes of memory that programs may take without swapping, as Linux estimates them; else all that is unused."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def _cpu() -> Device:
    """A core or two of a server, and the machine's own memory; tensors on the host need no link."""
    rates = {torch.float16: 20e9, torch.bfloat16: 20e9, torch.float32: 40e9, torch.float64: 20e9}
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Device("cpu", "cpu", (0, 0), 10e9, rates, 40e9, 1e8, 2e-6, memory, 10e9, 0, 0)


def _other(name: str, kind: str, gib: float, bandwidth: float, half: float, single: float, double: float) -> Device:
    """A device that is neither the CPU nor a CUDA card; units as for `_cuda`."""
    rates = {torch.float16: half, torch.bfloat16: half, torch.float32: single, torch.float64: double}
    flops = {dtype: rate * 1e12 for dtype, rate in rates.items()}
    memory, context = int(gib * 2**30), 300 * 2**20
    return Device(name, kind, (0, 0), bandwidth * 1e9, flops, single * 1e12, 1e11, 8e-6, memory, 32e9, context, 0)


# Dense rates with fp32 accumulation, from public data sheets, which give those with 2:4 sparsity, too. Links are the
# PCIe slot's rates. Memory is what drivers report, which is less than on the data sheet. Without tensor cores for bf16
# or TF32 (T4, V100), these run as fp32 does. By family, the sources:
# - H200, H100 (SXM, PCIe, NVL), A100 (SXM, PCIe), L40S, L4, A10, T4, V100: NVIDIA's data sheet of that name.
# - B200: NVIDIA Blackwell Architecture Technical Brief, HGX B200. A10G: NVIDIA A10G data sheet for AWS (2022).
# - RTX A6000: NVIDIA Ampere GA102 GPU Architecture whitepaper, appendix; RTX 3080, 3090: the same, GeForce tables.
# - RTX 4080, 4090: NVIDIA Ada GPU Architecture whitepaper, appendix; RTX 5090: RTX Blackwell whitepaper.
# - MI300X: AMD Instinct MI300X data sheet; its fp32 and fp64 are the matrix cores'.
# - max1100: Intel Data Center GPU Max 1100 product brief. m2-max: as published by Apple; fp64 is emulated.
DEVICES: dict[str, Device] = {
    d.name: d
    for d in (
        _cpu(),
        _cuda("b200", (10, 0), 178.3, 8000, 2250, 1100, 80, 40, 64),
        _cuda("h200", (9, 0), 139.7, 4800, 989, 494, 67, 67, 64),
        _cuda("h100", (9, 0), 79.1, 3350, 989, 494, 67, 67, 64),
        _cuda("h100-pcie", (9, 0), 79.1, 2000, 756, 378, 51, 51, 64),
        _cuda("h100-nvl", (9, 0), 93.1, 3900, 835, 417, 60, 60, 64),
        _cuda("a100", (8, 0), 79.1, 2039, 312, 156, 19.5, 19.5, 32),
        _cuda("a100-80gb", (8, 0), 79.1, 2039, 312, 156, 19.5, 19.5, 32),
        _cuda("a100-80gb-pcie", (8, 0), 79.1, 1935, 312, 156, 19.5, 19.5, 32),
        _cuda("a100-40gb", (8, 0), 39.4, 1555, 312, 156, 19.5, 19.5, 32),
        _cuda("l40s", (8, 9), 44.4, 864, 362, 183, 91.6, 1.43, 32),
        _cuda("l4", (8, 9), 22.0, 300, 121, 60, 30.3, 0.47, 32),
        _cuda("a10", (8, 6), 22.0, 600, 125, 62.5, 31.2, 0.98, 32),
        _cuda("a10g", (8, 6), 22.0, 600, 70, 35, 35, 0.55, 32),
        _cuda("a6000", (8, 6), 47.4, 768, 154.8, 77.4, 38.7, 0.6, 32),
        _cuda("v100", (7, 0), 31.7, 900, 125, 15.7, 15.7, 7.8, 16, bfloat=15.7),
        _cuda("v100-16gb", (7, 0), 15.7, 900, 125, 15.7, 15.7, 7.8, 16, bfloat=15.7),
        _cuda("v100-pcie", (7, 0), 31.7, 900, 112, 14, 14, 7, 16, bfloat=14),
        _cuda("t4", (7, 5), 14.7, 320, 65, 8.1, 8.1, 0.25, 16, bfloat=8.1),
        _cuda("rtx3080", (8, 6), 9.6, 760, 59.5, 29.8, 29.8, 0.46, 32),
        _cuda("rtx3090", (8, 6), 23.6, 936, 71, 35.6, 35.6, 0.56, 32),
        _cuda("rtx4080", (8, 9), 15.6, 716, 97.5, 48.7, 48.7, 0.76, 32),
        _cuda("rtx4090", (8, 9), 23.6, 1008, 165, 82.6, 82.6, 1.29, 32),
        _cuda("rtx5090", (12, 0), 31.3, 1792, 209, 104.8, 104.8, 1.64, 64),
        _cuda("mi300x", (9, 4), 191.9, 5300, 1307, 653, 163.4, 163.4, 64, rocm=True),
        _other("max1100", "xpu", 48, 1228, 352, 22.2, 22.2),
        _other("m2-max", "mps", 64, 400, 13.6, 13.6, 0.2),
    )
}

# What drivers call them (`torch.cuda.get_device_name`), as patterns for the whole of a name without maker and
# punctuation (`driver_words`). A name that fits none (a laptop's, a Ti, a slice of a card) is of another card.
DRIVERS: dict[str, str] = {
    "b200": "b200",
    "h200": "h200(sxm5?)?(141gb)?(hbm3e)?",
    "h100": "h100(sxm5?)?(80gb)?(hbm3)?",
    "h100-pcie": "h100(80gb)?(hbm2e)?pcie(80gb)?",
    "h100-nvl": "h100(94gb)?nvl",
    "a100-80gb": "a100(sxm4?)?80gb",
    "a100-80gb-pcie": "a100(80gbpcie|pcie80gb)",
    "a100-40gb": "a100((sxm4?|pcie|pg509)40gb|40gb(pcie)?)",
    "l40s": "l40s",
    "l4": "l4",
    "a10": "a10(pcie)?",
    "a10g": "a10g",
    "a6000": "(rtx)?a6000",
    "v100": "v100(sxm[23]?)?32gb",
    "v100-16gb": "v100(sxm2?)?16gb",
    "v100-pcie": "v100pcie(16gb|32gb)",
    "t4": "t4",
    "rtx3080": "(rtx)?3080",
    "rtx3090": "(rtx)?3090",
    "rtx4080": "(rtx)?4080",
    "rtx4090": "(rtx)?4090",
    "rtx5090": "(rtx)?5090",
    "mi300x": "mi300x(oam)?(192gb)?(hbm3)?",
    "max1100": "(intelr?)?datacentergpumax1100",
    "m2-max": "(apple)?m2max",
}


def profile_of(name: str) -> str | None:
    """The one of the `DEVICES` that a name means: its own, or a driver's, without case, maker and punctuation.

    Examples:
        >>> profile_of("NVIDIA H100 80GB HBM3"), profile_of("NVIDIA H100 PCIe"), profile_of("A100 40GB")
        ('h100', 'h100-pcie', 'a100-40gb')
        >>> profile_of("NVIDIA GeForce RTX 4080 Laptop GPU") is None  # another card
        True
    """
    words = driver_words(name)
    own = {driver_words(known): known for known in DEVICES}
    return own.get(words) or next((known for known, names in DRIVERS.items() if re.fullmatch(names, words)), None)


def driver_words(name: str) -> str:
    """A card's name in lower case, without maker, brand and punctuation: "h10080gbhbm3"."""
    words = re.findall(r"[a-z0-9]+", name.lower())
    return "".join(word for word in words if word not in ("nvidia", "geforce", "tesla", "quadro", "amd", "instinct"))
