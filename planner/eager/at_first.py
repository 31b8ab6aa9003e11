"""A module that runs again finds the attributes that it found at first, whatever the loop has set since."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from planner.compat.modules import buffers_of

Attributes = list[tuple[dict[str, Any], str, Any]]  # tables, names, values
_KINDS = (bool, int, float, complex, str, type(None), torch.Tensor)
_MISSING = object()


def attributes_of(module: nn.Module) -> Attributes:
    """The numbers, strings, modes and tensors that a module and those in it keep, parameters apart. O(attributes).

    Modules that set one themselves are not checkpointed (`eager/candidates.py`).
    """
    tables = (table for m in module.modules() for table in (vars(m), buffers_of(m)))
    return [(table, name, x) for table in tables for name, x in table.items() if isinstance(x, _KINDS)]


@contextmanager
def put_back(attributes: Attributes) -> Iterator[None]:
    """Meanwhile, attributes are as they were when these were read."""
    now = [(table, name, table.get(name, _MISSING)) for table, name, _ in attributes]
    _set(attributes)
    try:
        yield
    finally:
        _set(now)


def _set(attributes: Iterable[tuple[dict[str, Any], str, Any]]) -> None:
    for table, name, x in attributes:
        if x is _MISSING:
            table.pop(name, None)
        elif table.get(name, _MISSING) is not x:
            table[name] = x
