"""What stands in the place of a model's call, its plan or what its user compiled, put aside for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from planner.compat.dynamo import compiled_call
from planner.compat.modules import modules_in, replace_call
from planner.runtime.as_compiled import calls_back
from planner.runtime.interception import Applied, attached, put
from planner.runtime.modes import refuse_compiled


@contextmanager
def compiled_aside(model: nn.Module) -> Iterator[None]:
    """Without what `compile()` put in the place of calls of a model and its modules; a plan that is put on keeps it."""
    compiled = [(module, call) for module in modules_in(model) if (call := compiled_call(module)) is not None]
    for module, _ in compiled:
        replace_call(module, None)
    try:
        yield
    finally:
        runtime = attached(model)
        if runtime is not None and compiled:
            runtime.aside = compiled
        elif compiled:
            calls_back(compiled)


@contextmanager
def taken_off(model: nn.Module) -> Iterator[Applied | None]:
    """The model without its plan for a while, and the runtime of that, if it runs under one.

    Raises ApplyError where it is compiled otherwise.
    """
    with compiled_aside(model):
        runtime = attached(model)
        refuse_compiled(model, runtime)
        put(model, None)
        try:
            yield runtime
        finally:
            put(model, runtime)


@contextmanager
def recording_aside(model: nn.Module) -> Iterator[None]:
    """Within a call of a model: what records the step of this call sees nothing for a while, and then goes on."""
    runtime = attached(model)
    watch = None if runtime is None else runtime.watch
    if watch is None:
        yield
        return
    recorder, watch.recorder = watch.recorder, None
    try:
        yield
    finally:
        watch.recorder = recorder
