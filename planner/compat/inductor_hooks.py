"""Classes that Inductor is configured with, which it pickles for the keys of its caches. Torch 2.11 to 2.15.

Imported by `planner.compat.inductor` once a plan needs Inductor.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch import fx
from torch._inductor.choices import InductorChoices
from torch._inductor.codegen.cpp import CppScheduling
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch._inductor.virtualized import V

STEP = "planner_step"  # in a node's `meta`: the step of a schedule that it is of
# steps; what lies further apart is neither fused nor in one function of C++: one would be held long, or made early
FAR = 12


class Partitioner(CustomPartitionerFn):
    """A partition of ours (`config.custom_partitioner_fn`); in keys of caches it stands for the steps of its nodes."""

    def __init__(self, partition: Callable[..., tuple[fx.GraphModule, fx.GraphModule]]) -> None:
        self.partition = partition
        self.key = ""

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        graphs = self.partition(gm, joint_inputs, **kwargs)
        steps = [(n.name, n.meta.get(STEP)) for graph in graphs for n in graph.graph.nodes]
        self.key = hashlib.sha256(repr((steps, FAR)).encode()).hexdigest()
        return graphs

    def uuid(self) -> str:
        return f"planner {self.key}"

    def __reduce__(self) -> Any:
        return str, (self.uuid(),)

    def __deepcopy__(self, memo: Any) -> Partitioner:
        return self


class Near(InductorChoices):
    """Fuses what a schedule runs close together (`config.inductor_choices_class`)."""

    @staticmethod
    def can_fuse(scheduler: Any, node1: Any, node2: Any, shared_data_score: int) -> bool:
        steps = steps_of(node1) | steps_of(node2)
        if steps and max(steps) - min(steps) > FAR:
            return False
        return bool(InductorChoices.can_fuse(scheduler, node1, node2, shared_data_score))

    def uuid(self) -> str:
        return f"planner {FAR}"


@contextmanager
def chosen() -> Iterator[None]:
    """While it is on, only what is near is fused, and functions of C++ end before a loop that is far from their first.

    Inductor keeps the choices that a thread made first (`V.choices`), whatever the setting is later. And it puts all
    loops between two calls of other libraries into one function, whose buffers are allocated before it runs and freed
    after it (`CppScheduling`, 2.11 to 2.15).
    """
    codegen_node = CppScheduling.codegen_node

    def codegen(self: Any, node: Any) -> None:
        codegen_node(self, node)
        nodes = self.scheduler.nodes
        following = nodes[nodes.index(node) + 1 :][:1]
        steps = {s for n in (*self.kernel_group.scheduled_nodes, *following) for s in steps_of(n)}
        if steps and max(steps) - min(steps) > FAR:
            self._set_flush_status(True)

    with mock.patch.object(CppScheduling, "codegen_node", codegen), V.set_choices_handler(Near()):
        yield


def steps_of(scheduled: Any) -> set[int]:
    """The steps that a node of Inductor's scheduler stands for: `meta[STEP]` of what it realises."""
    nodes = (origin_of(each.node) for each in scheduled.get_nodes())
    return {node.meta[STEP] for node in nodes if node is not None and STEP in node.meta}


def origin_of(buffer: Any) -> fx.Node | None:
    """The node of the graph whose result a buffer is; where Inductor does not say, the last that went into it."""
    if buffer is None:
        return None
    origin = buffer.get_origin_node() if hasattr(buffer, "get_origin_node") else None
    if origin is None:
        candidates = [n for n in getattr(buffer, "origins", ()) if n.op == "call_function"]
        order = {n: at for at, n in enumerate(candidates[0].graph.nodes)} if candidates else {}
        origin = max(candidates, key=lambda n: order.get(n, -1), default=None)
    return origin if isinstance(origin, fx.Node) else None
