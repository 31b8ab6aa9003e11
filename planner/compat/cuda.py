"""What torch's CUDA build says of its libraries. Torch 2.11 to 2.15."""

from __future__ import annotations

import weakref
from typing import Any

import torch


def asked_blas_workspace(device: torch.device) -> int | None:
    """Bytes of a cuBLAS workspace on a CUDA device that is here (`cublas_workspace_size`, torch 2.13 to 2.15).

    None where torch does not say: before 2.13, or without a device.
    """
    size: Any = getattr(torch.backends.cuda, "cublas_workspace_size", None)
    if size is None or device.type != "cuda" or not torch.cuda.is_available():
        return None
    with torch.cuda.device(device):
        return int(size())


def clear_blas_workspaces(device: torch.device) -> None:
    """Have torch let go of the cuBLAS workspaces that it holds (`_cuda_clearCublasWorkspaces`, torch 2.11 to 2.15).

    The next products allocate them anew. Nothing on other devices than CUDA's.
    """
    if device.type == "cuda":
        torch._C._cuda_clearCublasWorkspaces()


def memory_share(module: Any, device: torch.device) -> float:
    """The share of a device's memory that this process may take (`get_per_process_memory_fraction`, CUDA's from 2.11
    to 2.15); all of it where torch does not say.
    """
    ask: Any = getattr(module, "get_per_process_memory_fraction", None)
    return 1.0 if ask is None else float(ask(device))


def allocator_settings() -> str:
    """What torch's allocator was told, in code too (`_accelerator_getAllocatorSettings`, torch 2.13 to 2.15).

    Empty where torch does not say: before 2.13, and in builds for the CPU.
    """
    told: Any = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    try:
        return "" if told is None else str(told())
    except RuntimeError:
        return ""


def pin(slab: torch.Tensor) -> None:
    """Lock a tensor's memory on the host, for as long as the tensor is there (`torch.cuda.cudart`, 2.11 to 2.15).

    torch's own allocator of pinned memory would round its size up to a power of two.

    Raises:
        RuntimeError: the system refuses.
    """
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    address = slab.data_ptr()
    torch.cuda.check_error(runtime.cudaHostRegister(address, slab.nbytes, 0))

    def unpin() -> None:
        torch.cuda.synchronize()
        runtime.cudaHostUnregister(address)

    weakref.finalize(slab, unpin).atexit = False
