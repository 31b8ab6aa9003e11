"""Symbolic sizes: which dimensions torch.compile takes for symbols, and the expressions in them. Torch 2.11 to 2.15."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

_WEAK = "_dynamo_weak_dynamic_indices"  # what torch._dynamo.maybe_mark_dynamic writes
_PROPAGATED = "_dynamo_propagated_dynamic_indices"  # what AOTAutograd writes on an input that a graph passes on


@contextmanager
def dynamic_dimensions(tensors: Iterable[tuple[torch.Tensor, Collection[int]]]) -> Iterator[None]:
    """While it is on, torch.compile takes these dimensions for symbols unless a graph needs their values.

    It sets the attributes that `torch._dynamo.maybe_mark_dynamic` does (2.11 to 2.15), and puts them back, together
    with the marks that AOTAutograd leaves on a tensor which a graph only passes on.
    """
    marked = list(tensors)
    before = [(t, name, getattr(t, name, None)) for t, _ in marked for name in (_WEAK, _PROPAGATED)]
    for t, dimensions in marked:
        setattr(t, _WEAK, set(dimensions))
    try:
        yield
    finally:
        for t, name, old in before:
            if old is not None:
                setattr(t, name, old)
            elif hasattr(t, name):
                delattr(t, name)


def expression_of(symbol: torch.SymInt | torch.SymFloat | torch.SymBool) -> Any:
    """The sympy expression of a symbolic number (`SymNode.expr`, torch 2.11 to 2.15)."""
    return symbol.node.expr


def hint_of(symbol: torch.SymInt | torch.SymFloat | torch.SymBool) -> Any:
    """The value for which a symbolic number was traced (`SymNode.hint`, 2.11 to 2.15); None for one of run time."""
    return symbol.node.hint


def evaluate(expression: Any, symbols: Mapping[Any, Any]) -> Any:
    """A sympy expression computed in Python from values or `torch.fx` proxies of its symbols (2.11 to 2.15)."""
    return sympy_interp(PythonReferenceAnalysis, dict(symbols), expression)
