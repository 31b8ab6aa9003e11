"""Records the ops of a step, the storages that they make and free, and the calls of modules around them."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import SAC_IGNORED_OPS

from planner.capture.provenance import line_at, user_place
from planner.capture.trace.data_dependent import Answers, Position
from planner.capture.trace.loss_trace import differentiable
from planner.compat import pytree
from planner.compat.fake import FakeTensorMode
from planner.compat.ops import schema_of
from planner.compat.tensors import TorchDispatchMode, storage_key
from planner.core.call import TensorSpec, storages
from planner.core.gradient_sums import in_place_of, last_references
from planner.core.objects import leaves
from planner.eager.trace import DistinctOp, ModuleCall, Phase, Saved, Trace, TracedOp
from planner.eager.values import call_op


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode for one step on fake tensors.

    Attributes:
        phase: of the step; whoever runs it sets it.
        output_bytes: of the elements of the model's outputs; whoever runs it sets it.
        failed: path of the innermost module that raised.
    """

    def __init__(self, mode: FakeTensorMode, answers: Answers, detailed: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        last_references()  # no mode is called yet
        self.mode, self.answers = mode, answers
        self.detailed = detailed
        self.phase: Phase = "forward"
        self.output_bytes = 0
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
        self._positions: dict[tuple[str, frozenset[int]], Position] = {}  # at the begin of calls of modules

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.phase == "backward":
            func = in_place_of(func, args)  # as autograd's engine does where there is no mode
        kwargs = kwargs or {}
        if func in SAC_IGNORED_OPS:
            return func(*args, **kwargs)
        flat = pytree.tree_leaves((args, kwargs))
        tensors = [t for t in flat if isinstance(t, torch.Tensor)]
        reads = {key: self._number(key) for key in storages(tensors)}
        mutates = self._written(func, args, kwargs)
        self._begun += 1
        try:
            result = call_op(self.mode, func, args, kwargs, tensors)
        except Exception:  # which the model may catch
            self._begun -= 1
            raise
        writes = []
        for t in pytree.tree_leaves(result):
            if isinstance(t, torch.Tensor):
                key = storage_key(t)
                if key not in reads and key not in self._made:
                    writes.append(self._make(t))
        distinct = self._describe(func, args, kwargs, flat, result) if writes or mutates else None
        again = self.phase == "backward" and bool(self.path)
        path = self.path[-1] if self.path else ""
        source = line_at(*user_place(inspect.currentframe())) if self.detailed and self.phase == "forward" else ""
        made = distinct, str(func), path, self.phase, again, func.is_view
        self.ops.append(TracedOp(*made, tuple(reads.values()), tuple(writes), mutates, source))
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
            told = self._told(path, inputs)
            self.path.append(path)
            try:
                with told:
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

    def _told(self, path: str, inputs: frozenset[int]) -> AbstractContextManager[None]:
        """For a module that runs again: it is told of values what its first call with the same inputs was told."""
        if self.phase != "backward":
            self._positions[path, inputs] = self.answers.position()
        elif not self.path and (begun := self._positions.get((path, inputs))) is not None:
            return self.answers.again_from(begun)
        return nullcontext()

    def pack(self, t: torch.Tensor) -> tuple[int, torch.Tensor]:
        self.saved.append(Saved(self._number(storage_key(t)), self.within[-1], self._begun))
        return len(self.saved) - 1, t.detach()

    def unpack(self, packed: tuple[int, torch.Tensor]) -> torch.Tensor:
        self.saved[packed[0]].unpacked.append(self._begun)
        return packed[1]

    def alive(self) -> dict[int, int]:
        """The storages that the step has made and that are still there, by key, with their bytes."""
        return {key: self.sizes[number] for key, number in self._made.items()}

    def finished(self) -> Trace:
        for f in self._finalizers:
            f.detach()
        died = tuple(len(self.ops) + 1 if d < 0 else d for d in self.died)
        return Trace(
            tuple(self.ops),
            tuple(self.sizes),
            tuple(self.born),
            died,
            tuple(self.calls),
            tuple(self.saved),
            self._given,
            self.output_bytes,
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

    def _make(self, t: torch.Tensor) -> int:
        key, storage = storage_key(t), t.untyped_storage()
        number = self._add(storage.nbytes(), self._begun - 1)
        self._made[key] = number
        self._finalizers.append(weakref.finalize(storage, self._free, key, number))
        return number

    def _free(self, key: int, number: int) -> None:
        del self._made[key]
        self.died[number] = self._begun

    def _written(self, func: Any, args: Any, kwargs: Any) -> tuple[int, ...]:
        schema = schema_of(func)
        updates = "batch_norm" in schema.name and "backward" not in schema.name
        if not (schema.is_mutable or updates):
            return ()
        found = []
        for at, argument in enumerate(schema.arguments):
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


def _attributes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """What tells that an attribute was set, or something in a container that it holds."""
    return {k: (id(v), *map(id, _held_in(v))) for k, v in vars(module).items()}


def _held_in(container: Any) -> list[Any]:
    if isinstance(container, dict):
        return list(container.values())
    return list(container) if isinstance(container, (list, set)) else []
