"""Callables of backward graphs, which modes that record the training loop are to see from outside only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from planner.compat.autograd import before_node, in_backward, leaf_nodes, running_node
from planner.compat.dispatch import lasting_modes_off
from planner.compat.fx import takes_a_list
from planner.core.call import tensors_in


def out_of_sight(run: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """A backward graph's callable that modes which record the training loop do not see: they are told its results.

    They do not see either where the engine puts these: under a mode, it would add gradients of one parameter to each
    other out of place. For each node, it takes the modes from where the backward pass began (`Engine::thread_main`,
    torch 2.11 to 2.15).
    """

    def call(arguments: list[Any]) -> Any:
        with lasting_modes_off(put_back=not in_backward()) as recording:
            results = run(arguments)
            for mode in recording:
                mode.planned_results(results)
            if recording and in_backward():
                _sparse_out_of_sight(results)
            return results

    return takes_a_list(call)


def _sparse_out_of_sight(results: Any) -> None:
    """Have the engine put sparse gradients where they belong without the modes, too: under one, it copies them."""
    if shapes := {t.shape for t in tensors_in(results) if t.layout == torch.sparse_coo}:
        for node in leaf_nodes(running_node()):
            if node.variable.shape in shapes:
                before_node(node, _modes_off)


def _modes_off() -> None:
    with lasting_modes_off(put_back=False):
        pass
