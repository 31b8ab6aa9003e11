"""`torch.fx` graphs as AOTAutograd takes them, and their sentinel node. Torch 2.11 to 2.15."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import fx
from torch._functorch._aot_autograd.descriptors import PlainAOTInput, PlainAOTOutput, TangentAOTInput
from torch.fx.graph import _BoxedCodeGen

from planner.compat.bindings import bind

__all__ = ["PlainAOTInput", "PlainAOTOutput", "TangentAOTInput", "boxed", "draws_kept", "root_of", "takes_a_list"]


def boxed(graph: fx.GraphModule) -> Callable[[list[Any]], Any]:
    """A graph as a callable that takes one list and empties it, so that an input is freed after its last use.

    One that nothing uses is freed at once. The graph's own code is changed.
    """
    bind(graph.graph)
    graph.graph.set_codegen(_BoxedCodeGen())
    graph.recompile()

    unread = [at for at, n in enumerate(graph.graph.find_nodes(op="placeholder")) if not n.users]

    def call(arguments: list[Any]) -> Any:
        for at in unread:
            arguments[at] = None
        return graph.forward(arguments)

    return takes_a_list(call)


def draws_kept() -> AbstractContextManager[None]:
    """While it is on, draws of random numbers that nothing uses are no dead code: later ones come after them.

    In a tracing context, `eliminate_dead_code` asks for a setting of Inductor, whoever compiles (2.11 to 2.15).
    """
    import torch._inductor.config as settings

    patched: AbstractContextManager[None] = settings.patch(fallback_random=True)
    return patched


def takes_a_list(call: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Mark a callable in the place of a compiled graph as one that takes a list and empties it (2.11 to 2.15)."""
    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def root_of(graph: fx.Graph) -> fx.Node:
    """The sentinel before the first node of a graph, to append to (`Graph._root`, torch 2.11 to 2.15)."""
    return graph._root
