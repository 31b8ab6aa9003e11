"""Classes that Inductor is configured with, which it pickles for the keys of its caches. Torch 2.11 to 2.15.

Imported by `planner.compat.inductor` once a plan needs Inductor.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch._inductor import graph as graph_module
from torch._inductor.choices import InductorChoices
from torch._inductor.codegen.cpp import CppScheduling
from torch._inductor.codegen.wrapper import AllocateLine
from torch._inductor.custom_graph_pass import CustomGraphPass, CustomPartitionerFn
from torch._inductor.graph import GraphLowering
from torch._inductor.pattern_matcher import FailedMatch, Match, PatternExpr
from torch._inductor.virtualized import V

AGAIN = "runs_again"  # in a node's `meta`: whether its op has run before in the step
STEP = "planner_step"  # in a node's `meta`: the step of a schedule that it is of
RULES = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()  # what is compiled depends on this module


class _Hook:
    """What stands for a hook of ours in the keys of caches, and in copies of the settings."""

    def __reduce__(self) -> Any:
        return str, (self.uuid(),)  # type: ignore[attr-defined]

    def __deepcopy__(self, memo: Any) -> Any:
        return self


class Partitioner(_Hook, CustomPartitionerFn):
    """A partition of ours (`config.custom_partitioner_fn`); in keys of caches it stands for the steps of its nodes.

    Args:
        partition: as `CustomPartitionerFn`.
        settings: what else the code depends on that no key tells.
    """

    def __init__(
        self, partition: Callable[..., tuple[fx.GraphModule, fx.GraphModule]], settings: object = None
    ) -> None:
        self.partition, self.settings = partition, settings
        self.key = ""

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        graphs = self.partition(gm, joint_inputs, **kwargs)
        steps = [(n.name, n.meta.get(STEP)) for graph in graphs for n in graph.graph.nodes]
        self.key = hashlib.sha256(repr((steps, self.settings, RULES)).encode()).hexdigest()
        return graphs

    def uuid(self) -> str:
        return f"planner {self.key}"


class First(_Hook, CustomGraphPass):
    """A pass of ours over a joint graph before Inductor's own (`config.joint_custom_pre_pass`), after the user's.

    What is compiled does not depend on it but by the graph, which is in the keys of caches.

    Args:
        graph_pass: ours.
        others: what the setting was before: a pass, several of them, or None.
    """

    def __init__(self, graph_pass: Callable[[fx.Graph], None], others: Any) -> None:
        self.graph_pass = graph_pass
        self.others = tuple(others) if isinstance(others, (list, tuple)) else (others,) if others else ()

    def __call__(self, graph: fx.Graph) -> None:
        for each in (*self.others, self.graph_pass):
            each(graph)

    def uuid(self) -> str | None:
        others = [each.uuid() if isinstance(each, CustomGraphPass) else None for each in self.others]
        return None if None in others else f"planner {self.graph_pass.__name__} {RULES} {others}"


class Near(InductorChoices):
    """Fuses what a schedule runs close together (`config.inductor_choices_class`): `near` steps apart, at most."""

    near = 0

    def can_fuse(self, scheduler: Any, node1: Any, node2: Any, shared_data_score: int) -> bool:  # type: ignore[override]
        if far((node1, node2), self.near):
            return False
        return bool(InductorChoices.can_fuse(scheduler, node1, node2, shared_data_score))

    def uuid(self) -> str:
        return f"planner {self.near} {RULES}"


@contextmanager
def chosen(near: int) -> Iterator[None]:
    """While it is on, what lies further apart in a schedule than so many steps stays apart in the code, too.

    - Only what is near is fused. Inductor keeps the choices that a thread made first (`V.choices`), whatever the
      setting is later.
    - Functions of C++ end before a loop that is far from their first. Inductor puts all loops between calls of
      other libraries into one function; its buffers are allocated before it runs and freed after (`CppScheduling`).
    - A buffer waits for its next use only where that is near (`AllocateLine`): Inductor holds it as long as its own
      estimate of the peak, which is too high, is not reached.
    - Patterns match only what is near (`PatternExpr`): `mm` and a late `add` become one `addmm` where the `add` was,
      and what the `mm` reads is held until then.
    - Convolutions in groups that run again decide nothing about layouts (`GraphLowering.decide_layout_opt`): one makes
      Inductor lay out all of a backward pass channels last, for which the gradients of depthwise convolutions take many
      times the workspace. Others do, so that what they make again has the layout of what the forward pass has saved.
    - Inputs that the backward pass needs are saved as they come (`get_user_visible_output_strides`): of weights of
      convolutions Inductor saves copies that are channels last.
    """
    codegen_node, should_reuse, match = CppScheduling.codegen_node, AllocateLine.should_reuse_buffer, PatternExpr.match
    decide_layout, visible_strides = GraphLowering.decide_layout_opt, graph_module.get_user_visible_output_strides
    choices = Near()
    choices.near = near

    def codegen(self: Any, node: Any) -> None:
        codegen_node(self, node)
        nodes = self.scheduler.nodes
        following = nodes[nodes.index(node) + 1 :][:1]
        if far((*self.kernel_group.scheduled_nodes, *following), near):
            self._set_flush_status(True)

    def reuse(self: Any, free_line: Any, size: int) -> bool:
        nodes = V.graph.scheduler.nodes
        if far((nodes[free_line.scheduler_node_index], nodes[self.scheduler_node_index]), near):
            return False
        return bool(should_reuse(self, free_line, size))

    def near_match(self: Any, node: fx.Node) -> Any:
        found = match(self, node)
        apart = isinstance(found, Match) and _apart(_steps(found.nodes), near)
        return FailedMatch("far apart in the schedule") if apart else found

    def decide(gm: fx.GraphModule, *, is_inference: bool) -> bool:
        convolutions = [node for node in gm.graph.nodes if node.target is torch.ops.aten.convolution.default]
        first = any(not node.meta.get(AGAIN) for node in convolutions)
        return (first or not any(map(_in_groups, convolutions))) and bool(decide_layout(gm, is_inference=is_inference))

    def visible(g: fx.Graph) -> dict[fx.Node, Any]:
        found: dict[fx.Node, Any] = visible_strides(g)
        inputs = [n for n in g.output_node().all_input_nodes if n.op == "placeholder"]
        return {**{n: n.meta["val"].stride() for n in inputs if isinstance(n.meta["val"], torch.Tensor)}, **found}

    with (
        mock.patch.object(graph_module, "get_user_visible_output_strides", visible),
        mock.patch.object(GraphLowering, "decide_layout_opt", staticmethod(decide)),
        mock.patch.object(CppScheduling, "codegen_node", codegen),
        mock.patch.object(AllocateLine, "should_reuse_buffer", reuse),
        mock.patch.object(PatternExpr, "match", near_match),
        V.set_choices_handler(choices),
    ):
        yield


def _in_groups(convolution: fx.Node) -> bool:
    return bool(convolution.args[8] != 1)


def far(scheduled: Iterable[Any], near: int) -> bool:
    """Whether any two nodes of Inductor's scheduler are of steps that lie further apart than so many."""
    return _apart({step for node in scheduled for step in steps_of(node)}, near)


def _apart(steps: set[int], near: int) -> bool:
    return bool(steps) and max(steps) - min(steps) > near


def steps_of(scheduled: Any) -> set[int]:
    """The steps that a node of Inductor's scheduler stands for: `meta[STEP]` of what it realises."""
    return _steps(node for each in scheduled.get_nodes() if (node := origin_of(each.node)) is not None)


def _steps(nodes: Iterable[fx.Node]) -> set[int]:
    return {node.meta[STEP] for node in nodes if STEP in node.meta}


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
