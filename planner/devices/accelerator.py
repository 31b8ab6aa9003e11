"""What can be asked of a device that is here: its allocator's figures, its random state, its queue.

To add one, put an `Accelerator` into `ACCELERATORS` under the type of its torch device, and its rates and memory into
`planner.devices.specs.DEVICES`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch


class Accelerator(Protocol):
    """A kind of torch device with an allocator of its own; all figures are in bytes."""

    def synchronize(self, device: torch.device) -> None:
        """Wait until all that was queued has run."""

    def allocated(self, device: torch.device) -> int:
        """The bytes of all tensors that are there."""

    def peak(self, device: torch.device) -> int:
        """The most bytes of tensors at once since `reset_peak`."""

    def reset_peak(self, device: torch.device) -> None:
        """Begin to look for the peak anew."""

    def available(self, device: torch.device) -> int:
        """The bytes that nobody holds, with those that this process's allocator has cached."""

    def prepare(self, device: torch.device) -> None:
        """Have libraries allocate the workspaces that they keep."""

    def current(self, device: torch.device) -> AbstractContextManager[Any]:
        """Makes the device the current one, whose generator random ops draw from."""

    def random_state(self, device: torch.device) -> torch.Tensor:
        """The state of its random generator."""

    def set_random_state(self, device: torch.device, state: torch.Tensor) -> None:
        """Put that state back."""


class Cuda:
    """CUDA devices, by `torch.cuda`; ROCm's, too."""

    def synchronize(self, device: torch.device) -> None:
        """See `Accelerator`."""
        torch.cuda.synchronize(device)

    def allocated(self, device: torch.device) -> int:
        """See `Accelerator`."""
        return torch.cuda.memory_allocated(device)

    def peak(self, device: torch.device) -> int:
        """See `Accelerator`."""
        return torch.cuda.max_memory_allocated(device)

    def reset_peak(self, device: torch.device) -> None:
        """See `Accelerator`."""
        torch.cuda.reset_peak_memory_stats(device)

    def available(self, device: torch.device) -> int:
        """See `Accelerator`."""
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached

    def prepare(self, device: torch.device) -> None:
        """See `Accelerator`."""
        torch.cuda.current_blas_handle()  # type: ignore[no-untyped-call]

    def current(self, device: torch.device) -> AbstractContextManager[Any]:
        """See `Accelerator`."""
        return torch.cuda.device(device)

    def random_state(self, device: torch.device) -> torch.Tensor:
        """See `Accelerator`."""
        return torch.cuda.get_rng_state(device)

    def set_random_state(self, device: torch.device, state: torch.Tensor) -> None:
        """See `Accelerator`."""
        torch.cuda.set_rng_state(state, device)


ACCELERATORS: dict[str, Accelerator] = {"cuda": Cuda()}


def accelerator_of(device: torch.device) -> Accelerator | None:
    """The accelerator that a torch device is, or None: of the CPU, torch's profiler tells what it allocates."""
    return ACCELERATORS.get(device.type)
