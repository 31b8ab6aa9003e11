"""A step by generated wrappers, run on fake tensors: the kernels that it calls, and every storage that it makes.

No kernel is compiled or run. Buffers that Inductor reuses, frees early or hands from the forward to the backward pass
are those of the real run, as the code is the same.
"""

from __future__ import annotations

import inspect
import re
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from planner.compat import pytree
from planner.compat.fake import FakeTensorMode
from planner.compat.inductor import WRAPPER, Generated, load
from planner.compat.ops import OpOverload, schema_of
from planner.compat.tensors import TorchDispatchMode, storage_key
from planner.core.call import Call, describe_call

_ALLOCATES = {torch.ops.aten.empty_strided.default, torch.ops.aten.empty.memory_format}
_NAMED = re.compile(r"\b[A-Za-z_]\w*\b")


@dataclass(slots=True)
class Launch:
    """One call of a kernel, or of an op that is no kernel of Inductor's own.

    Attributes:
        name: of the kernel or the op.
        backward: whether the wrapper of the backward pass calls it.
        reads: storages of its arguments.
        nbytes: of the tensors that it is given and returns.
        made: names of the buffers that the wrapper mentions here first, in the order of the line.
        writes: storages that were made for it since the last launch.
        held: bytes made and not freed, at most, since the first was made for it, this launch included.
        call: of an op, as data; None for a kernel.
    """

    name: str
    backward: bool
    reads: tuple[int, ...]
    nbytes: int
    made: tuple[str, ...]
    writes: list[int] = field(default_factory=list)
    held: int = 0
    call: Call | None = None


@dataclass
class DryRun:
    """What a step by generated wrappers does.

    Attributes:
        launches: in order, forward pass first.
        boundary: how many of them the forward pass has.
        sizes: bytes of each storage; 0 for those that the caller holds anyway.
        freed: for each storage, the launch after which it is freed; None where something holds it to the end.
        inputs: for each input of the forward graph, its storage.
        results: for each result of the forward graph, its storage; None for what is no tensor.
        tangents: for each gradient that comes in, its storage.
        gradients: for each result of the backward graph, as for `results`.
        forward_peak, backward_peak: the most bytes made and not freed in each pass, without workspaces.
    """

    launches: list[Launch]
    boundary: int
    sizes: list[int]
    freed: list[int | None]
    inputs: list[int | None]
    results: list[int | None]
    tangents: list[int | None]
    gradients: list[int | None]
    forward_peak: int = 0
    backward_peak: int = 0


def dry_run(
    mode: FakeTensorMode,
    forward: Generated,
    backward: Generated,
    inputs: Sequence[Any],
    tangents: Sequence[Any],
    results: int,
) -> DryRun:
    """Run both wrappers of a step on fake tensors.

    Args:
        mode: of the fake tensors.
        forward: the wrapper of the forward pass.
        backward: that of the backward pass.
        inputs: of the forward pass; the caller holds them.
        tangents: gradients that come into the backward pass.
        results: how many of the forward graph's results are not there for the backward pass alone.
    """
    recorder = _Recorder(mode)
    with torch.no_grad(), mode, recorder:
        given = [recorder.given(x) for x in inputs]
        out = list(recorder.run(forward, list(inputs), backward=False))
        found = [recorder.storage(t) for t in out[:results]]
        saved = sorted(out[results:], key=lambda x: isinstance(x, torch.Tensor))  # AOTAutograd hands on sizes first
        del out
        boundary = recorder.pass_ends()
        coming = [_fresh(t) for t in tangents]
        arriving = [recorder.arrives(t) for t in coming]
        arguments = [*saved, *coming]
        del saved, coming
        gradients = recorder.run(backward, arguments, backward=True)
        made = [recorder.storage(t) for t in gradients]
        recorder.pass_ends()
    recorder.finished()
    return DryRun(
        recorder.launches, boundary, recorder.sizes, recorder.freed, given, found, arriving, made, *recorder.peaks
    )


def _fresh(t: Any) -> Any:
    return (
        torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) if isinstance(t, torch.Tensor) else t
    )


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every op and kernel of the wrappers, and when storages come and go."""

    # an op under a random state, where Inductor's own partition runs one again that draws (`torch._prims.rng_prims`)
    supports_higher_order_operators = True

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.mode = mode
        self.launches: list[Launch] = []
        self.sizes: list[int] = []
        self.freed: list[int | None] = []
        self.backward = False
        self._number: dict[int, int] = {}  # storages alive -> their number
        self._finalizers: list[Any] = []
        self._live = self._most = 0
        self.peaks = [0, 0]
        self._new: list[int] = []  # storages made since the last launch
        self._lines: list[str] = []
        self._seen: set[str] = set()

    def given(self, x: Any) -> int | None:
        """A tensor that the caller holds: not counted."""
        if not isinstance(x, torch.Tensor):
            return None
        key = storage_key(x)
        if key not in self._number:
            self._number[key] = self._add(0)
        return self._number[key]

    def arrives(self, t: Any) -> int | None:
        """A gradient that comes in."""
        if not isinstance(t, torch.Tensor):
            return None
        number = self.storage(t)
        self._new.clear()
        return number

    def storage(self, t: Any) -> int | None:
        """The number of a tensor's storage."""
        if not isinstance(t, torch.Tensor):
            return None
        key = storage_key(t)
        return self._number[key] if key in self._number else self._make(t)

    def run(self, generated: Generated, arguments: list[Any], *, backward: bool) -> Sequence[Any]:
        self.backward = backward
        self._lines = generated.source.splitlines()
        self._seen = set()
        namespace = load(generated, self._kernel, self._allocate)
        runner = namespace.get("runner")
        call = runner.call if runner is not None else namespace["call"]
        results: Sequence[Any] = call(arguments)
        return results

    def pass_ends(self) -> int:
        """What was made since the last launch belongs to that; returns how many launches there were."""
        if self.launches and self._new:
            self.launches[-1].writes += self._new
            self.launches[-1].held = max(self.launches[-1].held, self._most)
        self._new, self._most = [], self._live
        return len(self.launches)

    def finished(self) -> None:
        """What is freed from here on is not seen."""
        for f in self._finalizers:
            f.detach()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with self.mode:
            result = func(*args, **kwargs)
        if func in _ALLOCATES:
            return result
        made = [t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
        fresh = [t for t in made if storage_key(t) not in self._number]
        if not isinstance(func, OpOverload):
            at = next(i for i, x in enumerate(args) if isinstance(x, OpOverload))
            func, args, result = args[at], args[at + 1 :], result if at else result[1]  # the first one gives the state
        if fresh or schema_of(func).is_mutable:
            for t in fresh:
                self.storage(t)
            self._launch(str(func), (args, kwargs, result), describe_call(func, args, kwargs, result))
        return result

    def _allocate(self, device: str, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        t = torch.empty_strided(size, stride, dtype=dtype, device=device)
        self._make(t)
        return t

    def _kernel(self, name: str) -> Callable[..., None]:
        def call(*args: Any, **kwargs: Any) -> None:
            self._launch(name, (args, kwargs), None)

        call.run = call  # type: ignore[attr-defined]  # how kernels of Triton are called
        return call

    def _launch(self, name: str, tree: Any, call: Call | None) -> None:
        tensors = [t for t in pytree.tree_leaves(tree) if isinstance(t, torch.Tensor)]
        reads = tuple(dict.fromkeys(self._number[storage_key(t)] for t in tensors))
        nbytes = sum(t.numel() * t.element_size() for t in {id(t): t for t in tensors}.values())
        launch = Launch(name, self.backward, reads, nbytes, self._mentioned(), self._new, self._most, call)
        self.launches.append(launch)
        self._new = []
        self.peaks[self.backward] = max(self.peaks[self.backward], self._most)
        self._most = self._live

    def _mentioned(self) -> tuple[str, ...]:
        """Names that the line of the wrapper which runs now has, and no line of a launch had before."""
        frame = inspect.currentframe()
        while frame is not None and frame.f_code.co_filename != WRAPPER:
            frame = frame.f_back
        if frame is None:
            return ()
        names = [n for n in _NAMED.findall(self._lines[frame.f_lineno - 1]) if n not in self._seen]
        self._seen.update(names)
        return tuple(dict.fromkeys(names))

    def _add(self, size: int) -> int:
        self.sizes.append(size)
        self.freed.append(None)
        return len(self.sizes) - 1

    def _make(self, t: torch.Tensor) -> int:
        key, storage = storage_key(t), t.untyped_storage()
        self._number[key] = number = self._add(storage.nbytes())
        self._new.append(number)
        self._live += storage.nbytes()
        self._most = max(self._most, self._live)
        self._finalizers.append(weakref.finalize(storage, self._free, key, number))
        return number

    def _free(self, key: int, number: int) -> None:
        del self._number[key]
        self._live -= self.sizes[number]
        if not self._new:  # what was held until now was held while the last launch ran, and counts there
            self._most = self._live
        self.freed[number] = len(self.launches) - 1
