"""A planned model without its plan, for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from planner.runtime.interception import attached, put
from planner.runtime.modes import refuse_compiled


@contextmanager
def taken_off(model: nn.Module) -> Iterator[None]:
    """The model without its plan, if it runs under one, for a while; ApplyError where it is compiled otherwise."""
    runtime = attached(model)
    refuse_compiled(model, runtime)
    put(model, None)
    try:
        yield
    finally:
        put(model, runtime)
