"""Dispatch modes that stay on from one call to another, on the stack of modes of a thread. Torch 2.11 to 2.13."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
)

__all__ = ["LastingMode", "lasting_modes_off", "modes_here", "switch_off", "switch_on", "written"]


class LastingMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that torch.compile does not mind, and under which higher-order ops run (2.13)."""

    supports_higher_order_operators = True

    over = False  # it is to do nothing more, and not to be put on again

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def planned_results(self, results: Any) -> None:
        """A backward graph that ran without the mode has returned these."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """torch.compile compiles under it, and what it compiles runs past it."""
        return True


def modes_here() -> list[Any]:
    """The dispatch modes of this thread, the innermost last (`_get_current_dispatch_mode_stack`, 2.11 to 2.13)."""
    return list(_get_current_dispatch_mode_stack())


def switch_on(mode: LastingMode) -> None:
    """Put a mode on this thread's stack, to stay there (`TorchDispatchMode.__enter__`, 2.11 to 2.13)."""
    mode.__enter__()  # type: ignore[no-untyped-call]


def switch_off(mode: LastingMode) -> bool:
    """Take a mode off this thread's stack; False where it is not the innermost one there."""
    here = modes_here()
    if not here or here[-1] is not mode:
        return False
    mode.__exit__(None, None, None)
    return True


@contextmanager
def lasting_modes_off() -> Iterator[list[LastingMode]]:
    """Without the lasting modes that are innermost on this thread's stack, for what torch.compile has to see whole.

    Gives these modes.
    """
    off: list[LastingMode] = []
    while (here := modes_here()) and isinstance(here[-1], LastingMode) and switch_off(here[-1]):
        off.append(here[-1])
    try:
        yield off
    finally:
        for mode in reversed(off):
            if not mode.over:
                switch_on(mode)


def written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments that a call of an op writes into, by its schema (`OpOverload._schema`, 2.11 to 2.13)."""
    schema = getattr(func, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    into = [at for at, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write]
    found = [args[at] if at < len(args) else kwargs.get(schema.arguments[at].name) for at in into]
    return [value for value in found if value is not None]
