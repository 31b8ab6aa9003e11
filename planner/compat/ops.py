"""Operators: their class and schema, and what these promise. Torch 2.11 to 2.15."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch._C import FunctionSchema
from torch._higher_order_ops.effects import has_effects
from torch._higher_order_ops.flex_attention import flex_attention, flex_attention_backward
from torch._higher_order_ops.triton_kernel_wrap import (
    kernel_side_table,
    triton_kernel_wrapper_functional,
    triton_kernel_wrapper_mutation,
)
from torch._ops import OpOverload

__all__ = [
    "FUNCTIONAL",
    "OpOverload",
    "is_functional",
    "kernel_named",
    "name_of",
    "schema_of",
]

# higher-order operators that make new results and do nothing else, as far as the graphs that they are given do
FUNCTIONAL: frozenset[object] = frozenset({triton_kernel_wrapper_functional, flex_attention, flex_attention_backward})


def schema_of(op: OpOverload) -> FunctionSchema:
    """An operator's qualified name, arguments, results and mutability (`OpOverload._schema`, torch 2.11 to 2.15)."""
    return op._schema


def name_of(target: object) -> str:
    """The qualified name of what a node calls: "aten.bmm.default", "triton_kernel_wrapper_functional"."""
    return str(target) if isinstance(target, OpOverload) else str(getattr(target, "__name__", target))


def kernel_named(target: object, kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a node is given by name, with a Triton kernel and its constants as text in the place of their numbers.

    The numbers are those of a table that grows with every trace (`kernel_side_table`, torch 2.11 to 2.15): they differ
    from one trace of a step to the next.
    """
    if target not in (triton_kernel_wrapper_functional, triton_kernel_wrapper_mutation):
        return kwargs
    kernel: Any = kernel_side_table.get_kernel(kwargs["kernel_idx"])
    while hasattr(kernel, "fn"):  # tuned, or compiled
        kernel = kernel.fn
    constants = kernel_side_table.get_constant_args(kwargs["constant_args_idx"])
    name = f"{kernel.__module__}.{getattr(kernel, '__qualname__', type(kernel).__qualname__)}"
    return {**kwargs, "kernel_idx": name, "constant_args_idx": repr(sorted(constants.items()))}


def is_functional(op: OpOverload) -> bool:
    """Whether an operator declares that it makes new results of its arguments, and does nothing else.

    Its schema has results, none of which is an argument, it writes into nothing, no object of a class of its own goes
    in or out, and no effect is registered for it (`has_effects`, torch 2.11 to 2.15).
    """
    schema = schema_of(op)
    if schema.is_mutable or not schema.returns or any(r.alias_info is not None for r in schema.returns):
        return False
    types = [t for x in (*schema.arguments, *schema.returns) for t in _within(x.type)]
    return not any(t.kind() in ("ClassType", "AnyType", "PyObjectType") for t in types) and not has_effects(op)


def _within(kind: Any) -> Iterator[torch._C.Type]:
    """A type of a schema, and those in it."""
    yield kind
    for inner in kind.containedTypes():
        yield from _within(inner)
