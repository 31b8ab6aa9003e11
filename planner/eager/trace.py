"""One training step on fake tensors, op by op: what runs, what it makes and frees, and which module asked for it."""

from __future__ import annotations

import sys
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from linecache import getline
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import SAC_IGNORED_OPS

from ..capture.call import TensorSpec, storages
from ..capture.outside import LossFn, checked_loss, differentiable, find_loss, leaves
from ..capture.private import FakeTensorMode
from .values import call_op
from .wrap import Choice, checkpointed

Phase = Literal["forward", "loss", "backward"]
_OURS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))


@dataclass(frozen=True, slots=True, eq=False)
class DistinctOp:
    """An op on tensors of some shapes: `TensorSpec` in the place of every tensor.

    Attributes:
        key: equal for ops that cost the same.
        target: the op.
        args, kwargs, result: what it takes and returns.
    """

    key: tuple[Any, ...]
    target: torch._ops.OpOverload
    args: Any
    kwargs: Any
    result: Any


@dataclass(frozen=True, slots=True)
class TracedOp:
    """One op that ran.

    Attributes:
        distinct: what it is; None for a view.
        target: its name.
        module: path of the innermost module around it.
        phase: of the step.
        again: whether it runs again what has run before.
        reads: storages of its arguments.
        writes: storages that it makes.
        mutates: storages of arguments that it writes into.
        source: the user's line, where it was asked for.
    """

    distinct: DistinctOp | None
    target: str
    module: str
    phase: Phase
    again: bool
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    mutates: tuple[int, ...]
    source: str


@dataclass(slots=True)
class ModuleCall:
    """One call of a module's `forward`; ops by their number, `end` the first one after it.

    Attributes:
        path: of the module, as in `named_modules()`.
        phase: when.
        begin, end: ops of the call.
        inner: the calls made in it are those from the next one on up to this number.
        inputs: storages of its arguments.
        differentiable: whether a result needs a gradient.
        changed: attributes of the module itself that the call set.
    """

    path: str
    phase: Phase
    begin: int
    end: int
    inner: int
    inputs: frozenset[int]
    differentiable: bool = False
    changed: tuple[str, ...] = ()


@dataclass(slots=True)
class Saved:
    """A storage that autograd saved.

    Attributes:
        storage: its number.
        within: number of the innermost module call; -1 for none.
        packed: the number of ops begun when it was saved.
        unpacked: the same for each time it was asked for.
    """

    storage: int
    within: int
    packed: int
    unpacked: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Trace:
    """What one step did.

    Attributes:
        ops: in order.
        sizes: bytes of each storage; 0 for those that were there before.
        born: the op that made each; -1 for those that were there before.
        died: the number of ops begun when each was freed; `len(ops)` where it outlived the step.
        calls: of modules.
        saved: what autograd saved outside of checkpoints; only where asked for.
        given: number of each storage that was there before, by its identity.
    """

    ops: tuple[TracedOp, ...]
    sizes: tuple[int, ...]
    born: tuple[int, ...]
    died: tuple[int, ...]
    calls: tuple[ModuleCall, ...]
    saved: tuple[Saved, ...]
    given: Mapping[int, int]


class StepFailed(Exception):
    """A step that raised; the cause is what it raised.

    Attributes:
        module: path of the innermost module that was running.
        place: the user's line, where known.
    """

    def __init__(self, module: str, place: str) -> None:
        super().__init__(module, place)
        self.module = module
        self.place = place


def trace_step(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    mode: FakeTensorMode,
    loss_fn: LossFn | None,
    choice: Choice | None = None,
    accumulate: bool = False,
    shard: int = 1,
    detailed: bool = False,
) -> Trace:
    """Run one step as a training loop does: the output is held until the backward pass has ended.

    Args:
        model: on fake tensors; its attributes are as before afterwards.
        args: positional arguments, fake.
        kwargs: keyword arguments, fake.
        mode: the fake tensors' mode.
        loss_fn: as in `plan()`.
        choice: what is checkpointed.
        accumulate: whether gradients are there already.
        shard: how many devices share each gradient, once it is made.
        detailed: record what autograd saves, and source lines.

    Raises:
        StepFailed: the step raised.
        BatchError: the loss function does not suit the output.
    """
    recorder = _Recorder(mode, detailed)
    shards: list[torch.Tensor] = []

    def keep_share(p: torch.Tensor) -> None:
        if p.grad is not None:
            shards.append(torch.empty(-(-p.grad.numel() // shard), dtype=p.grad.dtype, device=p.grad.device))
            p.grad = None

    devices = {p.device.index or 0 for p in model.parameters() if p.device.type == "cuda" and torch.cuda.is_available()}
    with ExitStack() as stack:
        stack.enter_context(_unchanged(model))
        stack.enter_context(torch.random.fork_rng(devices=devices))
        stack.enter_context(torch.enable_grad())
        torch.clear_autocast_cache()
        parameters = [p for p in model.parameters() if p.requires_grad]
        for p in parameters:
            p.grad = torch.zeros_like(p) if accumulate else None
            if shard > 1 and not accumulate:
                hook = p.register_post_accumulate_grad_hook(keep_share)  # type: ignore[no-untyped-call]
                stack.callback(hook.remove)
        for path, module in model.named_modules():
            vars(module)["forward"] = recorder.marked(path, module)
        hooks = saved_tensors_hooks(recorder.pack, recorder.unpack) if detailed else nullcontext()
        try:
            with checkpointed(model, choice or Choice()), recorder, hooks:
                output = model(*args, **kwargs)
                recorder.phase = "loss"
                _differentiate(output, loss_fn, recorder)
        except Exception as e:
            if recorder.phase == "loss":
                raise
            raise StepFailed(recorder.failed or "", _place(e)) from e
        finally:
            trace = recorder.finished()
            for p in parameters:
                p.grad = None
    return trace


def _differentiate(output: Any, loss_fn: LossFn | None, recorder: _Recorder) -> None:
    loss = find_loss(output) if loss_fn is None else checked_loss(loss_fn, output)
    if loss is not None:
        recorder.phase = "backward"
        loss.backward()  # type: ignore[no-untyped-call]
        return
    # every output may get a gradient; a loss may hold as much, and need as much again for a moment
    results = [t for t in leaves(output) if differentiable(t)]
    size = sum(storages(results).values())
    held = torch.empty(size + 16, dtype=torch.uint8)
    gradients = [torch.empty_like(t) for t in results]
    torch.empty(size, dtype=torch.uint8)
    recorder.phase = "backward"
    torch.autograd.backward(results, gradients)
    del held


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Puts the attributes of all modules back, as far as they were set."""
    tables = [t for m in model.modules() for t in (vars(m), m._buffers, m._parameters)]
    before = [dict(t) for t in tables]
    try:
        yield
    finally:
        for table, saved in zip(tables, before, strict=True):
            table.clear()
            table.update(saved)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, mode: FakeTensorMode, detailed: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.mode = mode
        self.detailed = detailed
        self.phase: Phase = "forward"
        self.path: list[str] = []
        self.within: list[int] = [-1]
        self.failed: str | None = None
        self.ops: list[TracedOp] = []
        self.calls: list[ModuleCall] = []
        self.saved: list[Saved] = []
        self.sizes: list[int] = []
        self.born: list[int] = []
        self.died: list[int] = []
        self._begun = 0
        self._made: dict[int, int] = {}  # storages alive -> their number
        self._given: dict[int, int] = {}
        self._finalizers: list[Any] = []
        self._distinct: dict[Any, DistinctOp] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in SAC_IGNORED_OPS:
            return func(*args, **kwargs)
        flat = pytree.tree_leaves((args, kwargs))
        tensors = [t for t in flat if isinstance(t, torch.Tensor)]
        reads = {key: self._number(key) for key in storages(tensors)}
        mutates = self._written(func, args, kwargs)
        self._begun += 1
        result = call_op(self.mode, func, args, kwargs, tensors)
        writes = []
        for t in pytree.tree_leaves(result):
            if isinstance(t, torch.Tensor):
                storage = t.untyped_storage()
                if storage._cdata not in reads and storage._cdata not in self._made:
                    writes.append(self._make(storage))
        distinct = self._describe(func, args, kwargs, flat, result) if writes or mutates else None
        again = self.phase == "backward" and bool(self.path)
        path = self.path[-1] if self.path else ""
        source = _source() if self.detailed and self.phase == "forward" else ""
        reading = tuple(reads.values())
        self.ops.append(TracedOp(distinct, str(func), path, self.phase, again, reading, tuple(writes), mutates, source))
        return result

    def marked(self, path: str, module: nn.Module) -> Callable[..., Any]:
        """The module's `forward`, its calls recorded."""
        forward = module.forward

        def call(*args: Any, **kwargs: Any) -> Any:
            inputs = frozenset(map(self._number, storages((args, kwargs))))
            made = ModuleCall(path, self.phase, self._begun, self._begun, 0, inputs)
            self.within.append(len(self.calls))
            self.calls.append(made)
            before = _attributes(module)
            self.path.append(path)
            try:
                result = forward(*args, **kwargs)
            except Exception:
                self.failed = self.failed or path
                raise
            finally:
                self.path.pop()
                self.within.pop()
                made.end, made.inner = self._begun, len(self.calls)
            made.differentiable = torch.is_grad_enabled() and any(map(differentiable, leaves(result)))
            made.changed = tuple(k for k, v in _attributes(module).items() if before.get(k) != v)
            return result

        return call

    def pack(self, t: torch.Tensor) -> tuple[int, torch.Tensor]:
        self.saved.append(Saved(self._number(t.untyped_storage()._cdata), self.within[-1], self._begun))
        return len(self.saved) - 1, t.detach()

    def unpack(self, packed: tuple[int, torch.Tensor]) -> torch.Tensor:
        self.saved[packed[0]].unpacked.append(self._begun)
        return packed[1]

    def finished(self) -> Trace:
        for f in self._finalizers:
            f.detach()
        died = tuple(len(self.ops) if d < 0 else d for d in self.died)
        return Trace(
            tuple(self.ops),
            tuple(self.sizes),
            tuple(self.born),
            died,
            tuple(self.calls),
            tuple(self.saved),
            self._given,
        )

    def _number(self, key: int) -> int:
        number = self._made.get(key)
        if number is None:
            number = self._given.get(key)
        if number is None:
            number = self._given[key] = self._add(0, -1)
        return number

    def _add(self, size: int, born: int) -> int:
        self.sizes.append(size)
        self.born.append(born)
        self.died.append(-1)
        return len(self.sizes) - 1

    def _make(self, storage: torch.UntypedStorage) -> int:
        key, number = storage._cdata, self._add(storage.nbytes(), self._begun - 1)
        self._made[key] = number
        self._finalizers.append(weakref.finalize(storage, self._free, key, number))
        return number

    def _free(self, key: int, number: int) -> None:
        del self._made[key]
        self.died[number] = self._begun

    def _written(self, func: Any, args: Any, kwargs: Any) -> tuple[int, ...]:
        updates = "batch_norm" in func._schema.name and "backward" not in func._schema.name
        if not (func._schema.is_mutable or updates):
            return ()
        found = []
        for at, argument in enumerate(func._schema.arguments):
            written = argument.alias_info is not None and argument.alias_info.is_write
            if written or (updates and argument.name.startswith("running_")):
                given = args[at] if at < len(args) else kwargs.get(argument.name)
                found += [self._number(key) for key in storages(given)]
        return tuple(found)

    def _describe(self, func: Any, args: Any, kwargs: Any, flat: list[Any], result: Any) -> DistinctOp:
        def spec(t: torch.Tensor) -> TensorSpec:
            return TensorSpec(tuple(t.shape), tuple(t.stride()), t.dtype)

        key = (func, *(spec(x) if isinstance(x, torch.Tensor) else repr(x) for x in flat))
        if key not in self._distinct:
            plain = pytree.tree_map_only(torch.Tensor, spec, (tuple(args), dict(kwargs), result))
            self._distinct[key] = DistinctOp(key, func, *plain)
        return self._distinct[key]


def _attributes(module: nn.Module) -> dict[str, tuple[int, int]]:
    """What tells that an attribute was set, or a container that it holds grew."""
    return {k: (id(v), len(v) if isinstance(v, (list, dict, set)) else 0) for k, v in vars(module).items()}


def _source() -> str:
    """The innermost line outside torch and this package that is running: "file:line: code"."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back  # type: ignore[assignment]
    return "" if frame is None else _line(frame.f_code.co_filename, frame.f_lineno)


def _place(error: Exception) -> str:
    own = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(_OURS)]
    return _line(own[-1].filename, own[-1].lineno or 0) if own else ""


def _line(path: str, number: int) -> str:
    return f"{path}:{number}: {getline(path, number).strip()}"
