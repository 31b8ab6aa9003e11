"""`torch.fx` graphs as AOTAutograd takes them, and their sentinel node. Torch 2.11 to 2.13."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx
from torch._functorch._aot_autograd.descriptors import PlainAOTInput, PlainAOTOutput, TangentAOTInput
from torch.fx.graph import _BoxedCodeGen

__all__ = ["PlainAOTInput", "PlainAOTOutput", "TangentAOTInput", "boxed", "marked_boxed", "root_of"]


def boxed(graph: fx.GraphModule) -> Callable[[list[Any]], Any]:
    """A graph as a callable that takes one list and empties it, so that an input is freed after its last use.

    The graph's own code is changed.
    """
    graph.graph.set_codegen(_BoxedCodeGen())
    graph.recompile()

    def call(arguments: list[Any]) -> Any:
        return graph.forward(arguments)

    return marked_boxed(call)


def marked_boxed(call: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """A callable with the mark by which AOTAutograd knows that it empties its list (`_boxed_call`, 2.11 to 2.13)."""
    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def root_of(graph: fx.Graph) -> fx.Node:
    """The sentinel before the first node of a graph, to append to (`Graph._root`, torch 2.11 to 2.13)."""
    return graph._root
