"""The backward pass of a compiled graph, by which gradients arrive: those that do not are None, as are theirs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import fx

from planner.capture.joint_graph import is_tangent
from planner.capture.passes.tangents import leave_out
from planner.compat.autograd import leaves_after_this_node, skip_undefined
from planner.compat.fx import boxed
from planner.errors import ApplyError

Boxed = Callable[[list[Any]], Any]


def by_arrival(backward: fx.GraphModule) -> Boxed:
    """A backward graph as a callable for AOTAutograd, which writes it anew for each set of gradients that arrives.

    Where some do not, ops that only they would need do not run, so that the pass holds no more than with all of them.
    """
    whole = boxed(backward)
    inputs = backward.graph.find_nodes(op="placeholder")
    entering = {at: n for at, n in enumerate(inputs) if is_tangent(n) and n.users}
    written: dict[frozenset[int], Boxed] = {}

    def call(arguments: list[Any]) -> Any:
        missing = frozenset(at for at in entering if arguments[at] is None)
        if not missing:
            return whole(arguments)
        if missing not in written:
            written[missing] = _without(backward, missing)
        for leaf in leaves_after_this_node():
            skip_undefined(leaf)
        return written[missing](arguments)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def _without(backward: fx.GraphModule, missing: frozenset[int]) -> Boxed:
    graph = copy.deepcopy(backward.graph)
    leave_out(graph, [n for at, n in enumerate(graph.find_nodes(op="placeholder")) if at in missing])
    return boxed(fx.GraphModule(backward, graph, class_name=type(backward).__name__))


def refuse_second_order() -> None:
    """Raise ApplyError: a gradient that came out of a planned graph is itself differentiated."""
    raise ApplyError(
        "gradients of a planned model were differentiated again (create_graph=True: a gradient penalty, a Hessian), and "
        "its graphs have first derivatives only. remove() the plan for it, or plan only the parts of the model that it "
        "does not go through. The next step trains by the plan; zero_grad() first"
    )
