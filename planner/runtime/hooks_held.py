"""What the hooks of a model's parameters hold, which no op outside the backward pass reads: masks, sums, momentum."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from planner.compat.autograd import hooks_of, post_accumulate_hooks
from planner.core.attributes import shaped_as
from planner.core.call import storages
from planner.runtime.holders import tensors_within


def held_by_hooks(model: nn.Module, device: torch.device) -> dict[int, int]:
    """The bytes of the storages on a device that hooks of parameters lead to, as far as they are shaped as parameters.

    They are there in each backward pass. O(what the hooks' variables reach, which is bounded).
    """
    parameters = list(model.parameters())
    tables = [table for p in parameters for table in (hooks_of(p), post_accumulate_hooks(p) or {})]
    values = {id(value): value for table in tables for hook in list(table.values()) for value in _variables(hook)}
    found = (t for value in values.values() for _, t in tensors_within(value))
    shaped = shaped_as(parameters)
    return storages([t for t in found if t.device == device and shaped(t)])


def _variables(hook: Any) -> Iterator[Any]:
    """The values of a function's variables from outside of it, and what it is bound to; none of torch's and ours."""
    if str(getattr(hook, "__module__", "")).startswith(("torch.", "planner.")):  # whose state is counted by itself
        return
    if isinstance(hook, MethodType):
        yield hook.__self__
        yield from _variables(hook.__func__)
    elif isinstance(hook, partial):
        yield from (*hook.args, *hook.keywords.values())
        yield from _variables(hook.func)
    elif isinstance(hook, FunctionType):
        yield from (*(hook.__defaults__ or ()), *(hook.__kwdefaults__ or {}).values())
        yield from (hook.__globals__[name] for name in hook.__code__.co_names if name in hook.__globals__)
        for cell in hook.__closure__ or ():
            with suppress(ValueError):  # it was not given anything yet
                yield cell.cell_contents
    else:
        yield hook
