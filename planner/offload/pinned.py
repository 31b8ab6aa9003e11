"""Room in host memory: pinned slabs of planned size, and a stream for each direction.

Memory on the device is taken and given back on the stream that computes, in the order of the program: a value leaves
after that stream has waited for its copy out, and a copy back begins after all that the stream was given before. So the
allocator need not be told of the other streams (`record_stream`), and hands out memory as without them.
"""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Any

import torch

from planner.compat.cuda import pin
from planner.errors import OffloadError, gb
from planner.offload.layout import rounded
from planner.offload.store import Frame, Wait

SAMPLE = 2**26  # bytes that are copied to know a link's rates


class HostMemory:
    """A store in host memory, for a model on a GPU; for one on the CPU that is planned for a GPU, plain copies.

    Args:
        device: where the model is.
        most: bytes that all frames together may take; None for no limit.
    """

    def __init__(self, device: torch.device, most: int | None = None) -> None:
        self.device, self.most = device, most
        self._taken = 0
        self._unused: dict[int, deque[torch.Tensor]] = defaultdict(deque)  # slabs, by size; closed extents return here
        self._streams: tuple[Any, Any] | None = None

    def open(self, nbytes: int) -> Frame:
        """A frame of so many bytes. Raises OffloadError where there is no room for it."""
        nbytes = rounded(nbytes)
        unused = self._unused[nbytes]
        slab = unused.popleft() if unused else self._take(nbytes)
        if self.device.type == "cpu":
            return Frame(_Plain(slab, unused))
        gpu = torch.get_device_module(self.device)
        if self._streams is None:
            self._streams = gpu.Stream(self.device), gpu.Stream(self.device)
        return Frame(_Pinned(gpu, slab, self._streams, unused))

    def _take(self, nbytes: int) -> torch.Tensor:
        if self.most is not None and self._taken + nbytes > self.most:
            raise OffloadError(
                f"offload to host memory: {gb(self._taken + nbytes)} are needed there at once, and host_gb= allows "
                f"{gb(self.most)}: several forward passes wait for their backward pass, or calls of several shapes "
                "take room each. Give more host_gb, or run each backward pass before the next forward pass"
            )
        try:
            slab = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
            if self.device.type != "cpu":
                # torch's allocator of pinned memory would round up to a power of two
                pin(slab)
        except RuntimeError as e:
            raise OffloadError(
                f"offload to host memory: {gb(nbytes)} cannot be taken and pinned ({e}): give less host_gb, raise the "
                "limit of locked memory (ulimit -l), or plan without offload="
            ) from e
        self._taken += nbytes
        return slab


class _Pinned:
    """An extent that a card copies to and from, beside what it computes."""

    def __init__(self, gpu: Any, slab: torch.Tensor, streams: tuple[Any, Any], unused: deque[torch.Tensor]) -> None:
        self._gpu, self._slab, (self._out, self._back) = gpu, slab, streams
        self._unused = unused
        self._coming: dict[Any, torch.Tensor] = {}  # by the event of their copy's end; held until nothing writes there
        self._out.wait_stream(self._back)  # which may read yet what a step that failed left in this slab

    def out(self, x: torch.Tensor, at: int) -> Wait:
        event = self._copy(self._out, self._slab[at : at + x.nbytes].view(x.dtype), x)

        def wait() -> None:
            self._gpu.current_stream(x.device).wait_event(event)

        return _Once(wait)

    def back(self, x: torch.Tensor, at: int) -> Wait:
        event = self._copy(self._back, x, self._slab[at : at + x.nbytes].view(x.dtype))
        self._coming[event] = x

        def wait() -> None:
            self._gpu.current_stream(x.device).wait_event(event)
            del self._coming[event]

        return _Once(wait)

    def _copy(self, stream: Any, to: torch.Tensor, source: torch.Tensor) -> Any:
        """Begin a copy after all that the computing stream, as it is now, was given. Returns the event of its end."""
        device = to.device if to.device.type != "cpu" else source.device
        stream.wait_stream(self._gpu.current_stream(device))
        with self._gpu.stream(stream):
            to.copy_(source, non_blocking=True)
        return stream.record_event()

    def close(self) -> None:
        for event in self._coming:  # of a step that failed: the memory is given to others next
            event.synchronize()
        self._coming.clear()
        self._unused.append(self._slab)


class _Once:
    """A wait that is done once, and then holds nothing."""

    def __init__(self, wait: Wait) -> None:
        self._wait: Wait | None = wait

    def __call__(self) -> None:
        if self._wait is not None:
            self._wait()
            self._wait = None


class _Plain:
    """An extent that the host itself copies to and from."""

    def __init__(self, slab: torch.Tensor, unused: deque[torch.Tensor]) -> None:
        self._slab, self._unused = slab, unused

    def out(self, x: torch.Tensor, at: int) -> Wait:
        self._slab[at : at + x.nbytes].view(x.dtype).copy_(x)
        return _done

    def back(self, x: torch.Tensor, at: int) -> Wait:
        x.copy_(self._slab[at : at + x.nbytes].view(x.dtype))
        return _done

    def close(self) -> None:
        self._unused.append(self._slab)


def _done() -> None:
    """Nothing is left to wait for."""


def measured_rates(device: torch.device) -> tuple[float, float, float]:
    """Bytes per second to the host and back, and the share of them that is left while both directions copy."""
    gpu = torch.get_device_module(device)
    there = [torch.empty(SAMPLE, dtype=torch.uint8, device=device) for _ in range(2)]
    here = [torch.empty(SAMPLE, dtype=torch.uint8, device="cpu", pin_memory=True) for _ in range(2)]
    streams = gpu.Stream(device), gpu.Stream(device)

    def seconds(*directions: int) -> float:
        """Of four copies in each of these directions; the second time, when all is warm."""
        for _ in range(2):
            gpu.synchronize(device)
            first, last = (gpu.Event(enable_timing=True) for _ in range(2))
            first.record()
            for d in directions:
                streams[d].wait_event(first)
                with gpu.stream(streams[d]):
                    for _ in range(4):
                        (here[d] if d == 0 else there[d]).copy_(there[d] if d == 0 else here[d], non_blocking=True)
                gpu.current_stream(device).wait_stream(streams[d])
            last.record()
            gpu.synchronize(device)
        return float(first.elapsed_time(last)) / 1e3

    out, back, both = 4 * SAMPLE / seconds(0), 4 * SAMPLE / seconds(1), 4 * SAMPLE / seconds(0, 1)
    return out, back, min(1.0, max(0.5, both / min(out, back)))
