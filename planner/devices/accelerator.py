"""What can be asked of a device that is here: its allocator's figures, its random state, its queue.

To add one, put an `Accelerator` into `ACCELERATORS` under the type of its torch device, and its rates and memory into
`planner.devices.specs.DEVICES`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch.nn import functional

from planner.compat.cuda import clear_blas_workspaces, memory_share
from planner.compat.dispatch import lasting_modes_off


class Accelerator(Protocol):
    """A kind of torch device with an allocator of its own; all figures are in bytes."""

    def count(self) -> int:
        """How many of them torch sees."""

    def properties(self, device: torch.device) -> tuple[str, tuple[int, int], int]:
        """Its driver's name for it, its compute capability ((0, 0) for none), and all of its memory."""

    def synchronize(self, device: torch.device) -> None:
        """Wait until all that was queued has run."""

    def capturing(self) -> bool:
        """Whether what the current stream is given is captured as a graph, and does not run yet."""

    def allocated(self, device: torch.device) -> int:
        """The bytes of all tensors that are there, as they were asked for."""

    def peak(self, device: torch.device) -> int | None:
        """The most bytes of tensors at once since `reset_peak`; None where the allocator does not keep them."""

    def reserved_peak(self, device: torch.device) -> int | None:
        """The most bytes that the allocator had of the device since `reset_peak`; None likewise."""

    def reset_peak(self, device: torch.device) -> None:
        """Begin to look for the peak anew."""

    def reserved(self, device: torch.device) -> int:
        """The bytes that the allocator has of the device now."""

    def limited(self, device: torch.device, nbytes: int) -> AbstractContextManager[Any]:
        """Meanwhile the allocator may have no more bytes of the device: it gives back what it caches, or is out of
        memory.
        """

    def available(self, device: torch.device) -> int:
        """The bytes that nobody holds, with those that this process's allocator has cached."""

    def empty_cache(self, device: torch.device) -> None:
        """Give back what the allocator has cached."""

    def prepare(self, device: torch.device) -> None:
        """Have libraries load their kernels and allocate the workspaces that they keep, in every thread of a step."""

    def workspaces(self, device: torch.device) -> int:
        """The bytes that libraries keep once they are prepared."""

    def current(self, device: torch.device) -> AbstractContextManager[Any]:
        """Makes the device the current one, whose generator random ops draw from."""

    def random_state(self, device: torch.device) -> torch.Tensor:
        """The state of its random generator."""

    def set_random_state(self, device: torch.device, state: torch.Tensor) -> None:
        """Put that state back."""

    def seconds(self, device: torch.device, run: Callable[[], object]) -> float:
        """The time that what a function queues takes on the device."""


class _Module:
    """A device by torch's module of its type, as `torch.cuda`: what these have in common."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    @property
    def module(self) -> Any:
        """The module; absent from some builds of torch."""
        return getattr(torch, self.kind)

    def count(self) -> int:
        """See `Accelerator`."""
        return int(self.module.device_count())

    def synchronize(self, device: torch.device) -> None:
        """See `Accelerator`."""
        self.module.synchronize(device)

    def capturing(self) -> bool:
        """See `Accelerator`."""
        asked = getattr(self.module, "is_current_stream_capturing", None)
        return asked is not None and bool(asked())

    def current(self, device: torch.device) -> AbstractContextManager[Any]:
        """See `Accelerator`."""
        found: AbstractContextManager[Any] = self.module.device(device)
        return found

    def empty_cache(self, device: torch.device) -> None:
        """See `Accelerator`."""
        with self.current(device):
            self.module.empty_cache()

    def random_state(self, device: torch.device) -> torch.Tensor:
        """See `Accelerator`."""
        state: torch.Tensor = self.module.get_rng_state(device)
        return state

    def set_random_state(self, device: torch.device, state: torch.Tensor) -> None:
        """See `Accelerator`."""
        self.module.set_rng_state(state, device)

    def prepare(self, device: torch.device) -> None:
        """See `Accelerator`: products in this thread and in autograd's, a convolution, attention."""

        def with_bias(x: torch.Tensor) -> None:
            torch.addmm(x.detach()[0, 0, 0], *[x.detach()[0, 0]] * 2)

        with self.current(device), lasting_modes_off(), torch.inference_mode(False), torch.enable_grad():
            for dtype in (torch.float32, torch.float16):
                with torch.autocast(device.type, enabled=False):
                    x = torch.ones(1, 8, 16, 16, device=device, dtype=dtype, requires_grad=True)
                    with_bias(x)
                    x.register_hook(with_bias)  # type: ignore[no-untyped-call]
                    convolved = functional.conv2d(x, x.detach().permute(1, 0, 2, 3).expand(8, 8, 16, 16))
                    attended = functional.scaled_dot_product_attention(x, x, x)
                    (convolved.sum() + (attended.flatten(0, 2) @ x[0, 0]).sum()).backward()  # type: ignore[no-untyped-call]
        self.synchronize(device)

    def seconds(self, device: torch.device, run: Callable[[], object]) -> float:
        """See `Accelerator`."""
        begin, end = self.module.Event(enable_timing=True), self.module.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3


class Caching(_Module):
    """CUDA devices by `torch.cuda`, ROCm's, too; Intel's by `torch.xpu`: both have PyTorch's caching allocator."""

    def properties(self, device: torch.device) -> tuple[str, tuple[int, int], int]:
        """See `Accelerator`."""
        found = self.module.get_device_properties(device)
        capability = (getattr(found, "major", 0), getattr(found, "minor", 0))
        return found.name, capability, found.total_memory

    def _stat(self, device: torch.device, when: str) -> int:
        """Bytes as they were asked for; as they were handed out, where the allocator (cudaMallocAsync) has no other."""
        stats = self.module.memory_stats(device)
        return int(stats.get(f"requested_bytes.all.{when}") or stats.get(f"allocated_bytes.all.{when}", 0))

    def allocated(self, device: torch.device) -> int:
        """See `Accelerator`."""
        return self._stat(device, "current")

    def peak(self, device: torch.device) -> int | None:
        """See `Accelerator`."""
        return self._stat(device, "peak")

    def reserved_peak(self, device: torch.device) -> int | None:
        """See `Accelerator`."""
        return int(self.module.max_memory_reserved(device))

    def reset_peak(self, device: torch.device) -> None:
        """See `Accelerator`."""
        self.module.reset_peak_memory_stats(device)

    def reserved(self, device: torch.device) -> int:
        """See `Accelerator`."""
        return int(self.module.memory_reserved(device))

    @contextmanager
    def limited(self, device: torch.device, nbytes: int) -> Iterator[None]:
        """See `Accelerator`."""
        before = memory_share(self.module, device)
        total = self.properties(device)[2]
        self.module.set_per_process_memory_fraction(min(before, nbytes / total), device)
        try:
            yield
        finally:
            self.module.set_per_process_memory_fraction(before, device)

    def available(self, device: torch.device) -> int:
        """See `Accelerator`."""
        cached = self.module.memory_reserved(device) - self.module.memory_allocated(device)
        return int(self.module.mem_get_info(device)[0]) + int(cached)

    def workspaces(self, device: torch.device) -> int:
        """See `Accelerator`: what stays of what `prepare` makes, after earlier ones are gone."""
        self.synchronize(device)
        clear_blas_workspaces(device)
        before = self.allocated(device)
        self.prepare(device)
        return max(0, self.allocated(device) - before)


class Mps(_Module):
    """Apple's GPU by `torch.mps`, whose allocator keeps no peaks."""

    def properties(self, device: torch.device) -> tuple[str, tuple[int, int], int]:
        """See `Accelerator`: the memory that Metal recommends to take at most."""
        name = getattr(self.module, "get_name", lambda: "Apple GPU")()
        return str(name), (0, 0), int(self.module.recommended_max_memory())

    def synchronize(self, device: torch.device) -> None:
        """See `Accelerator`."""
        self.module.synchronize()

    def capturing(self) -> bool:
        """See `Accelerator`: Metal has no such graphs."""
        return False

    def current(self, device: torch.device) -> AbstractContextManager[Any]:
        """See `Accelerator`: there is one."""
        return nullcontext()

    def empty_cache(self, device: torch.device) -> None:
        """See `Accelerator`."""
        self.module.empty_cache()

    def allocated(self, device: torch.device) -> int:
        """See `Accelerator`."""
        return int(self.module.current_allocated_memory())

    def peak(self, device: torch.device) -> int | None:
        """See `Accelerator`."""
        return None

    def reserved_peak(self, device: torch.device) -> int | None:
        """See `Accelerator`."""
        return None

    def reset_peak(self, device: torch.device) -> None:
        """See `Accelerator`."""

    def reserved(self, device: torch.device) -> int:
        """See `Accelerator`."""
        return int(self.module.driver_allocated_memory())

    def limited(self, device: torch.device, nbytes: int) -> AbstractContextManager[Any]:
        """See `Accelerator`: without a peak to see, there is nothing to limit it for."""
        return nullcontext()

    def available(self, device: torch.device) -> int:
        """See `Accelerator`."""
        return int(self.module.recommended_max_memory() - self.module.current_allocated_memory())

    def workspaces(self, device: torch.device) -> int:
        """See `Accelerator`: Metal's own are outside of PyTorch's allocator."""
        return 0

    def random_state(self, device: torch.device) -> torch.Tensor:
        """See `Accelerator`."""
        state: torch.Tensor = self.module.get_rng_state()
        return state

    def set_random_state(self, device: torch.device, state: torch.Tensor) -> None:
        """See `Accelerator`."""
        self.module.set_rng_state(state)


ACCELERATORS: dict[str, Accelerator] = {"cuda": Caching("cuda"), "xpu": Caching("xpu"), "mps": Mps("mps")}


def accelerator_of(device: torch.device) -> Accelerator | None:
    """The accelerator that a torch device is, or None: of the CPU, torch's profiler tells what it allocates."""
    return ACCELERATORS.get(device.type)


def present(device: torch.device) -> Accelerator | None:
    """The accelerator that a torch device is, where there is one to run on: fake tensors need none."""
    accelerator = accelerator_of(device)
    return accelerator if accelerator is not None and accelerator.count() else None


@contextmanager
def random_state_kept(device: torch.device) -> Iterator[None]:
    """Leaves the random generators of the host and of a device as they were."""
    accelerator = present(device)
    before = None if accelerator is None else accelerator.random_state(device)
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        if accelerator is not None and before is not None:
            accelerator.set_random_state(device, before)
