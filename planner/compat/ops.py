"""Operators: their class and schema, and the ones that replay a random op. Torch 2.11 to 2.15."""

from __future__ import annotations

from torch._C import FunctionSchema
from torch._ops import OpOverload
from torch._prims.rng_prims import run_and_save_rng_state, run_with_rng_state

__all__ = ["OpOverload", "run_and_save_rng_state", "run_with_rng_state", "schema_of"]


def schema_of(op: OpOverload) -> FunctionSchema:
    """An operator's qualified name, arguments, results and mutability (`OpOverload._schema`, torch 2.11 to 2.15)."""
    return op._schema
