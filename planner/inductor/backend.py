"""Dynamo graphs through Inductor's pipeline: captured, looked at without compiling, or compiled as planned."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import fx

from planner.capture.joint_graph import is_tangent
from planner.capture.passes.tangents import take_marks_off, whole_gradients
from planner.capture.regions.fingerprint import fingerprint
from planner.capture.regions.region import Region
from planner.capture.shapes import (
    at_hints,
    fakes_at_hints,
    has_fixed_sizes,
    has_symbols,
    symbolic_again,
    values_at_hints,
)
from planner.capture.trace.arrival import Arrivals
from planner.capture.trace.dynamo import GraphCompiler, Partition, traced_alike
from planner.capture.trace.layers import rnns_in_steps
from planner.capture.trace.out_of_sight import out_of_sight
from planner.compat.fx import boxed
from planner.compat.inductor import Generated, Inner, compile_graph, copied, default_partition, generate, saving_donated
from planner.compat.joint_trace import Traces, shared
from planner.core.recipe import Settings
from planner.errors import CaptureError
from planner.inductor.dry_run import DryRun, dry_run
from planner.inductor.realise import read

Graphs = tuple[fx.GraphModule, fx.GraphModule]


@dataclass(frozen=True)
class Look:
    """What Inductor would make of a step, by a partition.

    Attributes:
        forward, backward: the wrappers that it generates.
        run: what they do, on fake tensors.
    """

    forward: Generated
    backward: Generated
    run: DryRun


@dataclass(eq=False)
class Source:
    """A Dynamo graph that was captured, to be partitioned again and again.

    Attributes:
        graph: as Dynamo hands it to a backend.
        inputs: fake tensors that it is called with.
        cut: the outputs that get no gradient.
        region: its joint graph, after Inductor's passes.
        traces: AOTAutograd's trace of it, which is not made again for each look.
        looks: what was seen of it, by partition and settings; plans that are made later find it there.
    """

    graph: fx.GraphModule
    inputs: Sequence[Any]
    cut: Sequence[int]
    region: Region
    traces: Traces = field(default_factory=OrderedDict)
    looks: dict[Any, Look] = field(default_factory=dict)

    def is_like(self, other: Source) -> bool:
        """Whether Inductor sees no difference to another one: the same step of the same model, captured again."""
        return self._content == other._content and not has_symbols(self.inputs)

    @cached_property
    def _content(self) -> Any:
        graphs = self.graph.graph, self.region.joint.graph
        names = [[node.name for node in graph.nodes] for graph in graphs]
        given = [
            (t.shape, t.stride(), t.dtype, t.device, t.requires_grad) if isinstance(t, torch.Tensor) else t
            for t in self.inputs
        ]
        return tuple(self.cut), self.region.fingerprint, fingerprint(graphs[0]), names, given


@dataclass
class _Looking:
    """The compiler of single graphs that compiles nothing."""

    generated: list[Generated] = field(default_factory=list)
    inputs: list[Sequence[Any]] = field(default_factory=list)

    def compiler(self, _own: Inner) -> Inner:
        def compile(graph: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Callable[[list[Any]], Any]:
            looked = fx.GraphModule(graph, copy.deepcopy(graph.graph))
            self.generated.append(generate(looked, inputs, **options))
            if has_symbols(inputs):
                values_at_hints(looked.graph)
            self.inputs.append(inputs)
            return boxed(graph)

        return compile

    def look(self, parts: Graphs, results: int) -> Look:
        """What was seen, once both graphs were."""
        (forward, backward), (given, coming) = self.generated, self.inputs
        held = parts[1].graph.find_nodes(op="placeholder")
        mode, (given, coming) = fakes_at_hints((list(given), list(coming)))
        tangents = [x for x, n in zip(coming, held, strict=True) if is_tangent(n)]
        return Look(forward, backward, dry_run(mode, forward, backward, given, tangents, results))


def capturing(sources: list[Source], settings: Settings = ()) -> GraphCompiler:
    """A compiler that runs Inductor's own partition op by op, and notes what it was given.

    Args:
        sources: takes one entry for each graph that is compiled.
        settings: what Inductor is set to meanwhile.
    """

    def compile(
        graph: fx.GraphModule, examples: Sequence[Any], partition: Partition, arrivals: Arrivals
    ) -> Callable[..., Any]:
        own, found = copied(graph), list[Region]()

        def split(joint: fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, **options: Any) -> Graphs:
            region = _read(joint, num_fwd_outputs, arrivals)
            partition(region)
            found.append(region)
            forward, backward = _own_partition(joint, inputs, num_fwd_outputs=num_fwd_outputs, **options)
            arrivals.write(forward, backward)
            return forward, backward

        def op_by_op(_own: Inner) -> Inner:
            return lambda one, _, **options: arrivals.compile(one) if options.get("is_backward") else boxed(one)

        with rnns_in_steps(lstms_alone=True):
            compiled = compile_graph(graph, examples, split, op_by_op, first=take_marks_off, settings=dict(settings))
        # what Dynamo gives a backend has no symbols in it, but for sizes themselves
        symbolic = [n.meta.get("example_value") for n in graph.graph.find_nodes(op="placeholder")]
        inputs = symbolic if has_symbols(symbolic) else examples
        sources.extend(Source(own, inputs, tuple(arrivals.cut), region) for region in found)
        return compiled

    return compile


def _read(joint: fx.GraphModule, num_fwd_outputs: int, arrivals: Arrivals) -> Region:
    """The region of a joint graph, with the sizes for which it was traced in the place of symbols."""
    arrivals.read(joint.graph)
    at_hints(joint)
    return read(joint, num_fwd_outputs)


def _symbolic(parts: Graphs) -> Graphs:
    return symbolic_again(parts[0]), symbolic_again(parts[1])


def _own_partition(joint: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Graphs:
    """Inductor's; two whole gradients that are computed alike stay two, as more may come to either."""
    parts = default_partition(joint, inputs, symbolic_again, **options)
    if whole_gradients(joint.graph).keys() <= whole_gradients(parts[1].graph).keys():
        return parts
    return default_partition(joint, inputs, symbolic_again, cse=False, **options)


def look(source: Source, partition: Partition | None, settings: Settings = (), near: int = 0) -> Look:
    """What Inductor would make of a captured graph by a partition, or by its own for None; nothing is compiled.

    Args:
        source: the graph.
        partition: of its region.
        settings: what Inductor is set to meanwhile.
        near: as for `compile_graph`, with a partition of ours.

    Raises:
        CaptureError: the graph is not traced to the same joint graph again, or the code that Inductor generates is for
            one size where its inputs are of many.
    """
    looking, found = _Looking(), list[tuple[Graphs, int]]()

    def split(joint: fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, **options: Any) -> Graphs:
        region = _read(joint, num_fwd_outputs, Arrivals(source.cut, lambda: None))
        if region.fingerprint != source.region.fingerprint:
            raise CaptureError(
                "the step has another graph each time that it is traced, and mode='inductor' has to trace it again: "
                "plan with mode='aten'"
            )
        parts = (
            _own_partition(joint, inputs, num_fwd_outputs=num_fwd_outputs, **options)
            if partition is None
            else _symbolic(partition(region))
        )
        found.append((parts, num_fwd_outputs))
        return parts

    apart = None if partition is None else near
    with traced_alike(), rnns_in_steps(lstms_alone=True), shared(source.traces, source.graph, settings):
        compile_graph(
            source.graph,
            source.inputs,
            split,
            looking.compiler,
            first=take_marks_off,
            near=apart,
            settings=dict(settings),
        )
    if has_fixed_sizes(source.region.joint.graph):
        raise CaptureError(
            "sizes change from step to step, and Inductor compiles an op of the step for one size alone, as it does "
            "convolutions: plan with mode='aten', which has one graph for all, or pad batches to a few sizes"
        )
    return looking.look(*found[-1])


def compiling(*, own: bool = False, settings: Settings = (), near: int = 0) -> GraphCompiler:
    """The compiler of planned graphs.

    Args:
        own: whether Inductor partitions the graph itself; the partition that is given only says whether it is the one.
        settings: what Inductor is set to meanwhile.
        near: as for `look()`.
    """

    def compile(
        graph: fx.GraphModule, examples: Sequence[Any], partition: Partition, arrivals: Arrivals
    ) -> Callable[..., Any]:
        def split(joint: fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, **options: Any) -> Graphs:
            forward, backward = _symbolic(partition(_read(joint, num_fwd_outputs, arrivals)))
            if own:
                forward, backward = _own_partition(joint, inputs, num_fwd_outputs=num_fwd_outputs, **options)
            arrivals.write(forward, backward)
            return forward, backward

        def compiler(own: Inner) -> Inner:
            def compile_one(one: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
                compiled = own(one, inputs, **options)
                if not options.get("is_backward"):
                    return compiled
                return out_of_sight(arrivals.compile(one, saving_donated(compiled)))

            return compile_one

        apart = None if own else near
        with rnns_in_steps(lstms_alone=True):
            return compile_graph(
                graph, examples, split, compiler, first=take_marks_off, near=apart, settings=dict(settings)
            )

    return compile
