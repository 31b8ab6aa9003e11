"""Dispatch modes that stay on from one call to another, on the stack of modes of a thread. Torch 2.11 to 2.15."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

import torch
from torch._dynamo import eval_frame
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)

from planner.compat.autograd import in_backward, is_transformed
from planner.compat.inductor_allocations import hide_allocations, show_allocations

_EVAL_FRAME = eval_frame.__file__
# of that file, what puts nothing back as it ends: the call of `torch.compile(module)`, and `torch.compiler.disable`
_PLAIN = {eval_frame.OptimizedModule.__call__.__code__, torch.compiler.disable(lambda: None).__code__}  # type: ignore
_ENTERED = "_inference_mode_context"  # of a `torch.inference_mode` that was entered (2.11 to 2.15)
_QUESTIONS = 3  # each takes 0.1 s

__all__ = [
    "LastingMode",
    "finds_ops",
    "in_compiled_call",
    "lasting_modes_off",
    "may_last",
    "modes_here",
    "switch_off",
    "switch_on",
    "written",
]


class LastingMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that torch.compile does not mind, and under which higher-order ops run (2.11 to 2.15)."""

    supports_higher_order_operators = True

    over = False  # it is to do nothing more, and to be taken off
    place: tuple[Any, ...] = ()  # where it was put on
    asked = 0  # how often all objects were asked whether they are in its way

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def planned_results(self, results: Any) -> None:
        """A backward graph that ran without the mode has returned these."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """torch.compile compiles under it; the kernels that it makes run past it, and what they write into is seen."""
        return True


def modes_here() -> list[Any]:
    """The dispatch modes of this thread, the innermost last (`_get_current_dispatch_mode_stack`, 2.11 to 2.15)."""
    return list(_get_current_dispatch_mode_stack())


def switch_on(mode: LastingMode) -> None:
    """Put a mode on this thread's stack, to stay there (`_push_mode` and `_pop_mode`, 2.11 to 2.15)."""
    with lasting_modes_off() as off:  # another may take the place of one that is over
        mode.place = _place()
        off.insert(0, mode)
    show_allocations(_sees_ops)


def switch_off(mode: LastingMode) -> None:
    """Take a mode off this thread's stack, now if it is the innermost one there and may be, or at a later occasion."""
    mode.over = True
    if modes_here()[-1:] == [mode] and _may_leave(mode):
        _pop_mode()
    if not _sees_ops():
        hide_allocations()


def _sees_ops() -> bool:
    """Whether a mode sees what this thread runs."""
    return any(isinstance(mode, LastingMode) and not mode.over for mode in modes_here()) and finds_ops()


def may_last() -> bool:
    """Whether a mode that is put on here is found by ops for as long as it stays on.

    A context of inference mode, and code that torch.compile made, take away as they end the key by which ops find
    modes, and leave the mode, which then hides those put on after it: under a FakeTensorMode, real tensors are made.
    """
    if torch.is_inference_mode_enabled() or in_compiled_call():
        return False
    return not _inference_entered()  # around an `inference_mode(False)`


def in_compiled_call() -> bool:
    """Whether what runs was called by something that torch.compile made, which as it ends puts the keys back by which
    ops find modes (`torch._dynamo.eval_frame`, 2.11 to 2.15).
    """
    return _compiled(_place())


def _compiled(place: tuple[tuple[CodeType, int], ...]) -> bool:
    return any(code.co_filename == _EVAL_FRAME and code not in _PLAIN for code, _ in place)


def finds_ops() -> bool:
    """Whether ops of this thread find its modes (`_dispatch_tls_is_dispatch_key_included`, 2.11 to 2.15)."""
    return torch._C._dispatch_tls_is_dispatch_key_included(torch._C.DispatchKey.Python)


@contextmanager
def lasting_modes_off(*, put_back: bool = True) -> Iterator[list[LastingMode]]:
    """Without the lasting modes that are innermost on this thread's stack, for what torch.compile has to see whole.

    Those that are over stay off, where they may. Gives these modes. `put_back`: False where whoever has called puts the
    stack back as it was.
    """
    off: list[LastingMode] = []
    while (here := modes_here()) and isinstance(here[-1], LastingMode):
        off.append(here[-1])
        if not finds_ops():  # such a context has ended, or will not find the key
            here[-1].place = _place()
        _pop_mode()
    try:
        yield off
    finally:
        if put_back:
            _put_back(off[::-1])
            if off and not _sees_ops():
                hide_allocations()


def _put_back(modes: list[LastingMode]) -> None:
    """Put modes on again, the outermost first, without those that are over; one of these, if it must stay."""
    if not modes or (all(mode.over for mode in modes) and _may_leave(modes[0])):
        return
    back = [mode for mode in modes if not mode.over] or modes[:1]
    back[0].place = modes[0].place
    for mode in back:
        _push_mode(mode)


def _may_leave(mode: LastingMode) -> bool:
    """Whether no context is around that began after the mode was put on, and puts back as it ends what it found.

    Those of inference mode, of torch.func, of code that torch.compile made and of backward passes do: some put back the
    modes, and others only the key by which ops find them. With the key and no mode, every op fails.
    """
    place = _place()
    if mode.place == place:  # all contexts that are around were, then: no mode is left on in a compiled call
        return True
    if in_backward() or torch.is_inference_mode_enabled() or is_transformed(()):
        return False
    if _compiled(place) or mode.asked == _QUESTIONS:
        return False
    mode.asked += 1
    return not _inference_entered()


def _inference_entered() -> bool:
    """Whether there is a `torch.inference_mode` that was entered, among all objects."""
    return any(type(x) is torch.inference_mode and hasattr(x, _ENTERED) for x in gc.get_objects())


def _place() -> tuple[tuple[CodeType, int], ...]:
    """The code that runs, without this package's, and where in it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").split(".")[0] in ("planner", "contextlib"):
        frame = frame.f_back
    place = []
    while frame is not None:
        place.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return tuple(place)


def written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments that a call of an op writes into, by its schema (`OpOverload._schema`, 2.11 to 2.15)."""
    schema = getattr(func, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    into = [at for at, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write]
    found = [args[at] if at < len(args) else kwargs.get(schema.arguments[at].name) for at in into]
    return [value for value in found if value is not None]
