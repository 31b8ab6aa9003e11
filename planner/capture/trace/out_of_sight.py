"""Callables of backward graphs, which modes that record the training loop are to see from outside only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from planner.compat.autograd import in_backward
from planner.compat.dispatch import lasting_modes_off
from planner.compat.fx import takes_a_list


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
            return results

    return takes_a_list(call)
