"""Models that the user has compiled: planned to be compiled by Inductor with the same options, or refused in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from planner.compat.dynamo import Compiled, compiled_by, inner_module
from planner.core.recipe import Settings
from planner.errors import OptionError

# what mode="inductor" sets itself, or cannot know the memory of before it compiles
_REFUSED = {
    "triton.cudagraphs": "CUDA graphs hold memory of their own: compile without a mode",
    "max_autotune": "it chooses kernels by running them, and a plan knows the memory before: compile without it",
    "max_autotune_gemm": "it chooses kernels by running them, and a plan knows the memory before: compile without it",
    "max_autotune_pointwise": "it chooses kernels by running them, and a plan knows the memory before: leave it out",
    "cpp_wrapper": "the wrapper is then no Python, which a plan reads: leave it out",
    "custom_partitioner_fn": "the plan partitions the graph: leave it out",
    "inductor_choices_class": "the plan chooses what is fused: leave it out",
}


def without_compile(model: Any) -> Any:
    """The module that `torch.compile(module)` wrapped; any other model as it is."""
    return (inner_module(model) or model) if isinstance(model, nn.Module) else model


def options_as_compiled(model: nn.Module, given: Mapping[str, Any]) -> tuple[dict[str, Any], Settings]:
    """The options of `plan()` for a model that may be compiled, and the settings of Inductor that it is compiled with.

    Args:
        model: as the user gave it.
        given: the options that were given, by name; without a mode, a compiled model has mode="inductor".

    Raises:
        OptionError: what the model is compiled with cannot be kept; it says what to change.
    """
    options = dict(given)
    compiled = compiled_by(model)
    if options.get("mode") is None:
        options.pop("mode", None)
        if compiled is None:
            return options, ()
        options["mode"] = "inductor"
    if compiled is None or options["mode"] != "inductor":
        return options, ()
    if compiled.backend != "inductor":
        raise OptionError(
            f"the model is compiled with backend={compiled.backend!r}, and plans are for Inductor's: compile it "
            "without a backend, or give plan() the model uncompiled"
        )
    if compiled.dynamic and options.get("dynamic") is None:
        options["dynamic"] = True
    return options, _settings(compiled)


def _settings(compiled: Compiled) -> Settings:
    for name, value in compiled.settings.items():
        if name in _REFUSED and value:
            raise OptionError(f"the model is compiled with {name}={value!r}: {_REFUSED[name]}")
        if not isinstance(value, (bool, int, float, str)):
            raise OptionError(
                f"the model is compiled with {name}={value!r}, which a plan cannot keep: compile it without, or give "
                "plan() the model uncompiled"
            )
    return tuple(sorted(compiled.settings.items()))
