"""Records the ops on fake tensors outside compiled graphs, with the module, line and autograd node that called each."""

from __future__ import annotations

import inspect
import linecache
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress, islice, zip_longest
from types import FrameType, FunctionType, ModuleType
from typing import Any

import torch

from planner.capture.provenance import running_module, user_place
from planner.compat import pytree
from planner.compat.autograd import uses_of
from planner.compat.dynamo import is_tracing
from planner.compat.fake import FakeTensor, FakeTensorMode, replace_dispatch
from planner.compat.ops import OpOverload
from planner.compat.tensors import storage_key, viewed
from planner.core.call import PLAIN, storages, tensors_in
from planner.core.frames import variables_of
from planner.core.objects import MOST_LEAVES
from planner.errors import users_frame

MOST_HELD = 4096  # tensors that one op has made and holds: to ask each takes 0.1 us
_MACHINERY = "torch._", "torch.fx", "torch.utils._"


@dataclass(frozen=True, slots=True)
class EagerCall:
    """One op that ran outside every compiled graph, the autograd node that called it, the user's line and module.

    `held` are the storages of tensors that variables of the model's functions name meanwhile, by `storage_key`, and of
    those that a composite op of torch's holds until it returns.
    """

    target: OpOverload
    args: Any
    kwargs: Mapping[str, Any]
    result: Any
    node: int
    stack_trace: str
    module: str
    held: frozenset[int] = frozenset()


class Recording:
    """Records the ops that are called on the tensors of a fake mode.

    Attributes:
        mode: the fake mode.
        paths: those of the model's modules, by their identities.
        calls: the ops recorded since `taken()`.
        node: number of the autograd node that runs now; 0 for none.
    """

    def __init__(self, mode: FakeTensorMode, paths: Mapping[int, str]) -> None:
        self.mode = mode
        self.paths = paths
        self.calls: list[EagerCall] = []
        self.node = 0
        self._pauses = 1
        self._place: tuple[int, int] | None = None  # the instruction that called the latest op, and its frame
        self._made: list[torch.Tensor] = []  # there
        self._views: Counter[int] = Counter()  # of these, by identity: how many views are recorded
        self._dispatch = replace_dispatch(mode, self.dispatch)

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an op on fake tensors."""
        self.pause()
        try:
            result = self._dispatch(func, types, args, kwargs or {})
        finally:
            self.resume()
        if not self._pauses and not is_tracing():
            frame = inspect.currentframe()
            path, line = user_place(frame)
            trace = f'File "{path}", line {line}, in ?\n    {linecache.getline(path, line).strip()}'
            module = running_module(frame, self.paths)
            # a graph that only stands for these ops has no way to write a generator
            own, named = pytree.tree_map_only(torch.Generator, lambda g: None, (args, dict(kwargs or {})))
            held = frozenset[int]()
            if self.node:
                self._let_go()
            else:
                held = held_by_variables(frame)
                self._note_made(frame, (args, kwargs), result)
            del frame  # it would keep itself, and all that it names, until Python's collector comes
            self.calls.append(EagerCall(func, own, named, result, self.node, trace, module, held))
        return result

    def _note_made(self, frame: FrameType | None, given: Any, result: Any) -> None:
        """What one instruction calls is one op: a composite one holds what it has made, as `gru_cell` all of its gates,
        by variables that are not Python's.
        """
        place = None if (frame := _calls_op(frame)) is None else (id(frame), frame.f_lasti)
        if place != self._place:
            self._let_go()
        elif not storages(result).keys() <= storages(given).keys():  # memory is taken: it matters what is there
            of_views = self._views.get
            self._let_go([uses_of(t) > 1 + of_views(id(t), 0) for t in self._made])
        before = {id(t) for t in tensors_in(given)}  # what an op in place returns is one of these
        made = [t for t in tensors_in(result) if id(t) not in before]
        self._views.update(id(base) for t in made if (base := viewed(t)) is not None)
        self._place, self._made = place, [*self._made, *made][:MOST_HELD]

    def _let_go(self, held: Sequence[bool] = ()) -> None:
        """Of what an instruction made, some is still held; the rest was until the latest op."""
        gone = [t for t, is_held in zip_longest(self._made, held) if not is_held and t.layout is torch.strided]
        if gone and self.calls:
            self.calls[-1] = replace(self.calls[-1], held=self.calls[-1].held.union(map(storage_key, gone)))
        self._made = [*compress(self._made, held)]

    def pause(self) -> None:
        """Record nothing until `resume()`; pauses nest, and the mode begins with one."""
        self._pauses += 1

    def resume(self) -> None:
        """Undo one `pause()`."""
        self._pauses -= 1

    def taken(self) -> tuple[EagerCall, ...]:
        """The ops recorded since this was last called."""
        self._let_go()
        taken = tuple(self.calls)
        self.calls.clear()
        self._views.clear()
        return taken


def held_by_variables(frame: FrameType | None) -> frozenset[int]:
    """The storages of the tensors that variables name in the functions that run, up to the planner's that has called
    the model: in the user's and those that have called it, and in what these call in torch, but for its machinery. A
    tensor in a container or an object, as a module, is named, too.
    """
    named: list[Any] = []
    frame, users = _calls_op(frame), False
    while frame is not None and not _is_own(frame):
        users = users or users_frame(frame) is frame
        if users or not _is_machinery(frame):
            named.extend(variables_of(frame).values())
        frame = frame.f_back
    return held_by(named)


def _calls_op(frame: FrameType | None) -> FrameType | None:
    """The frame that calls an op, of this one and those that have called it."""
    while frame is not None and (_is_own(frame) or _is_machinery(frame)):
        frame = frame.f_back
    return frame


def _is_machinery(frame: FrameType) -> bool:
    return bool(frame.f_globals.get("__name__", "").startswith(_MACHINERY))


def _is_own(frame: FrameType) -> bool:
    return bool(frame.f_globals.get("__name__", "").startswith("planner."))


def held_by(values: Iterable[Any]) -> frozenset[int]:
    """The storages of tensors that are among these values, or in containers or objects that are; by `storage_key`."""
    named = (t for value in values for t in _named(value, containers=2))
    return frozenset(storage_key(t) for t in named if isinstance(t, FakeTensor) and t.layout is torch.strided)


def _named(value: Any, containers: int, inside: bool = False) -> Iterator[Any]:
    """A value, or what is in so many containers or objects, one in another; modules in a module are not looked at."""
    if type(value) in PLAIN or isinstance(value, (torch.Tensor, FunctionType, ModuleType, type)) or not containers:
        yield value
    elif isinstance(value, (dict, tuple, list)):
        for each in islice(list(value.values()) if isinstance(value, dict) else value, MOST_LEAVES):
            yield from _named(each, containers - 1, inside=True)
    elif not (inside and isinstance(value, torch.nn.Module)):
        yield from _named(getattr(value, "__dict__", ()), containers, inside=True)
